"""What an agent sees of its workers: real processes that sleep, work, are stopped; and an agent that slept itself."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from taskd.agent.vitals import Vitals
from taskd.core import marks
from taskd.native.black_box import BlackBox, Phase

if TYPE_CHECKING:
    from collections.abc import Iterator

    from taskd.core.marks import Mark

PTRACE_SEIZE, PTRACE_DETACH = 0x4206, 17


@dataclasses.dataclass
class Worker:
    pid: int | None
    box: BlackBox
    incarnation: int = 0


class Program:
    """A process that does one thing, with the black box of a worker that has stood since the program began."""

    def __init__(self, code: str) -> None:
        self.process = subprocess.Popen([sys.executable, "-c", code], start_new_session=True, stdout=subprocess.PIPE)
        self.box = BlackBox.create()
        self.box.begin(self.process.pid, 0)
        self.box.mark_phase(Phase.FORWARD)
        self.worker = Worker(self.process.pid, self.box)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"ready\n"

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()
        self.box.close()


@pytest.fixture
def start() -> Iterator:
    programs = []

    def run(code: str) -> Program:
        programs.append(Program(code))
        return programs[-1]

    yield run
    for program in programs:
        program.end()


def looked_at(program: Program, wanted: str, deadline_s: float = 20.0) -> Mark:
    """The first mark with that activity; looks as an agent does."""
    vitals, end = Vitals(), time.monotonic() + deadline_s
    seen = []
    while time.monotonic() < end:
        (mark,) = vitals.look(time.monotonic(), 0.25, {3: program.worker})
        seen.append(mark.activity)
        if mark.activity == wanted:
            return mark
        time.sleep(0.25)           # the agent's interval
    raise AssertionError(f"never {wanted}: {seen}")


def test_a_process_that_sleeps(start) -> None:
    mark = looked_at(start("import time; print('ready', flush=True); time.sleep(1000)"), marks.ASLEEP)
    assert (mark.rank, mark.incarnation, mark.phase) == (3, 0, "forward")
    assert mark.still_s > 0.7


def test_a_process_that_works(start) -> None:
    looked_at(start("print('ready', flush=True)\nwhile True: pass"), marks.BUSY)


def test_a_process_whose_child_works_is_busy(start) -> None:
    looked_at(start("import subprocess, sys; print('ready', flush=True); subprocess.run([sys.executable, '-c', 'while True: pass'])"),
              marks.BUSY)


def test_a_process_that_reads_a_little_now_and_then_is_busy(start) -> None:
    looked_at(start("import time; print('ready', flush=True)\nwhile True:\n  open('/proc/self/stat').read(); time.sleep(0.3)"), marks.BUSY)


def test_a_stopped_process(start) -> None:
    program = start("import time; print('ready', flush=True); time.sleep(1000)")
    os.kill(program.process.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, program.process.pid, os.WSTOPPED)
    looked_at(program, marks.STOPPED)


def test_a_process_under_a_debugger(start) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]
    program = start("import time; print('ready', flush=True); time.sleep(1000)")
    if libc.ptrace(PTRACE_SEIZE, program.process.pid, None, None) != 0:
        pytest.skip(f"ptrace is not allowed here: {os.strerror(ctypes.get_errno())}")
    looked_at(program, marks.TRACED)


def test_a_process_that_has_ended_is_no_error(start) -> None:
    program = start("print('ready', flush=True)")
    program.process.wait()
    vitals = Vitals()
    for _ in range(2):
        (mark,) = vitals.look(time.monotonic() + 5.0, 0.25, {0: program.worker})
        assert mark.activity == marks.UNKNOWN


def test_a_worker_that_goes_on_is_not_looked_up() -> None:
    box = BlackBox.create()
    box.begin(1, 0)
    (mark,) = Vitals().look(time.monotonic(), 1.0, {0: Worker(1, box)})
    assert mark.activity == marks.UNKNOWN
    assert mark.still_s < 0.7
    box.close()


def test_an_agent_that_slept_does_not_blame_its_workers() -> None:
    box = BlackBox.create()
    box.begin(1, 0)
    vitals, began = Vitals(), time.monotonic()
    vitals.look(began, 1.0, {0: Worker(None, box)})
    (mark,) = vitals.look(began + 60.0, 1.0, {0: Worker(None, box)})
    assert mark.still_s == 0
    (mark,) = vitals.look(began + 61.0, 1.0, {0: Worker(None, box)})
    assert mark.still_s == pytest.approx(1.0)
    assert vitals.is_somebody_standing
    box.close()
