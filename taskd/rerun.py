"""`python -m taskd.rerun [--max-restarts N] -- COMMAND`: one process, started again if it dies.

For a training that is no job of torchrun (TensorFlow, a script of one process): needs no torch, no
manager and no agent, and knows nothing of what it starts. The command goes on from its own
checkpoints.

    platform --SIGTERM--> taskd.rerun --SIGTERM--> process group of the command: saves, and ends
                               ^-------SIGCHLD------'   no other start then; SIGKILL after the grace

One thread, one wait: all signals that matter are blocked and taken one at a time, so that none is
lost between two starts.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, NoReturn

from taskd import streams
from taskd.agent.spawning import processes
from taskd.clock import MonotonicClock
from taskd.config import job
from taskd.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from taskd.clock import Clock

DEFAULT_MAX_RESTARTS = 3  # nothing here tells a crash in each start from faults of machines
_HANDED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_NOT_STARTED = 2  # as for wrong usage: the same command would fail again
_BY_SIGNAL = 128  # plus its number, as a shell has it


class Command:
    """What is started, and how often it still may be."""

    def __init__(
        self, command: Sequence[str], max_restarts: int, grace_s: float, clock: Clock
    ) -> None:
        self._command, self._left, self._max_restarts = command, max_restarts, max_restarts
        self._grace_s, self._clock = grace_s, clock
        # What is ignored stays so: nohup ignores SIGHUP for all that it starts.
        self._handed_on = {one for one in _HANDED_ON if signal.getsignal(one) != signal.SIG_IGN}
        self._ending: signal.Signals | None = None
        self._kill_at: float | None = None

    def run(self) -> int:
        """Its exit code: that of the last process, or 128 and the number of its signal.

        Raises ConfigError: the command cannot be started.
        """
        # Ignored, as a parent may have left it, the ends of children would be thrown away.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {*self._handed_on, signal.SIGCHLD})
        try:
            status = self._live(before)
            while self._may_restart(status):
                status = self._live(before)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return status if status >= 0 else _BY_SIGNAL - status

    def _live(self, mask: set[int | signal.Signals]) -> int:
        """One process from its start to its end: exit code, or minus the signal number."""
        parent = os.getpid()

        def prepare() -> None:
            processes.end_with_parent()
            if os.getppid() != parent:  # dead before the line above
                os._exit(_BY_SIGNAL + signal.SIGKILL)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

        try:
            process = subprocess.Popen(
                self._command,
                start_new_session=True,
                preexec_fn=prepare,  # noqa: PLW1509  # there is one thread
            )
        except OSError as error:
            raise ConfigError(
                f"{self._command[0]} cannot be started: {error.strerror}; what stands behind -- is "
                "started as it is, without a shell"
            ) from error
        pidfd = os.pidfd_open(process.pid)
        try:
            while (status := processes.reap_group(process.pid, pidfd)) is None:
                self._wait(process.pid)
        finally:
            os.close(pidfd)
        process.returncode = status  # it is reaped: subprocess must not look for it again
        return status

    def _wait(self, pid: int) -> None:
        """For the next signal, and no longer than the grace."""
        awaited = {*self._handed_on, signal.SIGCHLD}
        number = signal.SIGCHLD
        if self._kill_at is None:
            number = signal.Signals(signal.sigwait(awaited))
        else:
            taken = signal.sigtimedwait(awaited, max(0.0, self._kill_at - self._clock.now()))
            if taken is not None:
                number = signal.Signals(taken.si_signo)
            else:
                _say(f"pid {pid} has not ended after {self._grace_s:g} s and is killed")
                processes.signal_group(pid, signal.SIGKILL)
                self._kill_at = None
        if number != signal.SIGCHLD:
            self._end(pid, number)

    def _end(self, pid: int, number: signal.Signals) -> None:
        """Hand a signal on; the first one begins the grace."""
        if self._ending is None:
            self._ending = number
            self._kill_at = self._clock.now() + self._grace_s
            _say(f"{number.name} is handed on to pid {pid}, which has {self._grace_s:g} s")
        processes.signal_group(pid, number)

    def _may_restart(self, status: int) -> bool:
        """Whether there is to be another start, which is counted and said."""
        how = processes.describe_status(status)
        if status == 0:
            return False
        late = signal.sigtimedwait(self._handed_on, 0) if self._handed_on else None
        if self._ending is None and late is not None:  # came when nobody was there any more
            self._ending = signal.Signals(late.si_signo)
        if self._ending is not None:
            _say(f"the command ended with {how} after {self._ending.name}: not started again")
            return False
        if self._left == 0:
            _say(f"the command ended with {how}; no restart of {self._max_restarts} is left")
            return False
        self._left -= 1
        used = self._max_restarts - self._left
        _say(f"the command ended with {how}: restart {used} of {self._max_restarts}")
        return True


def _say(text: str) -> None:
    streams.tell(f"taskd: {text}\n")


def _parsed(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Options and command. Ends the process with 2 if one is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m taskd.rerun",
        usage="%(prog)s [--max-restarts N] -- COMMAND ...",
        description="Starts COMMAND, and again if it dies; hands SIGTERM on to it.",
        epilog="Exit code: that of COMMAND, 128 and the number if a signal ended it; "
        "2 also for wrong usage.",
    )
    parser.add_argument(
        "--max-restarts",
        type=int,
        default=DEFAULT_MAX_RESTARTS,
        metavar="N",
        help=f"how often it is started again (default {DEFAULT_MAX_RESTARTS})",
    )
    at = arguments.index("--") if "--" in arguments else len(arguments)
    options, command = parser.parse_args(arguments[:at]), arguments[at + 1 :]
    if not command:
        parser.error("no command: write it behind --, for example -- python train.py")
    if options.max_restarts < 0:
        parser.error(f"--max-restarts {options.max_restarts}: 0 or more is needed")
    return options, command


def main(arguments: list[str]) -> NoReturn:
    """The command line."""
    options, command = _parsed(arguments)
    try:
        grace_s = job.grace()
        status = Command(command, options.max_restarts, grace_s, MonotonicClock()).run()
    except ConfigError as error:
        _say(str(error))
        status = _NOT_STARTED
    sys.exit(status)


if __name__ == "__main__":
    main(sys.argv[1:])
