"""The death alarms of the workers of this node.

Owns which life each alarm belongs to. Without libtaskd there is none, and the pidfds tell of ends
instead.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from taskd.native.death_alarm import DeathAlarm

if TYPE_CHECKING:
    from collections.abc import Iterator

    from taskd.native.black_box import BlackBox


class DeathWatch:
    """See the module. For the main thread, which is woken soon after a death."""

    def __init__(self) -> None:
        self._alarm = DeathAlarm()
        self._alarm.wake_soon()
        self._tokens = itertools.count(1)
        self._lives: dict[int, tuple[int, int, BlackBox]] = {}  # by token

    @property
    def fds(self) -> list[int]:
        """Readable when `read` has something to say."""
        return [self._alarm.fd] if self._alarm.available else []

    def watch(self, rank: int, incarnation: int, box: BlackBox) -> None:
        """Tell when the guard of this life rings."""
        if self._alarm.available:
            token = next(self._tokens)
            self._lives[token] = (rank, incarnation, box)
            self._alarm.watch(token, box)

    def read(self) -> Iterator[tuple[int, int, BlackBox, float]]:
        """Rank, incarnation, black box and time of each death since the last call."""
        for token, died_at in self._alarm.read() if self._alarm.available else ():
            yield (*self._lives.pop(token), died_at)

    def close(self) -> None:
        """Forget all lives."""
        self._alarm.close()
