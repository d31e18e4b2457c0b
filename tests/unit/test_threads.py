"""Threads of ours that are at work when the interpreter ends, each in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 120

TICKING = """
import os, sys, threading, time, warnings
from taskd import threads

over = threading.Event()

def tick():
    while not over.is_set():
        [{number} for number in range(3)]  # of sets none is kept to be used again: each counts
        time.sleep(0.01)
"""
# They collect what torch has made, and take the interpreter's lock again when it has begun to end.
COLLECTING = {
    "one of another": """
from testbed.late_garbage import collect_late

begun = collect_late("other")
threading.Thread(target=tick, name="other", daemon=True).start()
""",
    "a copy into node memory": """
import torch
from taskd.native.arena import Arena
from taskd.worker.saving.copier import Snapshotter
from testbed.late_garbage import collect_late

begun = collect_late("taskd-snapshot")
Snapshotter(Arena.create, every=1).commit(1, 0, {"weight": torch.ones(5)})
""",
    "a checkpoint": """
import pathlib, torch
from taskd.checkpoint.saver import Saver
from testbed.late_garbage import collect_late

begun = collect_late("taskd-saver")
saver = Saver(pathlib.Path(sys.argv[1]), job="job", rank=0, writers=(0,), attempt="0",
              generation=0, world_size=1, every=1, keep=1)
saver.save(1, {"model": {"weight": torch.ones(5)}})
""",
}


def end(code: str, *arguments: str) -> subprocess.CompletedProcess:
    """Run `code`, whose process ends as soon as it has come to its end."""
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


@pytest.mark.parametrize("thread", COLLECTING)
def test_a_thread_of_ours_is_at_rest_before_the_interpreter_ends(tmp_path, thread: str) -> None:
    ended = end(f"{TICKING}{COLLECTING[thread]}\nassert begun.wait(60)\nprint('ends')", tmp_path)
    assert ended.stdout == "ends\n", ended.stderr
    if thread != "one of another":
        assert (ended.returncode, ended.stderr) == (0, "")
    elif sys.version_info < (3, 14):  # this is what the others would do
        assert ended.returncode == -6
        assert "terminate called without an active exception" in ended.stderr


def test_what_a_script_does_at_its_end_is_done_while_ours_are_at_work() -> None:
    ended = end(f"""{TICKING}
import atexit
threads.start_thread("ours", tick, stop=over.set)
atexit.register(lambda: print(over.is_set(), flush=True))
""")
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "False\n", "")


def test_one_that_does_not_come_to_rest_is_named_and_left() -> None:
    ended = end(f"""{TICKING}
threads._LIMIT_S = 0.1
threads.start_thread("ours", tick, stop=lambda: print("asked", flush=True))
""")
    assert (ended.returncode, ended.stdout) == (0, "asked\n")
    assert ended.stderr == "the interpreter ends without ours, not at rest after 0.1 s\n"


def test_a_forked_child_does_not_wait_for_its_parents_threads_nor_stop_them() -> None:
    ended = end(f"""{TICKING}
threads.start_thread("ours", tick, stop=lambda: (print("asked", flush=True), over.set()))
warnings.simplefilter("ignore", DeprecationWarning)  # of 3.12 and later, at a fork beside threads
child = os.fork()
if child:
    assert os.waitpid(child, 0)[1] == 0
    print("the child has ended", flush=True)
""")
    assert (ended.returncode, ended.stdout) == (0, "the child has ended\nasked\n")
    assert ended.stderr == ""


def test_what_could_not_be_started_or_has_ended_is_not_waited_for() -> None:
    ended = end(f"""{TICKING}
ours = threads.start_thread("ours", str)
ours.join()
def refuse(_thread):
    raise RuntimeError("can't start new thread")
threading.Thread.start = refuse
try:
    threads.start_thread("another", tick)
except RuntimeError as error:
    print(error, len(threads._running))
""")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout == "can't start new thread 0\n"
