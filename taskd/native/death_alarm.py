"""The death alarm: a worker's death becomes known before the kernel has torn its memory down.

    worker                             agent
    guard thread owns a futex -------> watch thread sleeps on it
    (in the black box)                 writes one record to a pipe ----> DeathAlarm.fd, in the
                                                                         agent's one wait

How it works, and what does not ring it, is in csrc/include/taskd.h. Without libtaskd `available` is
False, nothing ever rings, and the pidfd alone must do. Knows nothing of ranks: the caller's token
says whose death it was.
"""

from __future__ import annotations

import logging
import os
import signal
import struct
import threading
from typing import TYPE_CHECKING

from taskd.errors import NativeLibraryError
from taskd.native import library

if TYPE_CHECKING:
    from taskd.native.black_box import BlackBox

logger = logging.getLogger(__name__)

_RECORD = struct.Struct("=QQii")  # struct taskd_death

# Between SIGTERM and SIGKILL, for handlers that save something. The same as TERM_GRACE_S in
# csrc/death_alarm/guard.c.
_TERM_GRACE_S = 5.0


class DeathAlarm:
    """Agent side: watches many lives, one token each."""

    def __init__(self) -> None:
        self._binding = library.load()
        # Exists without the library too, and is then silent: callers poll it without asking.
        self._read_fd, self._write_fd = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._read_fd, False)
        self._box_by_token: dict[int, BlackBox] = {}

    @property
    def available(self) -> bool:
        """Whether deaths will be reported at all."""
        return self._binding is not None

    @property
    def fd(self) -> int:
        """Readable when `read` has something to return."""
        return self._read_fd

    def wake_soon(self) -> None:
        """For the thread that waits for `fd`.

        It runs soon after a death even where others compute on every core.
        """
        if self._binding is None:
            return
        try:
            self._binding.prefer_soon()
        except NativeLibraryError as error:
            logger.debug("deaths are read when the scheduler lets us: %s", error)

    def watch(self, token: int, box: BlackBox) -> bool:
        """Report the death of the life that uses `box`, once, as `token`.

        May be called before the worker has a guard.

        False: not available, or the system refused (logged); the pidfd must do for this life.
        """
        if self._binding is None:
            return False
        try:
            self._binding.watch(box.fd, token, self._write_fd)
        except NativeLibraryError as error:
            logger.warning("no death alarm for worker %d: %s", token, error)
            return False
        self._box_by_token[token] = box
        return True

    def unwatch(self, token: int) -> None:
        """The life is over (reaped, or never started): forget it, even if it never had a guard.

        Unknown tokens are fine.
        """
        box = self._box_by_token.pop(token, None)
        if self._binding is None or box is None or box.fd < 0:
            return
        try:
            self._binding.unwatch(box.fd)
        except NativeLibraryError as error:
            logger.warning(
                "the death alarm of worker %d keeps waiting until this process ends: %s",
                token,
                error,
            )

    def read(self) -> list[tuple[int, float]]:
        """(token, monotonic seconds of the death) of everybody who died since the last call.

        Never blocks.
        """
        try:
            # records are written whole, and read whole
            content = os.read(self._read_fd, 1024 * _RECORD.size)
        except BlockingIOError:
            return []
        return [
            (token, died_ns / 1e9) for token, died_ns, _result, _ in _RECORD.iter_unpack(content)
        ]

    def close(self) -> None:
        """Forget all lives; twice is once.

        Watches of living workers end with the worker or with this process.
        """
        if self._read_fd < 0:
            return
        for token in list(self._box_by_token):
            self.unwatch(token)
        os.close(self._read_fd)
        os.close(self._write_fd)
        self._read_fd = self._write_fd = -1


def guard(box: BlackBox, life_fd: int | None) -> bool:
    """Worker side, once per life.

    Arm the alarm, and end this process group when the pipe behind `life_fd` ends.

    `life_fd`: read end of a pipe whose write end only the agent holds; None: do not watch the
    agent. The caller may close it. False: no libtaskd, or it refused (logged): then nobody here
    notices that the agent is gone.
    """
    binding = library.load()
    if binding is None:
        return False
    try:
        binding.guard_start(box.fd, -1 if life_fd is None else life_fd)
    except NativeLibraryError as error:
        logger.warning("no death alarm in this process: %s", error)
        return False
    return True


def end_own_process_group() -> None:
    """What the guard does when the agent is gone, for a process without a guard.

    SIGTERM, 5 s later SIGKILL. Does not return.

    For a background thread, and weaker than the guard: a main thread that is stuck with the
    interpreter lock keeps it waiting.
    """
    own = os.getpid()
    leads = os.getpgrp() == own
    target = -own if leads else own  # somebody else's group is not ours to end
    logger.error(
        "the agent of this worker is gone: ending the worker%s", "'s process group" if leads else ""
    )
    os.kill(target, signal.SIGTERM)
    threading.Event().wait(_TERM_GRACE_S)
    os.kill(target, signal.SIGKILL)
