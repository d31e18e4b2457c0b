"""Buffers that are no part of a state_dict, in a checkpoint and in a snapshot.

A forward pass may make them, and make them anew for a longer input. Read where they fit, they are
left elsewhere, as in a recovery in place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from taskd.core.commands import Move
from taskd.errors import StateError
from taskd.native.arenas import Arenas
from taskd.worker.objects.named import Named
from taskd.worker.objects.roles import Roles
from taskd.worker.state import flat
from taskd.worker.state.holding import Holding
from taskd.worker.train_state import TrainState

if TYPE_CHECKING:
    from job import Job


class Rotary(nn.Module):
    """Its table is longer after a longer input, and its mask is made for the first one."""

    def __init__(self, size: int = 8, kept: int = 2) -> None:
        super().__init__()
        self.line = nn.Linear(2, 2)
        self.register_buffer("table", torch.zeros(size), persistent=False)
        self.register_buffer("kept", torch.zeros(kept))

    def grow(self, size: int) -> Rotary:
        self.register_buffer("table", torch.arange(float(size)), persistent=False)
        self.register_buffer("mask", torch.ones(size), persistent=False)
        return self


def holding(model: nn.Module) -> Holding:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Holding("train", Roles.sort("train", {"model": model, "optimizer": optimizer}))


def read(source: nn.Module, target: nn.Module, forget: str = "") -> None:
    one, other = holding(source), holding(target)
    tensors, plain = flat.flatten(one, Named(one.roles))
    plain.pop(forget, None)
    shapes = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    named = Named(other.roles)
    places = flat.targets(other, named, plain, shapes)
    for name, place in places.items():
        place.detach().copy_(tensors[name])
    flat.load(other, named, plain, places)


def test_what_does_not_fit_stays_as_it_was_built() -> None:
    """It was longer, and there was one more."""
    source, target = Rotary().grow(16), Rotary()
    source.kept.fill_(3)
    read(source, target)
    assert torch.equal(target.table, torch.zeros(8))
    assert torch.equal(target.line.weight, source.line.weight)
    assert torch.equal(target.kept, source.kept)


def test_so_does_one_of_another_type() -> None:
    source, target = Rotary(), Rotary()
    source.table = torch.ones(8, dtype=torch.bfloat16)
    read(source, target)
    assert torch.equal(target.table, torch.zeros(8))


def test_one_that_only_this_program_has_stays_too() -> None:
    target = Rotary().grow(16)
    read(Rotary(), target)
    assert torch.equal(target.table, torch.arange(16.0))
    assert torch.equal(target.mask, torch.ones(16))


def test_what_fits_is_read_to_the_last_bit() -> None:
    source, target = Rotary(), Rotary()
    source.table.copy_(torch.randn(8))
    read(source, target)
    assert torch.equal(target.table, source.table)


def test_a_checkpoint_that_does_not_say_which_they_are() -> None:
    source, target = Rotary(16), Rotary(8)
    read(source, target, forget="caches")
    assert torch.equal(target.table, torch.zeros(8))


def test_what_is_part_of_a_state_dict_must_fit() -> None:
    with pytest.raises(StateError, match=r"model\.kept has shape \(3,\) in the checkpoint"):
        read(Rotary(kept=3), Rotary())
    shared, source = Rotary(), Rotary().grow(16)
    for model in (shared, source):
        model.register_buffer("twin", model.table)  # the same tensor, as part of the state_dict
    with pytest.raises(StateError, match=r"model\.table has shape \(16,\) in the checkpoint"):
        read(source, shared)


@pytest.mark.parametrize("way", ["checkpoint", "snapshot"])
def test_a_new_process_goes_on_from_it(job: Job, tmp_path: Any, way: str) -> None:
    job.life.job_id = "job"
    job.life.saving.arenas = Arenas.create()
    job.resume(None)
    found = []

    def entry(steps: int) -> None:
        torch.manual_seed(0)
        model = Rotary()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        options = {"snapshot_every": 1} if way == "snapshot" else {"checkpoint_every": 1}
        state = TrainState(model=model, optimizer=optimizer, checkpoint_dir=tmp_path, **options)
        found.append((str(state.restore()).split(" from ")[0], model.line.weight.tolist()))
        while state.step < steps:
            model.grow(16 + state.step).line(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            state.commit()
        if job.life.saving.periodic is not None:
            job.life.saving.periodic.wait()
        found.append(model.line.weight.tolist())

    job.enter(entry, 2)
    job.replace()
    job.life.job_id = "job"
    if way == "snapshot":
        job.resume(2, {0: Move(0, snapshot=2)})
    job.enter(entry, 2)
    assert found[2] == ("loaded version 2" if way == "snapshot" else "read version 2", found[1])
    job.life.saving.arenas.close()
