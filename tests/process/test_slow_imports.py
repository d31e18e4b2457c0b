"""A first start whose imports take longer than anybody waits for them: it goes on without."""

from __future__ import annotations

import os
import select
import sys
import time
from typing import TYPE_CHECKING

import pytest
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs

from taskd.agent.spawning.forkserver import Forkserver
from taskd.agent.spawning.spawner import Spawner
from taskd.agent.workers.memory_folder import MemoryFolder
from taskd.clock import MonotonicClock
from taskd.core.policy import forkservers
from taskd.torchrun.context import TaskdContext
from tests.process.test_spawner import DEADLINE_S, hide_torch

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.slow
# As an import from a network disk, which comes to its end when that answers.
IMPORTED = "import os, time\nwhile not os.path.exists('answers'):\n    time.sleep(0.01)\n"


@pytest.fixture
def context(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TaskdContext]:
    """Of one rank. Its forkservers import what never comes, and no torch."""
    hide_torch(tmp_path / "modules", monkeypatch)
    (tmp_path / "modules" / "imported.py").write_text(IMPORTED, encoding="utf-8")
    (tmp_path / "script.py").write_text("raise SystemExit(7)\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(forkservers, "PRELOAD_S", 0.5)

    def start() -> Forkserver:
        return Forkserver.start("exec", ["imported"])

    spawner = Spawner(start(), MonotonicClock(), start)
    life_fd, other = os.pipe()
    made = TaskdContext(
        spawner=spawner,
        bootstraps={0: {"incarnation": 0}},
        life_fd=life_fd,
        memory=MemoryFolder("", "job", 0, "agent", MonotonicClock(), 60.0),
        name="default",
        entrypoint=sys.executable,
        args={0: ("-u", "script.py")},
        envs={0: dict(os.environ)},
        logs_specs=DefaultLogsSpecs(log_dir=str(tmp_path)),
    )
    yield made
    made.close(timeout=0)
    spawner.close()
    os.close(life_fd)
    os.close(other)


def wait_until(context: TaskdContext, is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not is_true():
        assert time.monotonic() < deadline
        select.select(context.fds(), [], [], 0.05)
        context.read()


def test_workers_are_started_as_torchrun_starts_them_and_the_next_forkserver_is_used(
    context: TaskdContext, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    spawner = context.spawner
    first = spawner.forkserver.pid
    context.start()
    assert context.pids()[0] > 0
    assert f"the forkserver (pid {first}) has not been ready for " in caplog.text
    assert "local rank 0 is not forked from the warm process: the forkserver has not been " in (
        caplog.text
    )
    wait_until(context, lambda: context.workers[0].status == 7)
    assert spawner.forkserver.alive
    assert spawner.forkserver.pid != first
    (tmp_path / "answers").touch()
    wait_until(context, lambda: spawner.forkserver.is_ready)
