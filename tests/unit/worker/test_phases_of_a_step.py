"""Two TrainStates, each with a phase of every step: the module of one runs in that of the other."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from job import Job, Stop, digest
from torch import nn

from taskd.worker.train_state import TrainState

STEPS = 4


class Gan:
    """A generator and a discriminator with batch norm; dropout draws in each forward pass."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.generator = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Dropout())
        self.discriminator = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))
        self.average = copy.deepcopy(self.generator).requires_grad_(False)
        self.optimizers = {
            "d": torch.optim.Adam(self.discriminator.parameters()),
            "g": torch.optim.Adam(self.generator.parameters()),
        }

    def phase(self, name: str) -> None:
        """Up to the gradients."""
        self.optimizers[name].zero_grad()
        made = self.generator(torch.rand(4, 2))
        loss = self.discriminator(made if name == "g" else made.detach()).square().mean()
        if name == "d":
            loss = loss + (self.discriminator(torch.rand(4, 3)) - 1).square().mean()
        loss.backward()


def entry(stops: list[tuple[int, str, str]]) -> bytes:
    gan = Gan()
    d = TrainState("d", model=gan.discriminator, optimizer=gan.optimizers["d"])
    g = TrainState("g", model=gan.generator, optimizer=gan.optimizers["g"])
    states = {"d": d, "g": g}
    d.restore()
    g.restore()

    def stop(name: str, where: str) -> None:
        if stops and stops[0] == (states[name].step, name, where):
            stops.pop(0)
            raise Stop

    while g.step < STEPS:
        for name in ("d", "g") if d.step == g.step else ("g",):
            stop(name, "begin")
            gan.phase(name)
            stop(name, "end")
            gan.optimizers[name].step()
            states[name].commit()
    return digest(gan.generator, gan.discriminator)


MOMENTS = [(step, name, where) for step in (0, 1, 3) for name in "dg" for where in ("begin", "end")]


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("again", [False, True])
def test_buffers_are_those_of_the_last_commit_whoever_made_it(moment: Any, again: bool) -> None:
    """Of a fault in the phase of the generator: its own are of that of the discriminator before."""
    ends = []
    for stops in ([], [moment, moment] if again else [moment]):
        job = Job()
        job.resume(None)
        result, report = job.enter(entry, stops)
        while result is None:
            assert report.clean
            job.resume(report.version)
            result, report = job.enter(entry, stops)
        assert stops == []
        ends.append(result)
        job.close()
    assert ends[0] == ends[1]
