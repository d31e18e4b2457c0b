"""Signals reach the life that they are meant for, also one that was started late."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs

from taskd.agent.spawning.protocol import Started
from taskd.agent.workers.memory_folder import MemoryFolder
from taskd.clock import MonotonicClock
from taskd.torchrun.context import TaskdContext
from taskd.torchrun.host import TorchrunHost

if TYPE_CHECKING:
    from collections.abc import Iterator

    from taskd.agent.spawning.protocol import Reply, SpawnRequest


class Slow:
    """A spawner that answers when it is told to."""

    fds: tuple[int, ...] = ()

    def __init__(self) -> None:
        self.asked: list[SpawnRequest] = []
        self.replies: list[Reply] = []

    def spawn(self, request: SpawnRequest) -> None:
        self.asked.append(request)

    def read(self) -> list[Reply]:
        replies, self.replies = self.replies, []
        return replies


class Launcher:
    """Of one rank. Each start of all has a store at a port of its own."""

    generation = restarts_used = 0
    is_substitute = False

    def __init__(self) -> None:
        worker = SimpleNamespace(global_rank=0, local_rank=0, world_size=1)
        spec = SimpleNamespace(max_restarts=9)
        self.worker_group = SimpleNamespace(
            group_rank=0, group_world_size=1, workers=[worker], spec=spec
        )
        self.opened: list[int] = []

    def open_store(self, generation: int) -> dict[str, str]:
        self.opened.append(generation)
        return {"MASTER_PORT": str(40000 + generation)}

    def bootstrap(self, _: int, incarnation: int, *, gated: bool) -> dict[str, object]:
        return {"incarnation": incarnation, "gated": gated}


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    with subprocess.Popen(command, start_new_session=True) as process:
        yield process
        process.kill()


@pytest.fixture
def spawner() -> Slow:
    return Slow()


@pytest.fixture
def context(spawner: Slow) -> Iterator[TaskdContext]:
    life_fd, other = os.pipe()
    made = TaskdContext(
        spawner=spawner,  # type: ignore[arg-type]
        bootstraps={},
        life_fd=life_fd,
        memory=MemoryFolder("", "job", 0, "agent", MonotonicClock(), 60.0),
        name="default",
        entrypoint=sys.executable,
        args={0: ("script.py",)},
        envs={0: {}},
        logs_specs=DefaultLogsSpecs(),
    )
    made.stdouts, made.stderrs, made.error_files = {0: ""}, {0: ""}, {0: os.devnull}
    yield made
    made.close(timeout=0)
    os.close(life_fd)
    os.close(other)


def test_a_former_life_that_starts_after_its_successor_was_asked_for(
    sleeper: subprocess.Popen[bytes], context: TaskdContext, spawner: Slow
) -> None:
    context.respawn(0, {"incarnation": 0, "gated": True}, inherits=True)
    context.respawn(0, {"incarnation": 1, "gated": True}, inherits=True)
    assert not context.signal(0, 0, signal.SIGTERM), "there is no process yet"
    spawner.replies.append(Started(spawner.asked[0].token, sleeper.pid, -1, None))
    ((worker, _),) = context.read()
    assert worker.incarnation == 0
    assert context.signal(0, worker.incarnation, signal.SIGKILL)
    assert sleeper.wait(20) == -signal.SIGKILL
    assert not context.signal(0, 1, signal.SIGTERM)
    assert not context.signal(0, 2, signal.SIGTERM), "it was never asked for"


def test_what_a_rank_leaves_is_in_the_box_of_the_last_life_that_had_it(
    context: TaskdContext, spawner: Slow
) -> None:
    """A life that dies while it begins leaves nothing, and its successor needs what was before."""
    first = context.respawn(0, {"incarnation": 0, "gated": False}, inherits=False)
    for version in (4, 5):
        first.box.write_extras(version, b"generators")
    lives = [
        context.respawn(0, {"incarnation": number, "gated": True}, inherits=True)
        for number in range(1, 9)
    ]
    assert {life.left.fd for life in lives} == {first.box.fd}
    assert {request.fds["previous"] for request in spawner.asked[1:]} == {first.box.fd}
    lives[-1].box.write_extras(4, b"generators")
    assert lives[-1].left is first.box, "it has taken over one of two versions"
    lives[-1].box.write_extras(5, b"generators")
    assert lives[-1].left is lives[-1].box
    anew = context.respawn(0, {"incarnation": 9, "gated": True}, inherits=False)
    assert anew.left is anew.box, "all start anew: what was is not to be believed"
    assert "previous" not in spawner.asked[-1].fds


def test_a_start_of_all_that_comes_late_meets_the_others_at_their_store(
    context: TaskdContext, spawner: Slow
) -> None:
    """Another recovery has begun since, so that it waits at the gate."""
    first = context.respawn(0, {"incarnation": 0, "gated": False}, inherits=False)
    first.box.write_extras(5, b"generators")
    launcher = Launcher()
    host = TorchrunHost(launcher, context)  # type: ignore[arg-type]
    host.spawn(0, 2, generation=3, gated=True, restarts_used=1, start=2)
    assert spawner.asked[-1].env["MASTER_PORT"] == "40002"
    assert spawner.asked[-1].worker["gated"]
    assert "previous" not in spawner.asked[-1].fds
    host.spawn(0, 3, generation=3, gated=True, restarts_used=2)
    assert spawner.asked[-1].env["MASTER_PORT"] == "40002"
    assert "previous" in spawner.asked[-1].fds
    assert launcher.opened == [2]
