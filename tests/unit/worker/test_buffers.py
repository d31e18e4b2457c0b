"""Buffers: which ones an interrupted step has changed, and how they are put back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from job import Job, Stop, digest
from torch import nn

from taskd.core.commands import Move
from taskd.native.arenas import Arenas
from taskd.worker.objects.memory import overwrite
from taskd.worker.objects.roles import Roles
from taskd.worker.objects.rollback import Rollback
from taskd.worker.restore import chunks
from taskd.worker.restore.manifest import meta_of
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

    return job.run(entry)


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


class Single(nn.Module):
    """A buffer, and a frozen parameter, of one element, whose stride is another one than 1."""

    def __init__(self, stride: int) -> None:
        super().__init__()
        self.line = nn.Linear(3, 3)
        memory = torch.ones(max(1, stride))
        self.register_buffer("scale", memory.as_strided((1,), (stride,)))
        self.shift = nn.Parameter(memory.clone().as_strided((1,), (stride,)), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.line(x) * self.scale + self.shift


@pytest.mark.parametrize("stride", [0, 3])
def test_the_stride_of_a_single_element_may_be_any(job, stride) -> None:
    plain, _ = train(job, lambda: Single(stride))
    again, report = train(Job(), lambda: Single(stride), (1, 3))
    assert (again, report.clean) == (plain, True)
    assert chunks._flat_bytes(Single(stride).scale).tolist() == [0, 0, 128, 63]


class Forgetful(nn.Module):
    """Has no hidden state between the steps."""

    def __init__(self, hidden: torch.Tensor | None) -> None:
        super().__init__()
        self.line = nn.Linear(3, 3)
        self.register_buffer("hidden", hidden, persistent=False)
        self.line.weight.register_hook(lambda _: setattr(self, "hidden", None))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.line(x) if self.hidden is None else self.line(x) + self.hidden
        self.hidden = out.detach()[0]
        return out


@pytest.mark.parametrize("hidden", [torch.zeros(3), None])
def test_a_buffer_that_was_none_is_none_again(job, hidden) -> None:
    plain, _ = train(job, lambda: Forgetful(hidden))
    again, report = train(Job(), lambda: Forgetful(hidden), (0, 2, 4))
    assert (again, report.clean) == (plain, True)


class Recurrent(nn.Module):
    """Makes its hidden state in its first step, and keeps it."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(3, 3)
        self.register_buffer("hidden", None, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.line(x) if self.hidden is None else self.line(x) + self.hidden
        self.hidden = out.detach()[0].clone()
        return out


def test_a_buffer_that_a_step_makes_is_rolled_back() -> None:
    module, x = Recurrent(), torch.ones(1, 3)
    rollback = Rollback(Roles.sort("train", {"model": module}))
    rollback.begin()
    module(x)
    assert rollback.roll_back() == ""
    assert module.hidden is None
    module(x)
    rollback.remember()
    committed = module.hidden.clone()
    module(x)
    assert not torch.equal(module.hidden, committed)
    assert rollback.roll_back() == ""
    assert torch.equal(module.hidden, committed)


class Masked(nn.Module):
    """Makes its mask anew for a longer input."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(4, 4)
        self.register_buffer("mask", torch.zeros(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) > len(self.mask):
            self.mask = torch.arange(float(len(x)))
        return (self.line(x).sum(1) + self.mask[: len(x)]).square().mean()


@pytest.mark.parametrize("is_outside", [True, False])
def test_a_validation_in_inference_mode_may_replace_a_buffer(job, is_outside) -> None:
    """Such a tensor has no version counter, and is written in that mode only."""
    torch.manual_seed(0)
    outside, left = Masked(), [3]

    def entry() -> str:
        model = outside if is_outside else Masked()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        state = TrainState(model=model, optimizer=optimizer)
        source = str(state.restore())
        while state.step < 5:
            model(torch.rand(2, 4)).backward()
            if left and state.step == left[0]:
                left.pop()
                with torch.inference_mode():
                    model(torch.rand(8, 4))
                raise Stop
            optimizer.step()
            state.commit()
            if state.step == 1:
                with torch.inference_mode():
                    model(torch.rand(6, 4))
                assert model.mask.is_inference()
        return source

    result, report = job.enter(entry)
    assert (result, report.version, report.clean) == (None, 3, True)
    held = job.life.records.parked["train"].roles.modules["model"].mask
    assert held.tolist() == [0, 1, 2, 3, 4, 5]
    assert not held.is_inference()
    job.resume(3)
    assert job.enter(entry)[0] == "kept in memory at version 3"


def test_an_inference_tensor_that_was_there_before() -> None:
    model = nn.Linear(2, 2)
    with torch.inference_mode():
        model.register_buffer("table", torch.ones(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rollback = Rollback(Roles.sort("train", {"model": model, "optimizer": optimizer}))
    rollback.begin()
    rollback.remember()
    with torch.inference_mode():
        model.table.add_(1)
    assert rollback.roll_back() == ""
    assert model.table.tolist() == [1, 1]


@pytest.mark.parametrize("is_top", [True, False])
@pytest.mark.parametrize("kind", ["script", "trace"])
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_modules_of_torch_jit(job, kind, is_top) -> None:
    def build() -> nn.Module:
        within = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
        made = (
            torch.jit.script(within)
            if kind == "script"
            else torch.jit.trace(within, torch.rand(4, 3))
        )
        return made if is_top else nn.Sequential(made)

    def run(job: Job, stops: list[int], *, is_moved: bool = False) -> Any:
        job.life.saving.arenas = Arenas.create()
        job.resume(None)

        def entry() -> bytes:
            torch.manual_seed(0)
            model = build()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            state = TrainState(model=model, optimizer=optimizer, snapshot_every=1)
            state.restore()
            while state.step < 5:
                optimizer.zero_grad()
                loss = (model(torch.rand(4, 3)) - 1).square().mean()
                loss.backward()
                if stops and state.step == stops[0]:
                    stops.pop(0)
                    raise Stop
                optimizer.step()
                state.commit()
            return digest(model)

        while True:
            result, report = job.enter(entry)
            if result is not None:
                job.life.saving.arenas.close()
                return result
            assert report.clean, report
            if is_moved:
                job.replace()
                job.resume(report.version, {0: Move(0, snapshot=report.version)})
            else:
                job.resume(report.version)

    plain = run(job, [])
    assert run(Job(), [0, 2, 3, 3]) == plain
    assert run(Job(), [3], is_moved=True) == plain


class Repeated(nn.Linear):
    """A buffer that has one row of memory for all of its rows."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.register_buffer("rows", torch.arange(3.0).expand(4, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.rows


@pytest.mark.parametrize("stops", [(0,), (1, 1, 3)])
def test_a_buffer_that_repeats_its_memory(job, stops) -> None:
    plain, _ = train(job, Repeated)
    again, report = train(Job(), Repeated, stops)
    assert (again, report.clean) == (plain, True)


def test_it_is_written_and_received_in_place() -> None:
    rows, content = torch.zeros(3).expand(2, 4, 3), torch.rand(3).expand(2, 4, 3)
    overwrite(rows, content)
    assert torch.equal(rows, content)
    assert rows.stride() == (0, 0, 1)
    rows = torch.zeros(3).expand(2, 4, 3)
    data = chunks._flat_bytes(content)
    chunks._put(rows, {}, 0, (0, data.numel()), data)
    assert torch.equal(rows, content)
    assert meta_of("rows", rows).shape == (2, 4, 3)


def test_what_cannot_be_rolled_back_tears_the_copy_and_no_process(job, caplog) -> None:
    class Bad(torch.optim.lr_scheduler.LambdaLR):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise KeyError("base_lrs")

    def entry() -> None:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = Bad(optimizer, lambda _: 1.0)
        state = TrainState(model=model, optimizer=optimizer, scheduler=scheduler)
        state.restore()
        other = TrainState("other", model=nn.Linear(2, 2))
        other.restore()
        raise Stop

    _, report = job.enter(entry)
    assert (report.version, report.clean) == (0, False)
    said = "what the interrupted step has changed could not be set back (KeyError: 'base_lrs')"
    assert report.reason == f"TrainState 'train': {said}"
    assert "the copy of version 0 is torn" in caplog.text
    assert set(job.life.records.parked) == {"train", "other"}


@pytest.mark.parametrize("way", ["checkpoint", "snapshot"])
def test_it_is_read_by_a_new_process(job, tmp_path, way) -> None:
    job.life.job_id = "job"
    job.life.saving.arenas = Arenas.create()
    job.resume(None)

    def entry(steps: int) -> tuple[str, list[Any]]:
        model = Repeated()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        options = {"snapshot_every": 1} if way == "snapshot" else {"checkpoint_every": 1}
        state = TrainState(model=model, optimizer=optimizer, checkpoint_dir=tmp_path, **options)
        source = str(state.restore()).split(" from ")[0]
        while state.step < steps:
            model(torch.ones(4, 3)).sum().backward()
            optimizer.step()
            with torch.no_grad():
                model.rows[0] += 1
            state.commit()
        if job.life.saving.periodic is not None:
            job.life.saving.periodic.wait()
        return source, model.rows.tolist()

    job.enter(entry, 2)
    job.replace()
    job.life.job_id = "job"
    if way == "snapshot":
        job.resume(2, {0: Move(0, snapshot=2)})
    else:
        job.resume(None)
    found = ("loaded version 2" if way == "snapshot" else "read version 2", [[2.0, 3.0, 4.0]] * 4)
    assert job.enter(entry, 2)[0] == found
    job.life.saving.arenas.close()
