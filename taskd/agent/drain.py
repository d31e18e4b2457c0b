"""SIGTERM to torchrun where the job is to be saved first.

A pod is evicted, and the platform waits a while before SIGKILL. Owns the handler; what follows is
decided in `taskd.core.node.draining`. The end is that of plain torchrun: its own handler,
which stops the workers, or what the signal does without one.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from typing import TYPE_CHECKING, Any

from taskd.clock import MonotonicClock
from taskd.core.node.draining import Draining
from taskd.errors import TaskdError

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

log = logging.getLogger(__name__)


def signal_of(error: BaseException) -> str:
    """The name of the signal whose handler has raised this; "": it is another exception.

    Torchrun's handler says in it which one it was.
    """
    if isinstance(error, KeyboardInterrupt):
        return "SIGINT"
    number = getattr(error, "sigval", None)
    return number.name if isinstance(number, signal.Signals) else ""


def interruption_of(error: BaseException) -> str:
    """What the manager is told of an exception that has ended the agent."""
    return f"torchrun was interrupted, {signal_of(error)}".removesuffix(", ")


class Drain:
    """Use as a context manager. `grace_s` None: leave SIGTERM alone.

    Outside the main thread it comes from training processes alone.
    """

    def __init__(self, grace_s: float | None) -> None:
        self.state = Draining(grace_s or 0.0)
        self._is_on = grace_s is not None  # the handler is in place, within the context
        self._has_none = False  # it cannot be
        self._former: Callable[[int, FrameType | None], Any] | int | None = None
        self._reader, self._writer = socket.socketpair()

    def __enter__(self) -> Drain:  # noqa: PYI034
        for end in (self._reader, self._writer):
            end.setblocking(False)
        if self._is_on and threading.current_thread() is not threading.main_thread():
            self._is_on, self._has_none = False, True
            log.warning(
                "SIGTERM to this process does not save the job: its agent is not in the main "
                "thread, where Python handles signals"
            )
        if self._is_on:
            self._former = signal.signal(signal.SIGTERM, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_on:
            signal.signal(signal.SIGTERM, self._former)
        self._reader.close()
        self._writer.close()

    @property
    def fds(self) -> list[int]:
        """Readable once the signal has come."""
        return [] if self.state.is_asked else [self._reader.fileno()]

    def finish(self) -> None:
        """The job was saved and ends: from here on another signal has nothing to ask for.

        Until the end of the process, or it would spoil the exit code.
        """
        if self._is_on:
            self._former = signal.SIG_IGN
            signal.signal(signal.SIGTERM, self._former)

    def end_at_once(self) -> None:
        """Torchrun's own way. Raises TaskdError where nobody can handle the signal."""
        self.state.cancel()
        if self._has_none:
            raise TaskdError(f"{self.state.detail}, and the job was not saved in time")
        self._pass_on(signal.SIGTERM, None)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.state.ask(MonotonicClock().now()):
            self._writer.send(b"!")  # ends the wait of the loop
        else:
            self._pass_on(number, frame)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        """Torchrun's handler raises; without one (`--signals-to-handle`) the signal is its end."""
        if callable(self._former):
            self._former(number, frame)
        elif self._former is signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
