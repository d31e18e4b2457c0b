"""How far apart snapshots are, where the script does not say: by what they cost beside the steps.

Each rank measures its own commits. At the tenth, twentieth, fortieth, … of a life all ranks tell
each other what they found, and each makes the same number of it. Pure: knows no clock.
"""

from __future__ import annotations

import math
import statistics
from collections import deque

# Of the time of training, for commits with all that belongs to them. 1 % is promised; what a few
# steps have shown is not exact.
PART = 0.008
# Where commits without a snapshot need that much already, snapshots still get half of it: else a
# fault would cost the more steps the shorter they are.
LEAST_PART = PART / 2
_FIRST = 10  # commits of a life, before the ranks tell each other; then each time twice as many
_FACTOR = 2
# In the first step the graph is built, and each of the two rooms for snapshots is touched for the
# first time by one of the first two.
_SKIPPED = 2
_KEPT = 9  # the newest measurements, of which the median counts
_LARGEST = 2**31 - 1  # microseconds or steps that ranks can tell each other


class Spacing:
    """Of one rank and life."""

    def __init__(self, given: int | None) -> None:
        """`given`: what the script says; None: it is chosen."""
        self._is_chosen = given is None
        self.steps = given or 1
        self._commits, self._next = 0, _FIRST
        self._steps_s: deque[float] = deque(maxlen=_KEPT)
        self._snapshots_s: deque[float] = deque(maxlen=_KEPT)
        self._rests_s: deque[float] = deque(maxlen=_KEPT)

    def add(self, step_s: float | None, snapshot_s: float | None, rest_s: float) -> None:
        """A commit is done.

        Args:
            step_s: how long one of its steps took, without the commit; None: it is not known.
            snapshot_s: of the commit, for its snapshot; None: it made none.
            rest_s: the others of its seconds.
        """
        self._commits += 1
        if not self._is_chosen or self._commits <= _SKIPPED:
            return
        self._rests_s.append(rest_s)
        if step_s is not None:
            self._steps_s.append(step_s)
        if snapshot_s is not None:
            self._snapshots_s.append(snapshot_s)

    @property
    def is_due(self) -> bool:
        """Whether the ranks tell each other now: at the same commit, on all of them."""
        return self._is_chosen and self._commits == self._next

    def own(self) -> list[int]:
        """What this rank has found: a step, a snapshot, the rest, in microseconds."""
        found = (self._steps_s, self._snapshots_s, self._rests_s)
        return [_microseconds(statistics.median(one) if one else 0.0) for one in found]

    def adopt(self, rows: list[list[int]]) -> bool:
        """What all have found: the slowest commit and the fastest step count.

        Returns whether snapshots are further apart from now on, or closer.
        """
        self._next *= _FACTOR
        step, before = min(row[0] for row in rows), self.steps
        snapshot, rest = (max(row[index] for row in rows) for index in (1, 2))
        room = max(PART * step - rest, LEAST_PART * step)
        self.steps = min(max(1, math.ceil(snapshot / room)), _LARGEST) if room > 0 else 1
        return self.steps != before


def _microseconds(seconds: float) -> int:
    return min(round(1e6 * seconds), _LARGEST)
