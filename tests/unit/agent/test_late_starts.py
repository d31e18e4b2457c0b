"""Signals reach the life that they are meant for, also one that was started late."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs

from taskd.agent.spawning.protocol import Started
from taskd.agent.workers.memory_folder import MemoryFolder
from taskd.clock import MonotonicClock
from taskd.torchrun.context import TaskdContext

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
    context.respawn(0, {"incarnation": 0, "gated": True})
    context.respawn(0, {"incarnation": 1, "gated": True})
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
    first = context.respawn(0, {"incarnation": 0, "gated": False})
    for version in (4, 5):
        first.box.write_extras(version, b"generators")
    lives = [context.respawn(0, {"incarnation": n, "gated": True}) for n in range(1, 9)]
    assert {life.left.fd for life in lives} == {first.box.fd}
    assert {request.fds["previous"] for request in spawner.asked[1:]} == {first.box.fd}
    lives[-1].box.write_extras(4, b"generators")
    assert lives[-1].left is first.box, "it has taken over one of two versions"
    lives[-1].box.write_extras(5, b"generators")
    assert lives[-1].left is lives[-1].box
    anew = context.respawn(0, {"incarnation": 9, "gated": False})
    assert anew.left is anew.box, "all start anew: what was is not to be believed"
