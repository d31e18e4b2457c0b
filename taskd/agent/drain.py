"""SIGTERM to torchrun where the job is to be saved first.

A pod is evicted, and the platform waits a while before SIGKILL.

Owns the handler. The first signal is a wish that the agent passes on to the manager; the second
one, and the end of the grace period, are what they were without taskd: torchrun's own handler,
which stops the workers.
"""

from __future__ import annotations

import signal
import socket
from typing import TYPE_CHECKING, Any

from taskd.clock import MonotonicClock

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType


class Drain:
    """Use as a context manager, in the main thread. `grace_s` None: leave SIGTERM alone."""

    def __init__(self, grace_s: float | None) -> None:
        self._grace_s = grace_s
        self._former: Callable[[int, FrameType | None], Any] | int | None = None
        self._reader, self._writer = socket.socketpair()
        self._asked_at: float | None = None
        self.is_told = False  # the manager knows

    def __enter__(self) -> Drain:  # noqa: PYI034
        for end in (self._reader, self._writer):
            end.setblocking(False)
        if self._grace_s is not None:
            self._former = signal.signal(signal.SIGTERM, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        if self._grace_s is not None:
            signal.signal(signal.SIGTERM, self._former)
        self._reader.close()
        self._writer.close()

    @property
    def fd(self) -> int:
        """Readable once the signal has come."""
        return self._reader.fileno()

    @property
    def is_asked(self) -> bool:
        """Whether this node is to end."""
        return self._asked_at is not None

    @property
    def deadline(self) -> float | None:
        """Monotonic time at which torchrun's own way begins."""
        return (
            None
            if self._asked_at is None or self._grace_s is None
            else self._asked_at + self._grace_s
        )

    def end_at_once(self) -> None:
        """Torchrun's own way: its handler raises."""
        self._asked_at = None
        if callable(self._former):
            self._former(signal.SIGTERM, None)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._asked_at is not None:
            self._asked_at = None
            if callable(self._former):
                self._former(number, frame)
            return
        self._asked_at = MonotonicClock().now()
        self._writer.send(b"!")  # ends the wait of the loop
