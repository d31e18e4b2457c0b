"""The dicts of a state_dict are of the same kind afterwards, whichever way it has gone."""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LinearLR, MultiStepLR, SequentialLR
from ways import WAYS

from taskd.worker.objects.kinds import dict_as
from taskd.worker.objects.own_state import OwnState
from taskd.worker.objects.roles import Roles
from taskd.worker.state.holding import Holding


class Average:
    """Held by all ranks, as its tensors are large."""

    def __init__(self) -> None:
        self.kept: dict[Any, Any] = OrderedDict(large=torch.ones(8192), counts=Counter("aab"))

    def state_dict(self) -> dict[str, Any]:
        return {"kept": self.kept}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.kept = state["kept"]


def build() -> Holding:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    parts: list[Any] = [LinearLR(optimizer, total_iters=3), MultiStepLR(optimizer, [2, 4, 4])]
    objects = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": SequentialLR(optimizer, parts, milestones=[4]),
        "average": Average(),
    }
    return Holding("train", Roles.sort("train", objects))


def rates(holding: Holding, steps: int) -> list[float]:
    optimizer = holding.roles.optimizers["optimizer"]
    found = []
    for _ in range(steps):
        optimizer.step()
        holding.roles.schedulers["scheduler"].step()
        found.append(optimizer.param_groups[0]["lr"])
    return found


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_what_comes_back_is_of_the_kind_that_was_given(way: Any) -> None:
    source, target = build(), build()
    rates(source, 3)
    way(source, target)
    kept = target.roles.replicas["average"].kept
    assert (type(kept), type(kept["counts"])) == (OrderedDict, Counter)
    assert kept["counts"] == {"a": 2, "b": 1}
    assert torch.equal(kept["large"], torch.ones(8192))
    # at the milestone between them, MultiStepLR asks its own ones for what a Counter alone has
    assert rates(target, 8) == rates(source, 8)


@pytest.mark.parametrize("way", ["another rank", "snapshot"])
def test_what_is_an_attribute_of_an_ordered_dict_comes_back_with_it(way: str) -> None:
    """The state_dict of a module has the versions of its parts there, which loading asks for."""
    source, target = build(), build()
    best = nn.BatchNorm1d(2).state_dict()
    assert best._metadata[""] == {"version": 2}  # type: ignore[attr-defined]
    source.roles.values["best"] = best
    source.roles.replicas["average"].kept = nn.BatchNorm1d(2).state_dict()
    WAYS[way](source, target)
    for found in (target.roles.values["best"], target.roles.replicas["average"].kept):
        assert type(found) is OrderedDict
        assert found._metadata == best._metadata  # type: ignore[attr-defined]


class Window(NamedTuple):
    """What an average may keep of its last steps."""

    length: int
    weights: torch.Tensor


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_tuples_with_names_come_back_as_tuples(way: Any) -> None:
    source, target = build(), build()
    shape = torch.Size([2, 3])
    source.roles.replicas["average"].kept = {"window": Window(3, torch.arange(9000)), "of": shape}
    way(source, target)
    kept = target.roles.replicas["average"].kept
    length, weights = kept["window"]
    assert length == 3
    assert torch.equal(weights, torch.arange(9000))
    assert type(kept["window"]) is tuple
    assert (type(kept["of"]), kept["of"]) == (torch.Size, shape)


def test_what_an_optimizer_keeps_is_of_the_kind_that_it_gave() -> None:
    class Counting(torch.optim.SGD):
        def state_dict(self) -> dict[str, Any]:
            return {**super().state_dict(), "seen": Counter({"a": 2})}

    own = OwnState(Counting(nn.Linear(1, 1).parameters(), lr=0.1), [])
    tree = own.state_dict()["own"]
    assert type(tree["seen"]) is Counter
    assert type(own._unmarked(tree)["seen"]) is Counter


def test_others_become_plain_ones() -> None:
    """Nothing is known of how they are made, and a checkpoint has no room for them."""

    class Own(dict[Any, Any]):
        pass

    assert type(dict_as(Own(a=1), {"a": 2})) is dict
