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


def test_a_former_life_that_starts_after_its_successor_was_asked_for(
    sleeper: subprocess.Popen[bytes],
) -> None:
    spawner = Slow()
    life_fd, other = os.pipe()
    context = TaskdContext(
        spawner=spawner,  # type: ignore[arg-type]
        bootstraps={},
        life_fd=life_fd,
        name="default",
        entrypoint=sys.executable,
        args={0: ("script.py",)},
        envs={0: {}},
        logs_specs=DefaultLogsSpecs(),
    )
    context.stdouts, context.stderrs, context.error_files = {0: ""}, {0: ""}, {0: os.devnull}
    try:
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
    finally:
        context.close(timeout=0)
        os.close(life_fd)
        os.close(other)
