"""Small programs for the tests of the death alarm, run as real processes.

They speak over stdout, one line per fact.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 30.0  # for facts that take milliseconds: a busy machine is not a failure

# argv: box fd, life fd (-1: none). Guards itself, says so, then does what the test asks for.
PRELUDE = """
import ctypes, os, signal, subprocess, sys, threading, time
from taskd.native.black_box import BlackBox
from taskd.native.death_alarm import guard
box = BlackBox.attach(int(sys.argv[1]))
life_fd = int(sys.argv[2])
box.begin(os.getpid(), 1)
def say(*words):
    print(*words, flush=True)
def hold_the_gil_for_ever():
    # A mutex that one thread locks twice never returns, and PyDLL keeps the interpreter lock.
    mutex, lib = ctypes.create_string_buffer(64), ctypes.PyDLL(None)
    lib.pthread_mutex_lock(mutex)
    lib.pthread_mutex_lock(mutex)
"""
GUARD = "say('guarded', guard(box, None if life_fd < 0 else life_fd))\n"
READ = "sys.stdin.readline()\n"


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def start(body: str, box_fd: int, life_fd: int = -1, **options) -> subprocess.Popen:
    """A worker in a session of its own. Text pipes on stdin and stdout."""
    fds = [fd for fd in (box_fd, life_fd) if fd >= 0]
    options = {"start_new_session": True, "pass_fds": fds} | options
    return subprocess.Popen(
        [sys.executable, "-c", PRELUDE + body, str(box_fd), str(life_fd)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment(),
        text=True,
        **options,
    )


def expect(process: subprocess.Popen, line: str) -> None:
    """The next line must be this one."""
    assert read_line(process) == line


def read_line(process: subprocess.Popen) -> str:
    """The next line, within the deadline.

    Byte by byte, because what a buffer has taken does not show in poll().
    """
    fd, line = process.stdout.fileno(), b""
    while not line.endswith(b"\n"):
        assert is_readable(fd, DEADLINE_S), f"the program said no more than {line!r}"
        piece = os.read(fd, 1)
        assert piece, f"the program ended after {line!r}"
        line += piece
    return line.decode().rstrip("\n")


def is_readable(fd: int, timeout_s: float = DEADLINE_S) -> bool:
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    return bool(poller.poll(timeout_s * 1000))


def wait_until(is_true, what: str) -> None:
    """For facts that only show when looked at."""
    deadline = time.monotonic() + DEADLINE_S
    pause = threading.Event()
    while not is_true():
        assert time.monotonic() < deadline, f"not within {DEADLINE_S} s: {what}"
        pause.wait(0.005)


def wait_for_end(pidfd: int) -> None:
    assert is_readable(pidfd), "the process lives on"


@contextlib.contextmanager
def ending(*processes: subprocess.Popen):
    """Whatever the test does, these are gone afterwards."""
    try:
        yield
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGKILL)
            process.wait()
            process.stdin.close()
            process.stdout.close()
