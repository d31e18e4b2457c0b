"""The only caller of time.monotonic: everything else is handed a `Clock` or a `now`."""

import time
from typing import Protocol


class Clock(Protocol):
    """A source of monotonic seconds; on Linux CLOCK_MONOTONIC, shared by all processes of a host."""

    def now(self) -> float:
        """Seconds since an arbitrary point in the past."""
        ...


class MonotonicClock:
    """The real clock."""

    def now(self) -> float:
        """See `Clock`."""
        return time.monotonic()
