"""The only caller of time.monotonic and time.time.

Everything else is handed a `Clock`, a `now`, or a function that tells the time.

tests/unit/test_layers.py lists who else may look at a clock, and why.
"""

import time
from typing import Protocol


class Clock(Protocol):
    """A source of monotonic seconds.

    On Linux CLOCK_MONOTONIC, shared by all processes of a host.
    """

    def now(self) -> float:
        """Seconds since an arbitrary point in the past."""
        ...


class MonotonicClock:
    """The real clock."""

    def now(self) -> float:
        """See `Clock`."""
        return time.monotonic()


def wall_time() -> float:
    """Seconds since 1970: for people and files.

    Jumps when the clock of the host is set, so that nothing is ever decided by it.
    """
    return time.time()
