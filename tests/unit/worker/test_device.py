"""What is believed of an accelerator that works behind the back of the main thread.

There is none here: the device is a stand-in whose stream is synchronized. tests/gpu has the real
thing.
"""

from __future__ import annotations

import datetime as dt
import itertools
import os
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from job import Job, digest
from torch import nn

from taskd.native.black_box import BlackBox, Phase
from taskd.worker.exceptions import device
from taskd.worker.life import Life, Supervisor
from taskd.worker.process.device import DeviceWork, keep_watchdogs_quiet
from taskd.worker.process.groups import Groups
from taskd.worker.process.pulse import Pulse
from taskd.worker.restore import restoration
from taskd.worker.train_state import TrainState


class ProcessGroupDevice:
    """A backend whose collectives return at once."""

    def __init__(self) -> None:
        self.collectives = 0

    def _get_sequence_number_for_group(self) -> int:
        return self.collectives


class ProcessGroupSilent:
    """One that does not say how many collectives it was asked for."""


class ProcessGroupGloo:
    """Gloo serves tensors on a device, too."""


def group_of(backend: object, kind: str = "cuda") -> SimpleNamespace:
    return SimpleNamespace(
        _device_types=[torch.device("cpu"), torch.device(kind)], _get_backend=lambda _: backend
    )


@pytest.fixture
def synchronized(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """One entry for each wait for the device."""
    waits: list[str] = []
    stream = SimpleNamespace(synchronize=lambda: waits.append("cuda"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    # A build of torch with CUDA asks its driver, which need not be there.
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: torch.zeros(16, dtype=torch.uint8))
    return waits


def test_what_was_aborted_before_it_was_done_is_not_believed(synchronized: list[str]) -> None:
    work = DeviceWork()
    work.add(group_of(ProcessGroupDevice()))
    work.wait()
    assert synchronized == ["cuda"]
    work.begin_abort()
    with pytest.raises(RuntimeError, match="process groups were aborted while the device"):
        work.wait()
    assert synchronized == ["cuda"] * 2


def test_gloo_has_nothing_to_wait_for(synchronized: list[str]) -> None:
    work = DeviceWork()
    work.add(group_of(ProcessGroupGloo()))
    work.begin_abort()
    work.wait()
    work.note()
    work.wait_for_more()
    assert not work.is_used
    assert synchronized == []


def test_an_update_is_waited_for_only_if_it_has_asked_for_collectives(
    synchronized: list[str],
) -> None:
    work, backend = DeviceWork(), ProcessGroupDevice()
    work.add(group_of(backend))
    work.note()
    work.wait_for_more()
    assert synchronized == []
    work.note()
    backend.collectives += 1
    work.wait_for_more()
    assert synchronized == ["cuda"]
    work.wait_for_more()  # of a second TrainState: nothing was asked for since
    assert synchronized == ["cuda"]


def test_a_backend_that_does_not_count_is_waited_for(synchronized: list[str]) -> None:
    work = DeviceWork()
    work.add(group_of(ProcessGroupSilent()))
    work.note()
    work.wait_for_more()
    assert synchronized == ["cuda"]


@pytest.fixture
def busy(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The stream of a device that is busy, until `query` says something else."""
    stream = SimpleNamespace(synchronize=lambda: None, query=lambda: False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return stream


def test_a_device_that_is_busy_may_have_a_collective_that_nobody_ends(
    busy: SimpleNamespace,
) -> None:
    work, backend = DeviceWork(), ProcessGroupDevice()
    assert not work.may_be_stuck(), "there is no group on it"
    work.add(group_of(backend))
    assert work.may_be_stuck(), "nothing is known of the device"
    work.wait()
    assert work.may_be_stuck()
    assert work.longest_s == 600.0
    backend.options = SimpleNamespace(_timeout=dt.timedelta(minutes=30))
    work.add(group_of(backend))
    assert work.longest_s == 1800.0
    busy.query = lambda: True
    assert not work.may_be_stuck(), "the device is done: the main thread is busy itself"
    busy.query = lambda: False
    work.begin_abort()
    assert not work.may_be_stuck(), "once is enough"


def pulse_in(phase: Phase) -> tuple[Pulse, DeviceWork]:
    """That of rank 3, whose main thread is in this phase, with a group on a device."""
    box = BlackBox.create()
    box.begin(os.getpid(), 0)
    groups = Groups(0, 0)
    work = groups.opened.device_work
    work.add(group_of(ProcessGroupDevice()))
    work.wait()
    box.mark_phase(phase)
    return Pulse(Life(rank=3, world_size=4, incarnation=0, box=box), groups), work


@pytest.mark.parametrize(
    ("phase", "where", "is_lost"),
    [
        (Phase.BACKWARD, "script", True),
        (Phase.STEP, "script", False),  # it may generate text for an hour
        (Phase.STEP, "torch.distributed.distributed_c10d", True),
        (Phase.EVALUATION, "script", False),
        # rank 0 reads a checkpoint, and the others wait for its word
        (Phase.ENTERED, "taskd.worker.state.agreement", False),
    ],
)
@pytest.mark.usefixtures("busy")
def test_what_is_overdue_is_aborted_by_the_pulse(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    phase: Phase,
    where: str,
    is_lost: bool,
) -> None:
    """The main thread stands in a function of that module; the pulse beats in another thread."""
    monkeypatch.setattr("taskd.worker.process.device._TIMEOUT_S", 0.3)
    pulse, work = pulse_in(phase)
    is_over = threading.Event()

    def beat() -> None:
        for number in range(80):
            time.sleep(pulse.until_next_s())
            pulse.beat()
            if number >= 7 and ("taken for lost" in caplog.text) is is_lost:
                break  # after two seconds; later where the main thread is late
        is_over.set()

    module = {"__name__": where, "lock": threading.Lock()}
    exec("def stand():\n    with lock:\n        lock.acquire()\n", module)
    beating = threading.Thread(target=beat)
    beating.start()
    threading.Thread(target=lambda: (is_over.wait(), module["lock"].release())).start()
    module["stand"]()
    beating.join()
    assert ("rank 3 has made no progress" in caplog.text) is is_lost
    if is_lost:
        with pytest.raises(RuntimeError, match="aborted"):
            work.wait()
        assert caplog.text.count("taken for lost") == 1


@pytest.mark.parametrize("what", ["main thread", "device"])
def test_whoever_moves_is_not_overdue(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    busy: SimpleNamespace,
    what: str,
) -> None:
    monkeypatch.setattr("taskd.worker.process.device._TIMEOUT_S", 0.6)
    pulse, _ = pulse_in(Phase.BACKWARD)
    here, there, has_moved = threading.Lock(), threading.Lock(), threading.Semaphore(0)
    here.acquire()
    there.acquire()
    if what == "device":  # the main thread stays here, and the device is idle now and then
        looks = itertools.count()
        busy.query = lambda: next(looks) % 2 == 0

    def beat() -> None:
        for number in range(8):
            time.sleep(pulse.until_next_s())
            pulse.beat()
            if what == "main thread":
                (here, there)[number % 2].release()
                has_moved.acquire()  # it may be late
        if what == "device":
            here.release()

    beating = threading.Thread(target=beat)
    beating.start()
    for _ in range(4 if what == "main thread" else 0):
        here.acquire()
        has_moved.release()
        there.acquire()
        has_moved.release()
    if what == "device":
        here.acquire()
    beating.join()
    assert "no progress" not in caplog.text


def test_what_debugging_puts_around_gloo_is_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """TORCH_DISTRIBUTED_DEBUG=DETAIL: a wrapper that serves CUDA, too, where there may be none."""
    level = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    groups = Groups(0, 0)
    groups.install(lambda call: call())
    try:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        wrapper = dist.group.WORLD._get_backend(torch.device("cuda"))
        assert type(wrapper).__name__ == "_ProcessGroupWrapper"
        work = groups.opened.device_work
        work.wait()
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        assert not work.is_used
        groups.abort(groups.opened)
        groups.retire()
    finally:
        groups.uninstall()
        dist.set_debug_level(level)


def test_a_group_that_serves_a_device_that_is_not_used_has_nothing_to_wait_for() -> None:
    work = DeviceWork()
    for kind in ("cuda", "hpu", "mps"):
        work.add(group_of(ProcessGroupDevice(), kind))
    work.begin_abort()
    work.wait()
    assert not work.is_used


def test_what_is_recorded_for_a_graph_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, synchronized: list[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    work = DeviceWork()
    work.add(group_of(ProcessGroupDevice()))
    work.wait()
    assert synchronized == []


@pytest.mark.usefixtures("synchronized")
def test_the_second_optimizer_of_a_step_does_not_tear_what_the_first_has_begun() -> None:
    """The abort comes while the first one writes: all gradients were there before that."""
    job = Job()
    work = DeviceWork()
    work.add(group_of(ProcessGroupDevice()))
    job.life.supervisor = OnDevice(work)
    model = nn.Linear(3, 2)
    optimizers = [torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()]

    def entry() -> None:
        state = TrainState(model=model, first=optimizers[0], second=optimizers[1])
        state.restore()
        model(torch.ones(1, 3)).sum().backward()
        optimizers[0].step()
        work.begin_abort()
        optimizers[1].step()
        state.commit()

    try:
        job.enter(entry)
        assert job.life.records.version == 1
    finally:
        job.close()


class OnDevice(Supervisor):
    """The part of the runtime that a step asks for the device."""

    def __init__(self, work: DeviceWork) -> None:
        self.work = work

    def await_device(self) -> None:
        self.work.wait()

    def begin_update(self) -> None:
        self.work.note()

    def end_update(self) -> None:
        self.work.wait_for_more()


@pytest.mark.parametrize(
    ("place", "asks", "version", "clean"),
    [
        ("backward", False, 2, True),  # gradients may be anything: nothing was written
        ("update", False, None, None),  # they were whole: the step counts
        ("update", True, 2, False),  # what the optimizer has gathered may be anything
    ],
)
@pytest.mark.usefixtures("synchronized")
def test_a_step_whose_collectives_were_aborted_is_no_version(
    place: str, asks: bool, version: int | None, clean: bool | None
) -> None:
    job = Job()
    work, backend = DeviceWork(), ProcessGroupDevice()
    work.add(group_of(backend))
    job.life.supervisor = OnDevice(work)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = []

    def entry() -> None:
        state = TrainState(model=model, optimizer=optimizer)
        state.restore()
        while state.step < 4:
            optimizer.zero_grad()
            model(torch.ones(1, 3)).sum().backward()
            is_last = state.step == 2
            before.append(digest(model))
            if is_last and place == "backward":
                work.begin_abort()
            optimizer.step()
            if is_last and place == "update":
                backend.collectives += asks
                work.begin_abort()
            state.commit()
            if is_last:
                return

    try:
        if version is None:
            job.enter(entry)
            assert job.life.records.version == 3
            return
        with pytest.raises(RuntimeError, match="process groups were aborted"):
            job.enter(entry)
        assert job.life.records.version == version
        assert job.life.records.is_inconsistent is not clean
        assert (digest(model) == before[-1]) is clean
    finally:
        job.close()


def test_a_state_that_arrived_while_groups_were_aborted_is_no_version(
    monkeypatch: pytest.MonkeyPatch, synchronized: list[str]
) -> None:
    work = DeviceWork()
    work.add(group_of(ProcessGroupDevice()))
    life = Life(rank=0, world_size=2, incarnation=0, supervisor=OnDevice(work))
    life.records.version = 5

    def receive(*_: object) -> bool:
        work.begin_abort()
        return True

    monkeypatch.setattr(restoration.exchange, "receive", receive)
    with pytest.raises(RuntimeError, match="process groups were aborted"):
        restoration._receive(life, SimpleNamespace(name="training"), None, 1)
    assert life.records.version is None
    assert synchronized == ["cuda"]


def test_groups_on_a_device_are_forgotten_without_an_end_in_good_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """That would wait for collectives that never complete."""
    groups = Groups(0, 0)
    groups.install(lambda call: call())
    try:
        for _ in range(2):
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            groups.opened.device_work._kinds.add("cuda")
            monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
            backend = dist.group.WORLD._get_backend(torch.device("cpu"))
            monkeypatch.setattr(type(backend), "shutdown", None, raising=False)
            groups.retire()
            assert not dist.is_initialized()
    finally:
        groups.uninstall()


def test_the_abort_of_the_other_thread_is_awaited_and_no_group_is_aborted_after_it_is_retired(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    aborted: list[int] = []
    monkeypatch.setattr(
        "taskd.worker.process.groups.abort_groups",
        lambda backends, *_: aborted.append(len(backends)),
    )
    groups = Groups(0, 0)
    opened = groups.opened
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    opened.device_work.add(group_of(ProcessGroupDevice()))
    opened.groups.append(group_of(ProcessGroupDevice()))
    began = time.monotonic()
    other = threading.Timer(0.2, groups.abort, args=[opened])
    other.start()
    groups.await_abort(30.0)
    assert 0.2 <= time.monotonic() - began < 30.0
    groups.retire()
    groups.abort(opened)
    assert aborted == [2, 0]
    other.join()


def test_watchdogs_end_no_process_unless_the_user_wants_it() -> None:
    environment = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
    keep_watchdogs_quiet(environment)
    assert environment == {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
        "HCCL_ASYNC_ERROR_HANDLING": "0",
        "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "25",
    }
    own = {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
        "HCCL_ASYNC_ERROR_HANDLING": "2",
        "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "60000",
    }
    before = dict(own)
    keep_watchdogs_quiet(own)
    assert own == before


def test_a_device_that_refuses_every_call_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert device.why_broken() == ""

    def query() -> bool:
        message = "CUDA error: device-side assert triggered\nSearch for it"
        raise RuntimeError(message)

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    stream = SimpleNamespace(query=lambda: False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    assert device.why_broken() == "", "it is busy"
    stream.query = query
    assert device.why_broken() == "CUDA error: device-side assert triggered"


WARM = """
import torch._dynamo
from taskd.agent.spawning import libraries
def opened(*_):
    raise SystemExit("the device was opened")
torch.cuda._is_compiled = lambda: True
torch._C._cuda_getDeviceCount = opened
if hasattr(torch._C, "_accelerator_getAccelerator"):
    torch._C._accelerator_getAccelerator = lambda: torch.device("cuda")
libraries.warm_optimizers()
"""


def test_the_warm_process_opens_no_device() -> None:
    """Adam asks at each step whether there is one; a process that has opened it is not forked."""
    env = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    ended = subprocess.run(
        [sys.executable, "-c", WARM + "import os; print(os.environ.get('CUDA_VISIBLE_DEVICES'))"],
        env=env,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert (ended.returncode, ended.stdout) == (0, "None\n"), ended.stderr
