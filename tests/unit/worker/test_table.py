"""The names of a state's tensors, from one snapshot to the next: whatever is replaced is seen."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from taskd.worker.objects.named import Named
from taskd.worker.objects.roles import Roles
from taskd.worker.saving.table import Table
from taskd.worker.state import flat
from taskd.worker.state.holding import Holding


@pytest.fixture
def holding() -> Holding:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    return Holding("train", Roles.sort("train", {"model": model, "optimizer": optimizer}), None)


def model_of(holding: Holding) -> Any:
    return holding.roles.modules["model"]


def optimizer_of(holding: Holding) -> Any:
    return holding.roles.optimizers["optimizer"]


def entries_of(holding: Holding) -> dict[str, Any]:
    return next(iter(optimizer_of(holding).state.values()))


def test_training_changes_nothing_of_it(holding: Holding) -> None:
    table = Table(holding)
    for _ in range(2):
        optimizer_of(holding).zero_grad()
        model_of(holding)(torch.randn(5, 3)).sum().backward()
        optimizer_of(holding).step()
        assert table.is_current()
    assert list(table.tensors) == list(flat.tensors(holding, Named(holding.roles)))
    assert all(
        torch.equal(table.tensors[name], tensor)
        for name, tensor in flat.tensors(holding, Named(holding.roles)).items()
    )


@pytest.mark.parametrize("change", [
    lambda held: setattr(model_of(held)[0], "bias", nn.Parameter(torch.zeros(4))),
    lambda held: setattr(model_of(held)[0].weight, "data", torch.zeros(4, 3)),
    lambda held: setattr(model_of(held)[0].weight, "data", model_of(held)[0].weight.data[:2]),
    lambda held: model_of(held)[1].register_buffer("seen", torch.zeros(1)),
    lambda held: model_of(held)[1].__setattr__("running_mean", torch.zeros(4)),
    lambda held: model_of(held).append(nn.Linear(1, 1)),
    lambda held: model_of(held)[0].register_parameter("scale", nn.Parameter(torch.ones(1))),
    lambda held: delattr(model_of(held)[0], "bias"),
    lambda held: entries_of(held).__setitem__("exp_avg", torch.zeros(4, 3)),
    lambda held: entries_of(held).__setitem__("more", torch.zeros(1)),
    lambda held: entries_of(held).pop("step"),
    lambda held: optimizer_of(held).add_param_group({"params": [nn.Parameter(torch.ones(2))]}),
    lambda held: optimizer_of(held).state.clear(),
    lambda held: optimizer_of(held).param_groups[0]["params"].reverse(),
    lambda held: optimizer_of(held).load_state_dict(copy.deepcopy(optimizer_of(held).state_dict())),
    lambda held: model_of(held)[1].running_mean.resize_(2),
])  # fmt: skip
def test_whatever_is_replaced_is_seen(holding: Holding, change: Any) -> None:
    table = Table(holding)
    assert table.is_current()
    change(holding)
    assert not table.is_current()
