"""How long the next start waits, if starts before it came to nothing.

A script, a folder or a module that is missing for a moment (network file systems blink), or a
system that has no descriptors left, would use up all tries within a second. So the first start that
comes to nothing is tried again at once, then after four seconds, then after sixteen. Owns these
delays: nodes apply them to their ranks one by one (`taskd.core.node.spacing`), the manager to
restarts of the whole group. Whether there is a next try at all: see `taskd.core.policy.ladder`.
"""

from dataclasses import dataclass

from taskd.core.faults import FaultKind, TimedFault

# What is missing is missed within this time. Where that takes longer, the starts are far enough
# from each other.
SHORT_LIFE_S = 1.5
FIRST_S = 4.0
FACTOR = 4.0
LONGEST_S = 16.0
# Being killed says nothing against the start.
_FAILURES = frozenset({FaultKind.START_FAILED, FaultKind.EXITED})


def is_failed_start(kind: FaultKind, life_s: float) -> bool:
    """Whether a life that ended like this, after so many seconds, was a start that failed."""
    return kind in _FAILURES and life_s < SHORT_LIFE_S


def start_delay_s(failures: int) -> float:
    """Seconds until the next start, after so many in a row that came to nothing."""
    return 0.0 if failures < 2 else min(LONGEST_S, FIRST_S * FACTOR ** (failures - 2))


@dataclass(slots=True)
class GroupStarts:
    """Restarts of the whole group in a row that came to nothing."""

    _count: int = 0  # without the newest, of which it may not be known yet how it ended

    def next_delay_s(self, before: TimedFault | None, cause: TimedFault | None) -> float:
        """Seconds that the restart because of `cause` waits.

        `before`: the cause of the restart before it, of which more is known today.
        """
        self._count = self._count + 1 if before is not None and _is_failed(before) else 0
        # A restart does not wait for the exit status, and it may be such a one.
        is_failed = cause is not None and (
            _is_failed(cause)
            or (cause.fault.kind is FaultKind.LOST and cause.life_s < SHORT_LIFE_S)
        )
        return start_delay_s(self._count + 1) if is_failed else 0.0


def _is_failed(timed: TimedFault) -> bool:
    return is_failed_start(timed.fault.kind, timed.life_s)
