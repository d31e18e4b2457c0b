"""Names that are one tensor in one copy of the state and several in the other; and views."""

import exchanges
import pytest
import torch

from taskd.errors import StateError
from taskd.worker.objects.named import Named
from taskd.worker.restore import moving
from taskd.worker.state import flat

ONE = {"model.first": [3.0, 4.0], "model.second": [3.0, 4.0]}
TWO = {"model.first": [1.0, 1.0], "model.second": [2.0, 2.0]}
VIEWS = {
    "model.conjugate": [1 - 2j, 3 - 4j],
    "model.negative": [-2.0, -4.0],
    "model.expanded": [5.0, 5.0, 5.0],
}
CASES = [
    (exchanges.Views, exchanges.fill_views, VIEWS),
    (exchanges.Buffers, exchanges.make_one, ONE),
    (exchanges.OneBuffer, exchanges.make_two, TWO),
    (exchanges.OneBuffer, exchanges.make_one, ONE),
]


def moved(old, new):
    named = Named(new.roles)
    moving.move(old, new, named, is_kept=True)
    return named


def read(old, new):
    """As from a checkpoint."""
    tensors, plain = flat.flatten(old, Named(old.roles))
    named = Named(new.roles)
    shapes = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    targets = flat.targets(new, named, plain, shapes)
    with torch.no_grad():
        for name, target in targets.items():
            target.copy_(tensors[name])
    flat.load(new, named, plain, targets)
    return named


@pytest.mark.parametrize("take", [moved, read])
@pytest.mark.parametrize(("build", "change", "expected"), CASES)
def test_each_name_has_the_content_that_it_had(take, build, change, expected):
    before, after = build(), build()
    change(before)
    named = take(exchanges.hold(model=before), exchanges.hold(model=after))
    now = dict(after.named_buffers(remove_duplicate=False))
    assert {f"model.{name}": tensor.tolist() for name, tensor in now.items()} == expected
    assert all(now[name.removeprefix("model.")] is one for name, one in named.tensors.items())
    assert named.distinct.keys() == Named(exchanges.hold(model=before).roles).distinct.keys()


def test_a_checkpoint_that_does_not_say_what_was_one_tensor_is_read():
    before, after = exchanges.OneBuffer(), exchanges.OneBuffer()
    exchanges.make_two(before)
    old, new = exchanges.hold(model=before), exchanges.hold(model=after)
    tensors, plain = flat.flatten(old, Named(old.roles))
    del plain["shared"]
    shapes = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    assert flat.targets(new, Named(new.roles), plain, shapes).keys() == tensors.keys()


@pytest.mark.parametrize("take", [moved, read])
def test_one_parameter_that_was_two_is_refused(take):
    before, after = exchanges.OneParameter(), exchanges.OneParameter()
    exchanges.make_two_parameters(before)
    old, new = exchanges.hold(model=before), exchanges.hold(model=after)
    with pytest.raises(StateError, match=r"model\.first and model\.second are one|second is only"):
        take(old, new)


@pytest.mark.slow
@pytest.mark.parametrize(("build", "change", "expected"), CASES)
def test_each_name_has_the_content_that_it_has_on_the_other_rank(world, build, change, expected):
    assert world.run(exchanges.exchange_state, build, change, size=2) == [("", expected)] * 2


@pytest.mark.slow
def test_one_parameter_that_is_two_on_the_other_rank_is_refused_by_both(world):
    for text, _ in world.run(
        exchanges.exchange_state, exchanges.OneParameter, exchanges.make_two_parameters, size=2
    ):
        assert "model.first and model.second are one tensor on rank 1, and two on rank 0" in text
