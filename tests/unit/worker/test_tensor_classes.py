"""Tensors of other classes: carried if their memory is all that they are, else refused."""

import exchanges
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.testing._internal.two_tensor import TwoTensor

from taskd.errors import StateError
from taskd.worker.objects.named import Named
from taskd.worker.restore import chunks
from taskd.worker.restore.manifest import describe
from taskd.worker.state.own_extras import Told


class Loud(nn.Parameter):
    """A parameter with a method of its own."""

    def shout(self):
        return "!"


def two():
    return TwoTensor(torch.ones(2), torch.ones(2))


def manifest_of(**objects):
    holding = exchanges.hold(**objects)
    return describe(holding, Named(holding.roles), 1, Told())


def test_a_tensor_that_holds_others_is_refused_in_a_module():
    model = exchanges.Buffers()
    model.first = two()
    with pytest.raises(
        StateError, match=r"model\.first cannot be carried: it is a TwoTensor, whos"
    ):
        exchanges.hold(model=model)


def test_a_tensor_that_holds_others_is_refused_in_the_memory_of_an_optimizer():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    holding = exchanges.hold(model=model, optimizer=optimizer)
    optimizer.state[model.weight]["small"] = two()
    manifest, _ = describe(holding, Named(holding.roles), 1, Told())
    assert manifest.problem.startswith("optimizer.state.small is a TwoTensor, whose content is")
    with pytest.raises(StateError, match=r"optimizer\.state\.small cannot be carried: it is a Two"):
        exchanges.hold(model=model, optimizer=optimizer)


def test_what_has_the_memory_of_a_tensor_is_carried():
    model = parametrizations.weight_norm(nn.Linear(2, 2))
    model.named = Loud(torch.ones(3))
    model.register_buffer("mean", torch.zeros(2))
    if hasattr(nn, "Buffer"):  # torch 2.5
        model.other = nn.Buffer(torch.ones(2))
    manifest, tensors = manifest_of(model=model)
    assert manifest.problem == ""
    assert len(tensors) == len(Named(exchanges.hold(model=model).roles).tensors)


class Cast(torch.Tensor):
    """Around one tensor of its own form, as a weight that is cast on its way to other ranks."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.size(), dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    def __tensor_flatten__(self):
        return ["inner"], None

    @classmethod
    def __torch_dispatch__(cls, function, types, args, kwargs=None):
        plain = torch.utils._pytree.tree_map_only(cls, lambda one: one.inner, (args, kwargs or {}))
        found = function(*plain[0], **plain[1])
        return cls(found) if function is torch.ops.aten.detach.default else found


def test_one_around_a_single_tensor_is_that_tensor():
    model = exchanges.Buffers()
    model.first = Cast(torch.tensor([1.0, 2.0]))
    manifest, tensors = manifest_of(model=model)
    assert manifest.problem == ""
    number = manifest.named["model.first"].index
    assert chunks._flat_bytes(tensors[number]).tolist() == [0, 0, 128, 63, 0, 0, 0, 64]


@pytest.mark.slow
def test_a_sparse_tensor_is_refused_by_both_ranks_before_anything_is_sent(world):
    """It came when the TrainState was there, which would have refused it."""
    said = world.run(exchanges.exchange_late, exchanges.Buffers, exchanges.make_sparse, size=2)
    for text, _ in said:
        assert "rank 0 cannot send it: model.first is a tensor with layout torch.sparse_coo" in text
