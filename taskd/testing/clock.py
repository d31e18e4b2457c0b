"""Virtual time.

A clock that stands still until it is moved, and a list of what is to happen when.
"""

import heapq
from collections.abc import Callable


class FakeClock:
    """See `taskd.clock.Clock`. `call_at` and `run_next` make it the engine of a simulation.

    `expected`: how many calls are to come that are not background: heartbeats and the like, which
    come for ever and change nothing.
    """

    def __init__(self, start: float = 0.0) -> None:
        self._now = start
        self._calls: list[tuple[float, int, Callable[[], None], bool]] = []
        self._count = 0
        self.expected = 0

    def now(self) -> float:
        """Seconds since the start."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Move on, doing what falls due on the way."""
        end = self._now + seconds
        while self._calls and self._calls[0][0] <= end:
            self.run_next()
        self._now = end

    def call_at(
        self, moment: float, call: Callable[[], None], *, is_background: bool = False
    ) -> None:
        """Do this then; equal moments in the order in which they were asked for."""
        self._count += 1
        self.expected += not is_background
        heapq.heappush(self._calls, (max(moment, self._now), self._count, call, is_background))

    def call_in(
        self, seconds: float, call: Callable[[], None], *, is_background: bool = False
    ) -> None:
        """Do this after a while."""
        self.call_at(self._now + seconds, call, is_background=is_background)

    def run_next(self) -> bool:
        """Jump to the next thing and do it. False: there is nothing more."""
        if not self._calls:
            return False
        self._now, _, call, is_background = heapq.heappop(self._calls)
        self.expected -= not is_background
        call()
        return True
