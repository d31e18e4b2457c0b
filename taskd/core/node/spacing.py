"""How long the next start of a rank waits, if starts before it came to nothing.

A script, a folder or a module that is missing for a moment (network file systems blink), or a
system that has no descriptors left, would use up all tries of a rank within a second. So the first
start that comes to nothing is tried again at once, then after four seconds, then after sixteen.
Owns these moments. Whether there is a next try at all is decided by the manager
(`taskd.core.policy.ladder`).
"""

from dataclasses import dataclass, field

from taskd.core.faults import FaultKind

# What is missing is missed within this time. Where that takes longer, the starts are far enough
# from each other.
SHORT_LIFE_S = 1.5
FIRST_S = 4.0
FACTOR = 4.0
LONGEST_S = 16.0
# Being killed says nothing against the start.
_FAILURES = frozenset({FaultKind.START_FAILED, FaultKind.EXITED})


@dataclass(slots=True)
class Spacing:
    """Of the ranks of one node."""

    _failures: dict[int, int] = field(default_factory=dict)  # by rank, in a row
    _not_before: dict[int, float] = field(default_factory=dict)  # by rank
    _held: dict[int, bool] = field(default_factory=dict)  # ranks to start -> `at_once`

    def ended(
        self, rank: int, kind: FaultKind, now: float, started_at: float | None, *, has_entered: bool
    ) -> None:
        """A life is over.

        `started_at`: None if there never was a process; `has_entered`: it came to its function.
        """
        is_short = started_at is None or now - started_at < SHORT_LIFE_S
        if has_entered or kind not in _FAILURES or not is_short:
            self._failures.pop(rank, None)
            self._not_before[rank] = now  # one that waits already is due, and asks for a Tick
            return
        count = self._failures.get(rank, 0)
        self._failures[rank] = count + 1
        if count:
            self._not_before[rank] = now + min(LONGEST_S, FIRST_S * FACTOR ** (count - 1))

    def must_wait(self, rank: int, now: float, *, at_once: bool) -> bool:
        """Whether this rank is not to start yet; it is `due` later."""
        if now >= self._not_before.get(rank, now):
            self._held.pop(rank, None)
            return False
        self._held[rank] = at_once
        return True

    def next_at(self) -> float | None:
        """When the next of those that wait is due."""
        return min((self._not_before[rank] for rank in self._held), default=None)

    def due(self, now: float) -> list[tuple[int, bool]]:
        """Ranks that have waited for long enough, with `at_once`. Each is told once."""
        ranks = sorted(rank for rank in self._held if self._not_before[rank] <= now)
        return [(rank, self._held.pop(rank)) for rank in ranks]
