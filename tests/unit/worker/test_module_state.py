"""Modules whose own state_dict() has more than parameters and buffers, as that of a metric has."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pytest
import torch
from job import Job, Stop
from torch import nn

from taskd.core.commands import Move
from taskd.worker.objects.roles import Roles
from taskd.worker.train_state import TrainState

STEPS = 6


class Total(nn.Module):
    """All by itself: a state_dict() and a load_state_dict() of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.total = torch.zeros(())

    def update(self, x: torch.Tensor) -> None:
        self.total = self.total + x

    def state_dict(self, *_args: Any, **_kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        return {"total": self.total}

    def load_state_dict(self, state: Any) -> None:  # type: ignore[override]
        self.total = state["total"]


class Hooked(Total):
    """By the methods of torch that are there for parts of a module; a list that grows."""

    state_dict, load_state_dict = nn.Module.state_dict, nn.Module.load_state_dict  # type: ignore[assignment]

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def update(self, x: torch.Tensor) -> None:
        super().update(x)
        self.seen.append(x)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}total"] = self.total
        destination[f"{prefix}seen"] = list(self.seen)

    def _load_from_state_dict(self, state: Any, prefix: str, *args: Any) -> None:
        self.total = state.pop(f"{prefix}total")
        self.seen = list(state.pop(f"{prefix}seen"))
        super()._load_from_state_dict(state, prefix, *args)


class Within(nn.Module):
    """Has one, and filters what it gives, as those do that save what they train alone."""

    def __init__(self) -> None:
        super().__init__()
        self.line, self.part = nn.Linear(2, 2), Hooked()

    def update(self, x: torch.Tensor) -> None:
        self.part.update(x)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        state = super().state_dict(*args, **kwargs)
        return {name: value for name, value in state.items() if "bias" not in name}


KINDS = {"alone": Total, "hooked": Hooked, "within": Within}


def counted(metric: Any) -> Any:
    part = getattr(metric, "part", metric)
    return float(part.total), [float(x) for x in getattr(part, "seen", [])]


def entry(kind: str, fault: int, done: list[int], scale: int = 1, options: Any = None) -> Any:
    torch.manual_seed(0)
    model, metric = nn.Linear(3, 1), KINDS[kind]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = TrainState(model=model, optimizer=optimizer, metric=metric, **(options or {}))
    assert state.metric is metric
    state.restore()
    while state.step < STEPS:
        optimizer.zero_grad()
        loss = (model(torch.ones(1, 3)) - 1).square().mean()
        metric.update(scale * loss.detach())
        if state.step == fault and not done:
            done.append(1)
            raise Stop
        loss.backward()
        optimizer.step()
        state.commit()
    return counted(metric), model.weight.tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_that_of_the_commit(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    expected = None
    for fault in (-1, 0, 1, 4):
        job, done = Job(), []  # type: ignore[var-annotated]
        result, report = job.enter(entry, kind, fault, done)
        if result is None:
            assert report.clean
            job.resume(report.version)
            result, _ = job.enter(entry, kind, fault, done)
        expected = expected or result
        assert result == expected
        job.close()
    assert caplog.text == ""


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_in_a_checkpoint(job: Any, tmp_path: Any, kind: str) -> None:
    options = {"checkpoint_every": 2, "checkpoint_dir": tmp_path}
    expected = job.enter(entry, kind, -1, [], 1, options)[0]
    job.replace()
    assert job.enter(entry, kind, -1, [], 1, options)[0] == expected


def received(member: Any, kind: str) -> Any:
    """On each rank of a World: rank 1 is new in the middle. Each has counted other things."""
    job, done = Job(member.rank, member.size), []  # type: ignore[var-annotated]
    try:
        job.resume(None)
        job.enter(entry, kind, 3, done, member.rank + 1)
        member.connect()
        if member.rank == 1:
            job.replace()
        job.resume(3, {0: Move(0), 1: Move(1, 0)})
        return job.enter(entry, kind, 3, done, member.rank + 1)[0]
    finally:
        job.close()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_that_is_replaced_has_its_own(world: Any, kind: str) -> None:
    left, right = world.run(received, kind, size=2)
    for rank, found in enumerate((left, right)):
        job = Job()
        assert job.enter(entry, kind, -1, [], rank + 1)[0] == found
        job.close()
    assert left[0] != right[0]


def test_a_large_one_is_that_of_the_commit_too(job: Any) -> None:
    class Table(Hooked):
        def __init__(self) -> None:
            super().__init__()
            self.total = torch.zeros(100, 100)

    def entry() -> Any:
        metric = Table()
        state = TrainState(model=nn.Linear(1, 1), metric=metric)
        state.restore()
        before = float(metric.total.sum())
        if state.step:
            return before, len(metric.seen)
        for step in range(2):
            metric.update(torch.ones(()))
            if step:
                raise Stop
            state.commit()
        return None

    _, report = job.enter(entry)
    job.resume(report.version)
    assert job.enter(entry)[0] == (10_000.0, 1)


@pytest.mark.parametrize("is_late", [True, False])
def test_one_that_was_built_outside_keeps_its_own(job: Any, is_late: bool) -> None:
    """Whether it has anything of its own is no matter of the entry: it may come with a step."""

    class Late(Hooked):
        def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
            if self.seen or not is_late:
                super()._save_to_state_dict(destination, prefix, keep_vars)

    metric = Late()

    def entry() -> Any:
        state = TrainState(model=nn.Linear(1, 1), metric=metric)
        state.restore()
        if state.step == 2:
            return counted(metric)
        metric.update(torch.ones(()))
        state.commit()
        metric.update(torch.ones(()))
        if state.step == 1:
            raise Stop
        return None

    _, report = job.enter(entry)
    assert report.clean
    job.resume(report.version)
    left, report = job.enter(entry)
    assert counted(metric) == (3.0, [1.0, 1.0, 1.0])
    assert left is None


class Filtering(nn.Linear):
    """Gives less than it has, and by other names."""

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        return {"w": super().state_dict(*args, **kwargs)["weight"]}


class Odd(Total):
    """What it has is what `value` says."""

    value: Any = None

    def state_dict(self, *_args: Any, **_kwargs: Any) -> Any:  # type: ignore[override]
        if isinstance(self.value, Exception):
            raise self.value
        return self.value


class Beside(Total):
    """Beside parameters, which its load_state_dict() asks for too."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(2, 1)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        return {**nn.Module.state_dict(self, *args, **kwargs), "total": self.total}

    def load_state_dict(self, state: Any, strict: bool = True) -> None:  # type: ignore[override]
        state = dict(state)
        self.total = state.pop("total")
        nn.Module.load_state_dict(self, state)


class Untaken(nn.Module):
    def state_dict(self, *_args: Any, **_kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        return {"count": 1}


def test_parameters_by_other_names_are_none(caplog: pytest.LogCaptureFixture) -> None:
    roles = Roles.sort("train", {"model": Filtering(2, 2), "plain": nn.BatchNorm1d(3)})
    assert not roles.positions
    assert not roles.replicas
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ({"a": lambda: 1}, "as 'a', a function, cannot be pickled"),
        ({"a": [nn.Linear(1, 1)]}, "as 'a', a list, leads to a Linear"),
        ((1, 2), "as that is a tuple, and not a dict"),
        (ValueError("no"), "as that method fails (ValueError: no)"),
    ],
)
def test_what_cannot_be_carried_is_named(
    value: Any, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    metric = Odd()
    metric.value = value
    Roles.sort("train", {"model": nn.Sequential(nn.Linear(1, 1), metric)})
    assert (
        "TrainState('train'): model: what 1 has in its state_dict() beside parameters and buffers "
        f"is not carried, {why}" in caplog.text
    )


def test_beside_parameters_it_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """Asking for it in each step would mean to ask for all of the parameters."""
    roles = Roles.sort("train", {"model": Beside()})
    assert not roles.positions
    assert "as it has parameters or buffers, too: keep it in a module without" in caplog.text


def test_what_could_not_be_saved_is_named(caplog: pytest.LogCaptureFixture) -> None:
    metric = Odd()
    metric.value = {"on": dt.date(2026, 1, 1)}
    roles = Roles.sort("train", {"metric": metric})
    assert not roles.positions
    assert "is a datetime.date, which could not be loaded without running code" in caplog.text


def test_one_that_fails_later_is_left_out_and_named_once(
    job: Any, caplog: pytest.LogCaptureFixture
) -> None:
    metric = Odd()
    metric.value = {"count": 1}

    def entry() -> int:
        state = TrainState(model=nn.Linear(1, 1), metric=metric)
        state.restore()
        metric.value = {"count": lambda: 1}
        for _ in range(3):
            state.commit()
        return state.step

    assert job.enter(entry)[0] == 3
    assert caplog.text.count("what Odd has in its state_dict()") == 1


def test_many_are_named_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    Roles.sort("train", {"model": nn.Sequential(*(Untaken() for _ in range(9)))})
    (record,) = caplog.records
    assert "what 0, 1, 2, 3, 4 and 4 more has in its state_dict()" in record.getMessage()
    assert "as it has no load_state_dict() of its own: after" in record.getMessage()


class LikeTorchmetrics(Hooked):
    """What torchmetrics' Metric is known by."""

    def __init__(self, *, is_persistent: bool) -> None:
        super().__init__()
        self._defaults = {"total": torch.zeros(()), "seen": []}
        self._persistent = dict.fromkeys(self._defaults, is_persistent)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        if all(self._persistent.values()):
            super()._save_to_state_dict(destination, prefix, keep_vars)

    def compute(self) -> Any:
        return self.total

    def reset(self) -> None:
        self.total = torch.zeros(())


def test_states_that_are_not_persistent_are_named(caplog: pytest.LogCaptureFixture) -> None:
    kept = LikeTorchmetrics(is_persistent=True)
    assert "metric.own" in Roles.sort("train", {"metric": kept}).positions
    assert caplog.text == ""
    left_out = LikeTorchmetrics(is_persistent=False)
    roles = Roles.sort("train", {"model": nn.ModuleDict({"loss": left_out})})
    assert roles.positions["model.own"].state_dict() == {"loss": {}}
    assert (
        "TrainState('train'): model: loss counts in states that are not persistent" in caplog.text
    )
