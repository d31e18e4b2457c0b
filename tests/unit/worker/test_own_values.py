"""Plain values at a commit that a rank did not live to see."""

import math

import pytest
import torch

from taskd.worker.state.own_values import is_different, settle

WHO = "rank 1: TrainState 'train'"


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


def test_what_was_the_same_is_theirs_and_what_differed_is_its_own(caplog) -> None:
    pending, before = {"epoch": 1, "cursor": 106}, {"epoch": 1, "cursor": 105}
    theirs, theirs_before = {"epoch": 2, "cursor": 6}, {"epoch": 1, "cursor": 5}
    settled = settle(WHO, pending, before, theirs, theirs_before)
    assert settled == {"epoch": 2, "cursor": 106}
    assert f"{WHO}: plain values that differ between ranks" in caplog.text
    assert "changes in cursor after the forward pass or" in caplog.text


def test_all_were_the_same(caplog) -> None:
    assert settle(WHO, {"epoch": 1}, {"epoch": 1}, {"epoch": 2}, {"epoch": 1}) == {"epoch": 2}
    assert caplog.text == ""


@pytest.mark.parametrize(("before", "theirs_before"), [
    (None, {"cursor": 5}), ({"cursor": 105}, None), ({}, {}), ({"other": 1}, {"cursor": 5}),
])  # fmt: skip
def test_of_what_is_not_known_theirs_is_taken(before, theirs_before) -> None:
    settled = settle(WHO, {"cursor": 106}, before, {"cursor": 6}, theirs_before)
    assert settled == {"cursor": 6}
