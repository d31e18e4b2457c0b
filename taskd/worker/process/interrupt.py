"""Raising `Interrupted` in the main thread, whatever it is in: a system call, or Python code.

A real-time signal does it: the Python handler runs between two bytecodes of the main thread, so it
can look at `Interrupts` without a race, and the signal also ends blocking system calls (sleep,
select, a lock) that an asynchronous exception would wait for.
"""

from __future__ import annotations

import logging
import signal
import sys
import threading
from typing import TYPE_CHECKING

from taskd.config.signals import usable_interrupt_signal
from taskd.errors import Interrupted
from taskd.worker.exceptions.communication import is_communication_error

if TYPE_CHECKING:
    from types import FrameType

    from taskd.worker.life import Interrupts, Life

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


def _is_leaving() -> bool:
    """Whether the main thread cleans up, on its way out of the step.

    In `finally`, `__exit__` or `except`, because of an earlier interrupt or a collective that
    broke. It puts things back there (weights, for which averages were swapped in), and half of that
    is worse than nothing.
    """
    error = sys.exc_info()[1]
    if error is None:
        return False
    if is_communication_error(error):
        return True
    seen: set[int] = set()
    # what is raised meanwhile has it as its context, also if that is not to be shown
    while error is not None and id(error) not in seen:
        if isinstance(error, Interrupted):
            return True
        seen.add(id(error))
        error = error.__context__
    return False


def forget(life: Life) -> None:
    """The main thread has left the function: there is nothing to be raised any more."""
    interrupts = life.interrupts
    interrupts.pending = None
    if interrupts.has_cut:
        interrupts.has_cut = False
        log.warning(
            "rank %d: what the script does on its way out (finally, __exit__, except) took so long "
            "after a fault that it was interrupted: weights that it was putting back may be wrong",
            life.rank,
        )


class MainThreadInterrupter:
    """Raises `Interrupted` in the main thread, but not in the middle of three things.

    While the optimizer is writing: then `commit()` raises it. Within a collective: if that does not
    fail by itself when the groups are aborted, the signal that the runtime sends after each abort
    raises it behind it. And while the script cleans up, unless that takes so long that it is
    urgent.
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
        if _is_leaving():
            if not interrupts.is_urgent:
                return
            interrupts.has_cut = True
        interrupts.release()
