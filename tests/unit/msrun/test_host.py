"""msrun's workers as the agent's loop has them: starts that are called off before they begin."""

from __future__ import annotations

import select
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from taskd.agent.spawning.protocol import Exited, Started, StartFailed
from taskd.msrun.callbacks import Callbacks
from taskd.msrun.host import MsrunHost

if TYPE_CHECKING:
    from collections.abc import Iterator

LIMIT_S = 30.0


class Launcher:
    """Two workers that do nothing, as msrun has them."""

    def __init__(self) -> None:
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self.starts = 0

    def start_all(self) -> int:
        self.starts += 1
        for rank in (0, 1):
            self.processes[rank] = subprocess.Popen(
                [sys.executable, "-c", "import time; time.sleep(3600)"], start_new_session=True
            )
        return 0

    def kill(self, _: list[int]) -> int:
        for process in self.processes.values():
            process.kill()
            process.wait()
        return 0

    def look(self, _: list[int]) -> dict[int, dict[str, Any]]:
        found = {}
        for rank in (0, 1):
            process = self.processes.get(rank)
            pid, status = (None, 200) if process is None else (process.pid, None)
            found[rank] = {"pid": pid, "status": status, "global_rank": rank}
        return found


@pytest.fixture
def launcher() -> Iterator[Launcher]:
    one = Launcher()
    yield one
    one.kill([-1])


@pytest.fixture
def host(launcher: Launcher) -> Iterator[MsrunHost]:
    """All of its workers have just ended, and are to start anew."""
    functions = {
        "KILL_WORKER": launcher.kill, "START_ALL_WORKER": launcher.start_all,
        "START_WORKER_LIST": launcher.kill, "MONITOR": launcher.look,
    }  # fmt: skip
    one = MsrunHost(
        Callbacks(functions), job_id="job", world_size=2, node_rank=None, max_restarts=3,
        grace_s=1.0,
    )  # fmt: skip
    one.start()
    for rank in (0, 1):
        one.signal(rank, 0, signal.SIGKILL)
    told = []
    while len([reply for _, reply in told if isinstance(reply, Exited)]) < 2:
        told += told_by(one)
    yield one
    one.end()
    one.close()


def told_by(host: MsrunHost) -> list[tuple[tuple[int, int], Any]]:
    """What it says next, by rank and incarnation; it says that it has something."""
    assert select.select(host.fds, [], [], LIMIT_S)[0], "nobody is told anything"
    return [((rank, life.incarnation), reply) for rank, life, reply in host.read()]


def spawn(host: MsrunHost, rank: int, incarnation: int, generation: int) -> None:
    host.spawn(rank, incarnation, generation=generation, gated=False, restarts_used=0)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_start_that_waits_for_the_others_is_called_off_by_a_signal(
    host: MsrunHost, launcher: Launcher, number: int
) -> None:
    spawn(host, 1, 1, generation=1)  # the process of rank 0 has not ended yet
    host.signal(1, 1, number)
    ((who, reply),) = told_by(host)
    assert who == (1, 1)
    assert isinstance(reply, StartFailed)
    assert "was to end before it was started" in reply.error
    assert launcher.starts == 1
    host.signal(1, 1, signal.SIGKILL)  # it is over: nothing is told twice
    assert not host.read()


def test_what_was_called_off_starts_with_the_next_generation(
    host: MsrunHost, launcher: Launcher
) -> None:
    spawn(host, 1, 1, generation=1)
    host.signal(1, 1, signal.SIGTERM)
    told_by(host)
    spawn(host, 0, 2, generation=2)
    assert launcher.starts == 1
    spawn(host, 1, 2, generation=2)
    assert launcher.starts == 2
    started = {who for who, reply in told_by(host) if isinstance(reply, Started)}
    assert started == {(0, 2), (1, 2)}


def test_ranks_of_two_generations_are_never_started_together(
    host: MsrunHost, launcher: Launcher
) -> None:
    spawn(host, 1, 1, generation=1)
    spawn(host, 0, 2, generation=2)
    assert launcher.starts == 1
    ((who, reply),) = told_by(host)
    assert (who, type(reply)) == ((1, 1), StartFailed)
    assert "generation 2" in reply.error
    assert launcher.starts == 1
    spawn(host, 1, 2, generation=2)
    assert launcher.starts == 2
