"""What `python -m taskd.chaos` sees of a job and does to it, on real processes without a job."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from taskd.chaos import command, target
from taskd.native.black_box import Phase

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Iterator

LIMIT_S = 20.0
# A worker in step 5, and a child of it that has its box, too, as a data loader has.
WORKER = """
import os, sys
from taskd.native.black_box import BlackBox, Phase
box = BlackBox.create()
box.begin(os.getpid(), 0)
box.mark_version(5)
box.mark_phase(Phase.FORWARD)
child = os.fork()
if child:
    print("ready", child, flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def process(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as running:
        try:
            yield running
        finally:
            running.kill()


def test_a_worker_is_who_holds_its_own_black_box() -> None:
    with process(sys.executable, "-c", WORKER) as running:
        assert running.stdout is not None
        child = int(running.stdout.readline().split()[1])
        found = target.workers(os.getpid())
        assert found == [target.Worker(running.pid, Phase.FORWARD, 5)]
        below = target.descendants(running.pid, target.parents())
        assert below == [child]
        assert target.workers(running.pid) == []
        # the agent is two above: here this process stands for a forkserver
        assert target.agents(os.getpid()) == [os.getppid()]
        assert {running.pid, child} <= target.session(os.getsid(0))
        assert command.hit(running.pid, signal.SIGKILL, LIMIT_S)
        assert target.workers(os.getpid()) == []


def test_phases_in_which_a_job_is_over_are_those_of_the_black_box() -> None:
    assert target.LEAVING == (Phase.RETURNED, Phase.EXITING)


def test_the_manager_is_the_one_that_has_listened_last(tmp_path: pathlib.Path) -> None:
    log = tmp_path / "manager.log"
    assert target.manager(log) is None
    own = os.getpid()
    listens = "manager of job j listens on 127.0.0.1:9601 (pid {})\n"
    registered = "manager node {} of 2 registered, ranks [{}] of 2\n"
    with log.open("w") as file:
        file.write(listens.format(1) + registered.format(0, 0) + registered.format(1, 1))
        file.write(listens.format(own) + 2 * registered.format(1, 1))
    assert target.manager(log) == own
    assert target.registrations(log, own) == 1
    with process("true") as running:
        running.wait()
    with log.open("a") as file:
        file.write(listens.format(running.pid))
    assert target.manager(log) is None
    assert target.registrations(log, running.pid) == 0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGSTOP])
def test_a_fault_has_happened_when_its_process_is_gone_or_stopped(number: signal.Signals) -> None:
    with process("sleep", "60") as running:
        assert command.hit(running.pid, number, LIMIT_S)
        if number == signal.SIGSTOP:
            assert target.state_of(running.pid) == "T"
        else:
            assert running.wait(LIMIT_S) == -number


def test_a_fault_has_not_happened_to_who_ignores_it_or_is_gone() -> None:
    ignores = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(); input()"
    with process(sys.executable, "-c", ignores) as running:
        assert running.stdout is not None
        running.stdout.readline()
        assert not command.hit(running.pid, signal.SIGTERM, 0.1)
    assert not command.hit(running.pid, signal.SIGKILL, LIMIT_S)


def test_nothing_of_a_command_is_left(tmp_path: pathlib.Path) -> None:
    """Not even who has no parent any more, and ignores SIGTERM."""
    script = "trap '' TERM; (sleep 60 & echo $!); echo ready; sleep 60"
    with command.Command(["sh", "-c", script], dict(os.environ), tmp_path / "out") as running:
        while "ready" not in (tmp_path / "out").read_text():
            assert running.status is None
        orphan = int((tmp_path / "out").read_text().split()[0])
        assert orphan in target.session(running.pid)
        os.kill(running.pid, signal.SIGKILL)
    assert running.status == -signal.SIGKILL
    assert target.state_of(orphan) in ("", "Z")
