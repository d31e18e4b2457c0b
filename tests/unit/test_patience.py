"""What a limit of a process test counts: not the time in which its job had no processor."""

from __future__ import annotations

import re
import sys
import time
from typing import TYPE_CHECKING

import pytest

from testbed.patience import Patience
from testbed.processes import Output, environment
from tests.process import harness

if TYPE_CHECKING:
    import pathlib

STARVED_S = 4.0
LIMIT_S = 3.0  # less
_SLEEP = "import time; time.sleep(600)"
# For so long its children have eight of nine parts of the processor; it needs more than the ninth.
_STARVED = f"""
import os, time
os.sched_setaffinity(0, {{min(os.sched_getaffinity(0))}})
until = time.monotonic() + {STARVED_S}
for _ in range(8):
    if os.fork() == 0:
        while time.monotonic() < until:
            pass
        os._exit(0)
end = time.process_time() + {STARVED_S / 6}
while time.process_time() < end:
    pass
print("done", flush=True)
"""
# At this priority one wait lasts for seconds, and the kernel counts it when it ends.
_IDLE = """
print("begun", flush=True)
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
end ="""
_STARVED_LONG = (
    _STARVED.replace(f"+ {STARVED_S}", "+ 600")
    .replace("range(8)", "range(2)")
    .replace("end =", _IDLE)
)


@pytest.fixture
def start(tmp_path: pathlib.Path):
    """Start a program; it is ended with the test."""
    started = []

    def start(program: str) -> Output:
        command = [sys.executable, "-c", program]
        out = tmp_path / f"{len(started)}.out"
        started.append(Output(command, environment(), out, tmp_path))
        return started[-1]

    yield start
    for output in started:
        output.end()


def test_a_process_that_waited_for_a_processor_is_waited_for(start) -> None:
    before = time.monotonic()
    output = start(_STARVED)
    assert output.wait(LIMIT_S).returncode == 0
    assert time.monotonic() - before > STARVED_S


def test_so_is_what_it_prints(start) -> None:
    before = time.monotonic()
    start(_STARVED).wait_text("done", LIMIT_S)
    assert time.monotonic() - before > STARVED_S


def test_a_wait_that_is_not_over_is_counted(start) -> None:
    output = start(_STARVED_LONG)
    output.wait_text("begun", LIMIT_S)
    patience, until = Patience(0.1, lambda: [output.process.pid]), time.monotonic() + 2.0
    while time.monotonic() < until:
        assert patience.left_s() > 0, patience
        time.sleep(0.01)


def test_one_that_sleeps_is_not(start) -> None:
    output = start(_SLEEP)
    with pytest.raises(TimeoutError, match="still running after") as error:
        output.wait(1.0)
    found = re.search(r"after (\S+) s, of which a thread waited (\S+) s", str(error.value))
    assert found is not None, error.value
    assert float(found[1]) - float(found[2]) >= 1.0 - 0.1  # both are rounded
    with pytest.raises(TimeoutError, match=r"too late, after .*, never said 'done'"):
        output.wait_text("done", 0.1)


def test_what_it_waited_before_is_not_counted(start) -> None:
    pids: list[int] = []
    whole = Patience(60, lambda: pids)
    output = start(_STARVED + _SLEEP)
    pids.append(output.process.pid)
    output.wait_text("done", 60)
    since = Patience(60, lambda: [output.process.pid])
    assert whole.delayed_s() > STARVED_S / 2
    assert since.delayed_s() < whole.delayed_s() - STARVED_S / 2


def test_of_one_that_has_ended_nothing_is_counted(start) -> None:
    output = start("print('done')")
    output.wait(60)
    patience = Patience(0.1, lambda: [output.process.pid])
    time.sleep(0.2)  # the limit itself
    assert patience.left_s() == 0.0
    with pytest.raises(TimeoutError, match="ended, never said 'more'"):
        output.wait_text("more", 60)


def test_all_processes_of_a_job_are_waited_for(tmp_path: pathlib.Path) -> None:
    with harness.job(tmp_path / "job") as job:
        patience = job.patience(LIMIT_S)
        command = [sys.executable, "-c", _STARVED + _SLEEP]
        job.manager = Output(command, job.env, tmp_path / "m.out", tmp_path)
        job.manager.wait_text("done", 60)
        assert patience.left_s() > 0.0
    assert patience.delayed_s() == 0.0  # they are gone
