"""Programs that crash, exit or are asked for their stacks, and the box that they leave."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from typing import TYPE_CHECKING

from taskd.native import last_words, library
from tests.native import programs

if TYPE_CHECKING:
    from taskd.native.black_box import BlackBox

# argv: box fd, path of the library with the faults, whatever the test adds. `armed` is what start()
# said, None if it was not called.
PRELUDE = """
import ctypes, faulthandler, os, resource, signal, sys, threading, time
from taskd.native import last_words
from taskd.native.black_box import BlackBox
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
crashes = ctypes.CDLL(sys.argv[2])
held = ctypes.PyDLL(sys.argv[2])       # keeps the interpreter lock
crashes.compute.restype = ctypes.c_double
box = BlackBox.attach(int(sys.argv[1]))
box.begin(os.getpid(), 1)
def say(*words):
    print(*words, flush=True)
"""
START = "assert last_words.start(box)\n"


def command(body: str, box: BlackBox, *arguments: str) -> list[str]:
    return [sys.executable, "-c", PRELUDE + body, str(box.fd), *arguments]


def run(
    body: str, box: BlackBox, *arguments: str, preload: bool = False, **environment: str
) -> subprocess.CompletedProcess[str]:
    env = (
        programs.environment()
        | environment
        | ({"LD_PRELOAD": str(library.LIBRARY_PATH)} if preload else {})
    )
    return subprocess.run(
        command(body, box, *arguments),
        env=env,
        pass_fds=[box.fd],
        capture_output=True,
        text=True,
        timeout=programs.DEADLINE_S,
        check=False,
    )


@contextlib.contextmanager
def running(body: str, box: BlackBox, *arguments: str):
    process = subprocess.Popen(
        command(body, box, *arguments),
        env=programs.environment(),
        pass_fds=[box.fd],
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with programs.ending(process):
        yield process


def words_of(box: BlackBox) -> last_words.LastWords:
    words = last_words.read_of_end(box)
    assert words is not None, "nothing was written"
    assert words.complete
    return words
