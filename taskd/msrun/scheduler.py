"""MindSpore's scheduler: the process by which the workers of a generation find each other.

msrun starts it before it asks us to start workers. It keeps what workers have told it of
themselves, so one of a later generation that comes first is sent to where the former ones were,
waits there for half a minute, and fails. So each generation has a scheduler of its own: the one
before is ended with the workers, and the next is started with them, by msrun's own function where
that can be reached. Found among the children of this process by its environment.
"""

from __future__ import annotations

import logging
import os
import select
import signal
from contextlib import suppress
from typing import TYPE_CHECKING

from taskd.agent.spawning import processes
from taskd.config.msrun import is_scheduler

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger(__name__)

_KILLED_S = 10.0  # the kernel needs milliseconds, but for a process that waits for a dead disk


class Scheduler:
    """That of this node, if it has one: the first node's."""

    def __init__(self, start: Callable[[], object] | None) -> None:
        """`start`: msrun's function that starts one; None: it cannot be reached."""
        self._start = start
        self._is_due = False  # one was ended, and the next generation needs one
        self._is_said = False

    def stop(self) -> None:
        """A group is being restarted: nobody is to find the scheduler of the one before."""
        found = _running()
        if found and self._start is None:
            if not self._is_said:
                log.warning(
                    "this msrun does not let its scheduler be replaced: the first worker of a "
                    "restarted group may wait for those before, and fail"
                )
                self._is_said = True
            return
        self._is_due = self._start is not None
        for pid in found:
            _kill(pid)

    def start(self) -> None:
        """The next one, if this node has had one. Raises what msrun raises."""
        if self._is_due and self._start is not None:
            self._start()
        self._is_due = False

    def end(self, wait_s: float) -> None:
        """Wait for its own end for so many seconds, then end it."""
        for pid in _running():
            if not _ends_within(pid, wait_s):
                if wait_s:
                    log.warning(
                        "MindSpore's scheduler (pid %d) runs %.0f s after its workers: it is ended",
                        pid,
                        wait_s,
                    )
                _kill(pid)


def _running() -> list[int]:
    return [pid for pid in _children() if is_scheduler(_environment(pid))]


def _ends_within(pid: int, wait_s: float) -> bool:
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([pidfd], [], [], wait_s)[0])
    finally:
        os.close(pidfd)


def _kill(pid: int) -> None:
    """SIGKILL, and wait until it is gone: the next one needs its port."""
    with suppress(ProcessLookupError):
        pidfd = os.pidfd_open(pid)
        processes.signal_alone(pidfd, signal.SIGKILL)
        if not select.select([pidfd], [], [], _KILLED_S)[0]:
            log.warning(
                "MindSpore's scheduler (pid %d) does not end, %.0f s after SIGKILL: the next one "
                "may find its port taken",
                pid,
                _KILLED_S,
            )
        os.close(pidfd)


def _children() -> list[int]:
    found: list[int] = []
    for thread in os.listdir("/proc/self/task"):
        with suppress(OSError), open(f"/proc/self/task/{thread}/children", "rb") as file:
            found += [int(pid) for pid in file.read().split()]
    return found


def _environment(pid: int) -> dict[str, str]:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            pairs = file.read().decode(errors="replace").split("\0")
    except OSError:
        return {}
    return dict(pair.split("=", 1) for pair in pairs if "=" in pair)
