"""Raising `Interrupted` in the main thread, whatever it is in: a system call, or Python code.

A real-time signal does it: the Python handler runs between two bytecodes of the main thread, so it
can look at `Interrupts` without a race, and the signal also ends blocking system calls (sleep,
select, a lock) that an asynchronous exception would wait for.
"""

from __future__ import annotations

import signal
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import FrameType

    from taskd.worker.life import Interrupts

# First real-time signal to try. The lowest ones are used by debuggers and C libraries more often
# than these.
_FIRST_SIGNAL = signal.SIGRTMIN + 9
_COLLECTIVES = "torch.distributed.distributed_c10d"


def _is_in_collective(frame: FrameType | None) -> bool:
    """Whether the main thread is in a function of torch that begins an operation and waits for it.

    They are known by their variable `work`. Between the two, a thread of the group uses the
    caller's tensors, which code on the way out (the end of `summon_full_params()`) may free.
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

    def __init__(self, interrupts: Interrupts) -> None:
        """Install the handler; call from the main thread."""
        self._interrupts = interrupts
        self._main = threading.main_thread().ident
        self._signal = next(
            number
            for number in range(_FIRST_SIGNAL, signal.SIGRTMAX)
            if signal.getsignal(number) == signal.SIG_DFL
        )
        signal.signal(self._signal, self._handle)

    def interrupt(self, reason: str) -> None:
        """From the runtime thread: the main thread is to leave the function."""
        self._interrupts.pending = reason
        if self._main is not None:
            signal.pthread_kill(self._main, self._signal)

    def _handle(self, _number: int, frame: FrameType | None) -> None:
        interrupts = self._interrupts
        if (
            interrupts.pending is None
            or interrupts.is_held
            or not interrupts.in_recoverable
            or _is_in_collective(frame)
        ):
            return
        interrupts.release()
