"""SIGTERM in a training process: whose it is, and who handles it."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

_BEGIN = """
import asyncio, os, signal
from taskd.worker.process.sigterm import Sigterm
sigterm = Sigterm()
"""
_SIGNAL = "os.kill(os.getpid(), signal.SIGTERM)\n"


def ended(code: str) -> tuple[int, str]:
    """The status of a process that runs this, and what it has printed."""
    process = subprocess.run(
        [sys.executable, "-c", _BEGIN + code], stdout=subprocess.PIPE, text=True, check=False
    )
    return process.returncode, process.stdout


def test_it_ends_the_process_only_when_the_agent_has_hung_up() -> None:
    code = f"sigterm.watch()\n{_SIGNAL}print(sigterm.read(), sigterm.read(), flush=True)\n"
    assert ended(code + "sigterm.step_aside()") == (-signal.SIGTERM, "True False\n")


def test_one_that_comes_after_the_agent_has_hung_up() -> None:
    code = "sigterm.watch()\nsigterm.step_aside()\nprint('alive', flush=True)\n"
    assert ended(code + _SIGNAL) == (-signal.SIGTERM, "alive\n")


@pytest.mark.parametrize("order", ["{handle}sigterm.watch()\n", "sigterm.watch()\n{handle}"])
def test_the_handler_of_the_script_stays(order: str) -> None:
    handle = "signal.signal(signal.SIGTERM, lambda *_: print('own', flush=True))\n"
    code = order.format(handle=handle) + _SIGNAL + "print(sigterm.has_come, flush=True)\n"
    assert ended(f"{code}sigterm.step_aside()\n{_SIGNAL}") == (0, "own\nTrue\nown\n")


def test_what_the_script_ignores_is_ignored() -> None:
    code = f"signal.signal(signal.SIGTERM, signal.SIG_IGN)\nsigterm.watch()\n{_SIGNAL}"
    assert ended(f"{code}print(sigterm.has_come)") == (0, "False\n")


def test_beside_the_event_loop_of_the_script() -> None:
    loop = "loop = asyncio.new_event_loop()\nloop.add_signal_handler(signal.SIGUSR1, print)\n"
    code = f"{loop}sigterm.watch()\n{_SIGNAL}print(sigterm.has_come)\nloop.close()"
    assert ended(code) == (0, "True\n")


def test_a_forked_child_has_nothing_of_it() -> None:
    fork = f"pid = os.fork()\nif pid == 0:\n    {_SIGNAL}    os._exit(0)\n"
    code = f"sigterm.watch()\n{fork}print(os.waitpid(pid, 0)[1], sigterm.has_come)"
    assert ended(code) == (0, f"{int(signal.SIGTERM)} False\n")
