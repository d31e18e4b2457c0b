"""Schedulers that hold others: the learning rates are those of a run without a fault."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from job import Job, Stop
from torch import nn
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CosineAnnealingLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)
from ways import WAYS

from taskd.errors import StateError
from taskd.worker.objects.named import Named
from taskd.worker.objects.nesting import NestingScheduler
from taskd.worker.objects.roles import Roles
from taskd.worker.restore.moving import move
from taskd.worker.state.holding import Holding
from taskd.worker.train_state import TrainState

STEPS = 10


class Warmup(LRScheduler):
    """A ramp, and behind it the scheduler that it was given, which it steps itself."""

    def __init__(self, optimizer: Any, after: Any, total: int = 2) -> None:
        self.total, self.after, self.is_over = total, after, False
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        if self.last_epoch > self.total:
            if not self.is_over:
                self.after.base_lrs = [rate * 4 for rate in self.base_lrs]
                self.is_over = True
            return list(self.after.get_last_lr())
        return [rate * (3 * self.last_epoch / self.total + 1) for rate in self.base_lrs]

    def step(self, epoch: Any = None) -> None:
        if not self.is_over:
            super().step()
            return
        self.after.step()
        self._last_lr = self.after.get_last_lr()
        self.last_epoch += 1


class Several(LRScheduler):
    """Knows its optimizer by another name too, and its parts by several."""

    def __init__(self, optimizer: Any, parts: list[Any]) -> None:
        self.parts, self.first, self.by_name = parts, parts[0], {"last": parts[-1]}
        self.driven = [optimizer]
        super().__init__(optimizer)

    def _initial_step(self) -> None:
        self._last_lr = self.get_lr()

    def get_lr(self) -> list[Any]:
        return [group["lr"] for group in self.optimizer.param_groups]

    def step(self, epoch: Any = None) -> None:
        for part in self.parts:
            part.step()
        assert self.first is self.parts[0]
        assert self.by_name["last"] is self.parts[-1]
        assert self.driven == [self.optimizer]


class Passing:
    """As libraries give them to the user: no LRScheduler, and passes everything on."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def step(self) -> None:
        self.inner.step()

    def get_last_lr(self) -> Any:
        return self.inner.get_last_lr()

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self.inner.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inner.load_state_dict(state)


KINDS: dict[str, Any] = {
    "warmup": lambda o: Warmup(o, CosineAnnealingLR(o, 6)),
    "of a function": lambda o: Warmup(o, LambdaLR(o, lambda step: 0.9**step)),
    "of a warmup": lambda o: Warmup(o, Warmup(o, StepLR(o, 2), 4)),
    "passed on": lambda o: Passing(Warmup(o, CosineAnnealingLR(o, 6))),
    "several": lambda o: Several(o, [ExponentialLR(o, 0.9), StepLR(o, 3)]),
    "in torch's": lambda o: SequentialLR(
        o, [Warmup(o, CosineAnnealingLR(o, 6)), ExponentialLR(o, 0.9)], [8]
    ),
    "chained": lambda o: ChainedScheduler([Warmup(o, StepLR(o, 2)), ExponentialLR(o, 0.9)]),
}


def make(kind: str) -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, optimizer, KINDS[kind](optimizer)


def train(kind: str, fault: int = -1, place: str = "", *, is_outside: bool = False) -> Any:
    """The rates and the weights of a job with a fault, or without one."""
    job, done, rates = Job(), [], {}
    built = make(kind)

    def entry() -> Any:
        model, optimizer, scheduler = built if is_outside else make(kind)
        state = TrainState(model=model, optimizer=optimizer, scheduler=scheduler)
        assert state.scheduler is scheduler
        state.restore()
        while state.step < STEPS:
            optimizer.zero_grad()
            loss = (model(torch.ones(1, 3)) - 1).square().mean()
            if state.step == fault and not done:
                done.append(1)
                if place == "behind the scheduler":
                    scheduler.step()
                raise Stop
            loss.backward()
            optimizer.step()
            scheduler.step()
            state.commit()
            rates[state.step] = optimizer.param_groups[0]["lr"]
        return rates, model.weight.tolist()

    try:
        result, report = job.enter(entry)
        if result is None:
            assert report.clean
            job.resume(report.version)
            result, _ = job.enter(entry)
    finally:
        job.close()
    return result


@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*:UserWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_rates_are_those_of_a_run_without_a_fault(kind: str) -> None:
    expected = train(kind)
    assert len(set(expected[0].values())) > 2
    for fault in (0, 1, 3, 5, 8):
        for place in ("", "behind the scheduler"):
            assert train(kind, fault, place) == expected, (fault, place)
            assert train(kind, fault, place, is_outside=True) == expected, (fault, place)


def hold(kind: str) -> Holding:
    model, optimizer, scheduler = make(kind)
    objects = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    return Holding("train", Roles.sort("train", objects))


def rates(holding: Holding, steps: int) -> list[float]:
    optimizer = holding.roles.optimizers["optimizer"]
    found = []
    for _ in range(steps):
        optimizer.step()
        holding.roles.find("scheduler").step()
        found.append(optimizer.param_groups[0]["lr"])
    return found


WITH_MOVING = {
    **WAYS,
    "another entry": lambda one, other: move(one, other, Named(other.roles), is_kept=True),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WITH_MOVING.values(), ids=WITH_MOVING)
def test_so_they_are_where_the_state_has_gone_to(way: Any, kind: str) -> None:
    source, target = hold(kind), hold(kind)
    rates(source, 5)
    way(source, target)
    expected = rates(hold(kind), STEPS)[5:]
    assert rates(target, STEPS - 5) == expected
    assert rates(source, STEPS - 5) == expected


def test_what_is_driven_stays_the_optimizer_of_the_job() -> None:
    holding = hold("several")
    holding.rollback.begin()
    holding.rollback.roll_back()
    scheduler, optimizer = holding.roles.find("scheduler"), holding.roles.optimizers["optimizer"]
    assert scheduler.driven[0] is optimizer
    assert all(part.optimizer is optimizer for part in scheduler.parts)


def test_torchs_own_are_carried_as_they_are() -> None:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    parts: list[Any] = [LinearLR(optimizer), StepLR(optimizer, 2)]
    for scheduler in (
        SequentialLR(optimizer, parts, [3]),
        ChainedScheduler(parts),
        ReduceLROnPlateau(optimizer),
    ):
        assert Roles.sort("train", {"x": scheduler}).schedulers["x"] is scheduler
    nesting = Roles.sort("train", {"x": Warmup(optimizer, parts[0])}).schedulers["x"]
    assert isinstance(nesting, NestingScheduler)


def test_one_that_holds_another_no_more_is_named() -> None:
    source, target = hold("warmup"), hold("warmup")
    target.roles.schedulers["scheduler"].scheduler.after = None
    target.roles.schedulers["scheduler"].state_dict()
    with pytest.raises(StateError, match=r"'train'\): scheduler held a scheduler .* in after, and"):
        move(source, target, Named(target.roles), is_kept=True)


class Helper:
    def __init__(self, held: Any) -> None:
        self.held = held


class Keeping(StepLR):
    def __init__(self, optimizer: Any, held: Any) -> None:
        super().__init__(optimizer, 2)
        self.held = held


def test_what_only_a_copy_would_come_back_of_is_refused() -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inner = StepLR(optimizer, 2)
    for held, what in (
        (Helper(optimizer), "'held', a Helper, leads to a SGD"),
        (Helper([inner]), "'held', a Helper, leads to a StepLR"),
        (inner.get_lr, "'held', a method, leads to a StepLR"),
        (model, "'held', a Linear, leads to a Linear"),
        (model.weight, "'held', a Parameter, leads to a Parameter"),
        (lambda step: step, "'held', a function, cannot be pickled"),
    ):
        with pytest.raises(StateError, match=what) as raised:
            Roles.sort("train", {"scheduler": Keeping(optimizer, held)})
        assert "TrainState('train'): scheduler: the state_dict() of this" in str(raised.value)
    Roles.sort("train", {"scheduler": Keeping(optimizer, Helper(3))})
