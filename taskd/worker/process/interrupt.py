"""Raising `Interrupted` in the main thread, whatever it is in: a system call, or Python code.

A real-time signal does it: the Python handler runs between two bytecodes of the main thread, so it
can look at `Interrupts` without a race, and the signal also ends blocking system calls (sleep,
select, a lock) that an asynchronous exception would wait for.
"""

from __future__ import annotations

import logging
import signal
import threading
from typing import TYPE_CHECKING

from taskd.config.signals import usable_interrupt_signal

if TYPE_CHECKING:
    from types import FrameType

    from taskd.worker.life import Interrupts

log = logging.getLogger(__name__)

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
            for number in range(usable_interrupt_signal(), signal.SIGRTMAX)
            if signal.getsignal(number) == signal.SIG_DFL
        )
        signal.signal(self._signal, self._handle)
        self._is_lost = False  # the program has taken the signal

    def interrupt(self, reason: str) -> None:
        """From the runtime thread: the main thread is to leave the function."""
        self._interrupts.pending = reason
        self.check()
        if self._main is not None:
            signal.pthread_kill(self._main, self._signal)

    def check(self) -> None:
        """Say it if the program has taken the signal: before the first fault, if it can be."""
        if not self._is_lost and signal.getsignal(self._signal) != self._handle:
            self._is_lost = True
            log.warning(
                "the program has taken signal %d (SIGRTMIN+%d), by which taskd interrupts it: it "
                "is interrupted late or has to be replaced. Set TASKD_INTERRUPT_SIGNAL to another",
                self._signal,
                self._signal - signal.SIGRTMIN,
            )

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
