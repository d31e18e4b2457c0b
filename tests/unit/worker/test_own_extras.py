"""The extras of a rank at a commit that it did not live to see."""

import math

import pytest
import torch

from taskd.worker.state.extras import Extras, encode_part
from taskd.worker.state.own_extras import Told, changed, is_different, settle, table_of


class Plain:
    """Without an `==` of its own: two of them are never equal."""

    def __reduce__(self):
        return Plain, ()


class Raising:
    def __eq__(self, other):
        raise ValueError("ambiguous")

    __hash__ = None


NAN = float("nan")


@pytest.mark.parametrize(("one", "other"), [
    (1, 1), (1, 1.0), (NAN, math.nan), ("a", "a"), (None, None), ([1, [NAN]], [1, [math.nan]]),
    ({"a": {"b": NAN}}, {"a": {"b": math.nan}}), ({3, 1, 2}, {1, 2, 3}), (b"a", b"a"),
    (torch.tensor([1.0, NAN]), torch.tensor([1.0, NAN])), (Plain(), Plain()),
    (Raising(), Raising()), (torch.zeros(2, dtype=torch.bool), torch.zeros(2, dtype=torch.bool)),
])  # fmt: skip
def test_the_same_or_perhaps_the_same(one, other) -> None:
    assert not is_different(one, other)


@pytest.mark.parametrize(("one", "other"), [
    (1, 2), (1.0, NAN), ("a", "b"), (None, 0), ([1], [1, 2]), ({"a": 1}, {"b": 1}), ({1}, {2}),
    ({"a": [1, {"b": 2}]}, {"a": [1, {"b": 3}]}), (torch.zeros(2), torch.ones(2)),
    (torch.zeros(2), torch.zeros(3)), (torch.zeros(1), torch.zeros(1, dtype=torch.int)),
    (Plain(), 3),
])  # fmt: skip
def test_different_for_certain(one, other) -> None:
    assert is_different(one, other)


def test_of_arrays_one_element_decides() -> None:
    numpy = pytest.importorskip("numpy")
    assert is_different(numpy.array([1, 2]), numpy.array([1, 3]))
    assert not is_different(numpy.array([1.0, NAN]), numpy.array([1.0, NAN]))


def extras(is_pending=False, random=1, **items):
    """Of one rank: values, and the positions `walker` and `schedule`, if they are given."""
    positions = {role: items.pop(role) for role in ("walker", "schedule") if role in items}
    part = encode_part(items, positions, {})
    return Extras({"torch": random}, {"train": part}, pending_if(is_pending))


def pending_if(is_pending):
    return frozenset({"train"} if is_pending else ())


def told(now, before=None, late=None):
    late = late if late is None else frozenset(late)
    return Told(table_of(now, "train"), table_of(before, "train"), late)


def settled(found, before, other):
    return settle("rank 1", "train", found, before, other, walkers=["walker"])


def test_what_was_the_same_is_theirs_and_what_differed_is_its_own(caplog) -> None:
    part, random = settled(
        extras(epoch=1, cursor=106, schedule=3, walker=7, is_pending=True),
        extras(epoch=1, cursor=105, schedule=3, walker=6),
        told(
            extras(epoch=2, cursor=6, schedule=4, walker=17, random=2),
            extras(epoch=1, cursor=5, schedule=3, walker=6),
        ),
    )
    assert part.values == {"epoch": 2, "cursor": 106}
    # what walks through data was read before the forward pass, whatever the others did since
    assert part.positions == {"schedule": 4, "walker": 7}
    assert random == {"torch": 2}
    assert "rank 1: TrainState 'train': what differs between ranks is as this rank" in caplog.text
    assert caplog.text.rstrip().endswith("missing for that step in cursor")


@pytest.mark.parametrize(("late", "named"), [
    ([], ""), ([("values", "other")], ""), ([("values", "cursor")], "cursor"),
    ([("random", "torch"), ("values", "cursor")], "cursor, the generator of torch"),
])  # fmt: skip
def test_a_warning_names_what_the_others_have_changed_late(caplog, late, named) -> None:
    found, before = extras(cursor=6, random=11, is_pending=True), extras(cursor=5, random=10)
    part, random = settled(
        found, before, told(extras(cursor=1, random=2), extras(cursor=0, random=1), late)
    )
    assert (part.values, random) == ({"cursor": 6}, {"torch": 11})
    assert caplog.text.rstrip().endswith(f"missing for that step in {named}") == bool(named)
    assert bool(caplog.text) == bool(named)


def test_all_were_the_same(caplog) -> None:
    one = extras(epoch=1)
    part, _ = settled(extras(epoch=1, is_pending=True), one, told(extras(epoch=2), one))
    assert part.values == {"epoch": 2}
    assert caplog.text == ""


@pytest.mark.parametrize(("before", "theirs_before"), [
    (None, extras(cursor=5)), (extras(cursor=105), None),
])  # fmt: skip
def test_of_what_is_not_known_values_are_theirs_and_the_rest_its_own(before, theirs_before) -> None:
    found = extras(cursor=106, schedule=8, random=3, is_pending=True)
    part, random = settled(found, before, told(extras(cursor=6, schedule=9), theirs_before))
    assert (part.values, part.positions) == ({"cursor": 6}, {"schedule": 8})
    assert random == {"torch": 3}


def test_what_they_have_not_changed_late_is_its_own_however_it_was_before(caplog) -> None:
    """A sum that begins at zero on all ranks: known from the forward pass on."""
    found, before = extras(total=5, is_pending=True), extras(total=0)
    part, _ = settled(found, before, told(extras(total=7), extras(total=0), late=[]))
    assert part.values == {"total": 5}
    assert caplog.text == ""


def test_a_value_that_only_one_rank_has() -> None:
    found, before = extras(best=3, is_pending=True), extras(best=2)
    part, _ = settled(found, before, told(extras(), extras(), late=[]))
    assert part.values == {"best": 3}
    other, _ = settled(extras(is_pending=True), extras(), told(found, before, late=["best"]))
    assert other.values == {}


def with_buffers(is_pending=False, **buffers):
    part = encode_part({}, {}, buffers)
    return Extras({"torch": 1}, {"train": part}, pending_if(is_pending))


@pytest.mark.parametrize(("mine", "late", "kept"), [
    (b"same", True, False),  # an average over steps: it has come with the copy
    (b"same", False, True), (b"other", False, True),  # running statistics of the forward pass
    (b"other", True, True),
])  # fmt: skip
def test_buffers(mine, late, kept) -> None:
    found, before = with_buffers(is_pending=True, count=b"pending"), with_buffers(count=mine)
    changed_late = [("buffers", "count")] if late else []
    theirs = told(with_buffers(count=b"now"), with_buffers(count=b"same"), changed_late)
    part, _ = settled(found, before, theirs)
    assert part.buffers == ({"count": b"pending"} if kept else {})


def test_what_changed_between_two_moments() -> None:
    one, other = extras(a=1, b=2, c=3), extras(a=1, b=4, d=5)
    differing = changed(table_of(one, "train"), table_of(other, "train"))
    assert differing == {("values", name) for name in "bcd"}
    assert table_of(one, "other") is None
    assert table_of(None, "train") is None
