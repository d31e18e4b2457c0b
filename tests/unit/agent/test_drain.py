"""SIGTERM to torchrun, when the job cannot be saved: what torchrun would do with it is done."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

# A torchrun that is asked to end twice in `with`; "there" if it lives on.
PROGRAM = """
import os, signal, sys
from taskd.agent.drain import Drain

def handler(number, frame):
    raise SystemExit(number + 100)

def terminate():
    os.kill(os.getpid(), signal.SIGTERM)

former = {"default": signal.SIG_DFL, "ignored": signal.SIG_IGN, "handled": handler}[sys.argv[1]]
signal.signal(signal.SIGTERM, former)
with Drain(5.0) as drain:
    terminate()
    assert drain.state.is_asked
    print("asked", flush=True)
    if sys.argv[2] == "in vain":
        drain.end_at_once()
    else:
        drain.state.asked_at -= 5.0
        terminate()
    print("there", flush=True)
"""


@pytest.mark.parametrize("why", ["in vain", "again"])
@pytest.mark.parametrize(
    ("former", "status", "said"),
    [
        ("default", -signal.SIGTERM, "asked"),  # not among torchrun's --signals-to-handle
        ("ignored", 0, "asked there"),
        ("handled", 100 + signal.SIGTERM, "asked"),
    ],
)
def test_what_was_there_before_has_the_last_word(
    why: str, former: str, status: int, said: str
) -> None:
    command = [sys.executable, "-c", PROGRAM, former, why]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == status, done.stderr
    assert done.stdout.split() == said.split()
