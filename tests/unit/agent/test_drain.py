"""SIGTERM to torchrun, when the job cannot be saved: what torchrun would do with it is done."""

from __future__ import annotations

import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from taskd.agent.drain import Drain
from taskd.errors import TaskdError

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


def test_outside_the_main_thread_the_agent_does_without_the_signal(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Torch registers none of its handlers there. A training process may tell of SIGTERM still."""
    before = signal.getsignal(signal.SIGTERM)

    def serve() -> None:
        with Drain(5.0) as drain:
            assert signal.getsignal(signal.SIGTERM) is before
            drain.state.hear(0.0, "SIGTERM to rank 0")
            with pytest.raises(
                TaskdError, match="SIGTERM to rank 0, and the job was not saved in time"
            ):
                drain.end_at_once()
            assert not drain.state.is_asked
            drain.finish()
            assert signal.getsignal(signal.SIGTERM) is before

    with ThreadPoolExecutor(1) as other:
        other.submit(serve).result()
    assert "SIGTERM to this process does not save the job" in caplog.text


def test_where_nothing_is_saved_the_signal_is_left_alone() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with Drain(None) as drain:
        assert signal.getsignal(signal.SIGTERM) is before
        drain.end_at_once()
