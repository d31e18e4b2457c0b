"""Getting a training process out of whatever it is in.

A collective that waits for a dead peer, or Python code.

Two halves. `abort_groups` runs in the runtime thread and makes every blocked collective raise, one
implementation per backend. `MainThreadInterrupter` then raises `Interrupted` in the main thread by
a real-time signal: the Python handler runs between two bytecodes of the main thread, so it can look
at `life.held` without a race, and the signal also ends blocking system calls (sleep, select, a
lock) that an asynchronous exception would wait for.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from typing import TYPE_CHECKING, Any

from taskd.errors import Interrupted

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import FrameType

    from taskd.worker.life import Life

log = logging.getLogger(__name__)

# First real-time signal to try. The lowest ones are used by debuggers and C libraries more often
# than these.
_FIRST_SIGNAL = signal.SIGRTMIN + 9
_COLLECTIVES = "torch.distributed.distributed_c10d"


def open_sockets() -> dict[int, str]:
    """Every socket of this process.

    Fd -> its kernel name ("socket:[inode]"), which tells a reused number apart.
    """
    found: dict[int, str] = {}
    for entry in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{entry}")
        except OSError:  # closed since the listing, the listing's own descriptor among them
            continue
        if target.startswith("socket:"):
            found[int(entry)] = target
    return found


def shut_down_sockets(sockets: dict[int, str]) -> int:
    """Shut down those of `sockets` that are still the same, connected, TCP. Returns how many.

    Never a listening one: gloo's listener ends the process when its socket fails (torch 2.13).
    """
    count = 0
    for fd, name in sorted(sockets.items()):
        try:
            if os.readlink(f"/proc/self/fd/{fd}") != name:
                continue
            with socket.socket(fileno=os.dup(fd)) as duplicate:
                if (
                    duplicate.family not in (socket.AF_INET, socket.AF_INET6)
                    or duplicate.type != socket.SOCK_STREAM
                ):
                    continue
                if duplicate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    continue
                duplicate.shutdown(socket.SHUT_RDWR)
                count += 1
        except OSError as error:  # not connected any more, or closed meanwhile: nothing waits on it
            log.debug("socket %s was gone before its shutdown: %s", name, error)
    return count


def abort_backend(backend: Any) -> None:
    """Abort what runs on an accelerator backend (NCCL, HCCL). gloo's abort() does nothing in torch 2.13: see sockets."""
    name = type(backend).__name__
    if "Gloo" in name:
        return
    abort = getattr(backend, "abort", None)
    if abort is None:
        log.warning(
            "backend %s has no abort(): a collective that waits for a dead peer ends by "
            "its own timeout",
            name,
        )
        return
    abort()


def abort_groups(backends: Iterable[Any], sockets: dict[int, str]) -> None:
    """Make every collective of the old generation raise.

    Called from the runtime thread, before the unwinding starts.
    """
    for backend in backends:
        try:
            abort_backend(backend)
        # torch's own errors derive from it; the others must still be aborted
        except RuntimeError as error:
            log.warning("abort of %s failed: %s", type(backend).__name__, error)
    shut_down_sockets(sockets)


def _is_in_collective(frame: FrameType | None) -> bool:
    """Whether the main thread is in one of torch's functions that begin an operation and wait for it, by their variable `work`.

    Between the two, a thread of the group uses the caller's tensors, which code on the way out (the
    end of `summon_full_params()`) may free.
    """
    return (
        frame is not None
        and frame.f_globals.get("__name__") == _COLLECTIVES
        and "work" in frame.f_code.co_varnames
    )


class MainThreadInterrupter:
    """Raises `Interrupted` in the main thread, but not in the middle of two things.

    While the optimizer is writing: then `commit()` raises it. And within a collective: if that does
    not fail by itself when the groups are aborted, the signal that the runtime sends after each
    abort raises it behind it.
    """

    def __init__(self, life: Life) -> None:
        """Install the handler; call from the main thread."""
        self._life = life
        self._main = threading.main_thread().ident
        self._signal = next(
            number
            for number in range(_FIRST_SIGNAL, signal.SIGRTMAX)
            if signal.getsignal(number) == signal.SIG_DFL
        )
        signal.signal(self._signal, self._handle)

    def interrupt(self, reason: str) -> None:
        """From the runtime thread: the main thread is to leave the function."""
        self._life.pending = reason
        if self._main is not None:
            signal.pthread_kill(self._main, self._signal)

    def _handle(self, _number: int, frame: FrameType | None) -> None:
        life = self._life
        if life.pending is None or life.held or not life.in_recoverable or _is_in_collective(frame):
            return
        reason, life.pending = life.pending, None
        raise Interrupted(reason)
