"""Buffers: which ones an interrupted step has changed, and how they are put back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from job import Job, Stop, digest
from torch import nn

from taskd.worker.train_state import TrainState


class Statistics(nn.Module):
    """A batch norm of one's own: the kernel leaves the version counters alone."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("variance", torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.batch_norm(x, self.mean, self.variance, self.weight, None, True, 0.1, 1e-5)


class Observer(nn.Module):
    """As quantization-aware training has it."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("low", "high"):
            self.register_buffer(name, torch.zeros(1))
        self.register_buffer("scale", torch.ones(1))
        self.register_buffer("zero", torch.zeros(1, dtype=torch.int))
        self.register_buffer("on", torch.tensor([1]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.fused_moving_avg_obs_fake_quant(
            x, self.on, self.on, self.low, self.high, self.scale, self.zero, 0.1, 0, 255, 0
        )


class Late(nn.Module):
    """Writes its buffer from the step `first` on, past the version counter."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.line = nn.Linear(3, 3)
        self.first, self.step = first, 0
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.step >= self.first:
            self.seen.data.add_(x.detach().mean(0))
        return self.line(x) + self.seen


def train(job: Job, build: Any, stops: tuple[int, ...] = (), steps: int = 6) -> Any:
    """Stops behind the forward pass of these steps. Returns the end, and the last report."""
    left = list(stops)

    def entry() -> bytes:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 3), build(), nn.Linear(3, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        state = TrainState(model=model, optimizer=optimizer)
        state.restore()
        while state.step < steps:
            model[1].step = state.step
            optimizer.zero_grad()
            loss = (model(torch.rand(4, 3)) - 1).square().mean()
            if left and state.step == left[0]:
                left.pop(0)
                raise Stop
            loss.backward()
            optimizer.step()
            state.commit()
        return digest(model)

    job.resume(None)
    while True:
        result, report = job.enter(entry)
        if result is not None or not report.clean:
            return result, report
        job.resume(report.version)


@pytest.mark.parametrize("build", [Statistics, Observer, lambda: Late(0), lambda: Late(1)])
def test_what_kernels_write_silently_is_rolled_back(job, build) -> None:
    plain, _ = train(job, build)
    assert train(Job(), build, (0, 2, 3, 3, 5))[0] == plain


def test_what_they_begin_to_write_later_is_never_taken_for_clean(job) -> None:
    result, report = train(job, lambda: Late(5), (5,))
    assert (result, report.clean) == (None, False)
    assert "buffer model.1.seen changed for the first time" in report.reason


def test_it_is_found_at_some_later_commit(job) -> None:
    plain, _ = train(job, lambda: Late(3))
    assert train(Job(), lambda: Late(3), (4,))[0] == plain


def test_a_later_entry_finds_it_too(job) -> None:
    """Its second commit compares contents again."""
    plain, _ = train(job, lambda: Late(3))
    assert train(Job(), lambda: Late(3), (2, 4))[0] == plain


def test_what_is_not_a_number_stands_still(job) -> None:
    class Empty(nn.Linear):
        def __init__(self) -> None:
            super().__init__(3, 3)
            self.register_buffer("mask", torch.full((3, 3), float("nan")))

    plain, _ = train(job, Empty)
    again, report = train(Job(), Empty, (0, 1, 2, 5))
    assert (again, report.clean) == (plain, True)
