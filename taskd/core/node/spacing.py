"""When the ranks of this node may start, if starts before came to nothing.

Owns these moments. How long the delays are: see `taskd.core.policy.start_delay`.
"""

from dataclasses import dataclass, field

from taskd.core.faults import FaultKind
from taskd.core.policy.start_delay import is_failed_start, start_delay_s


@dataclass(slots=True)
class _Failures:
    """Starts of one rank in a row that came to nothing."""

    count: int
    incarnation: int  # of the newest


@dataclass(slots=True)
class Spacing:
    """Of the ranks of one node."""

    _failures: dict[int, _Failures] = field(default_factory=dict)  # by rank
    _not_before: dict[int, float] = field(default_factory=dict)  # by rank
    _group_not_before: float = 0.0  # for all ranks
    _held: dict[int, bool] = field(default_factory=dict)  # ranks to start -> `at_once`

    def ended(
        self, rank: int, incarnation: int, kind: FaultKind, now: float, started_at: float | None,
        *, has_entered: bool,
    ) -> None:  # fmt: skip
        """A life is over.

        `started_at`: None if there never was a process; `has_entered`: it came to its function.
        A life that was over before the failed starts, and is reaped after them, says nothing of
        the next one.
        """
        failures = self._failures.get(rank)
        life_s = 0.0 if started_at is None else now - started_at
        if has_entered or not is_failed_start(kind, life_s):
            if failures is None or failures.incarnation < incarnation:
                self._failures.pop(rank, None)
                self._not_before[rank] = now  # one that waits already is due, and asks for a Tick
            return
        if failures is None:
            failures = self._failures[rank] = _Failures(0, incarnation)
        failures.count += 1
        failures.incarnation = max(failures.incarnation, incarnation)
        if delay_s := start_delay_s(failures.count):
            self._not_before[rank] = now + delay_s

    def hold_all(self, until: float) -> None:
        """No rank starts before this moment."""
        self._group_not_before = until

    def must_wait(self, rank: int, now: float, *, at_once: bool) -> bool:
        """Whether this rank is not to start yet; it is `due` later."""
        if now >= self._due_at(rank):
            self._held.pop(rank, None)
            return False
        self._held[rank] = at_once
        return True

    def next_at(self) -> float | None:
        """When the next of those that wait is due."""
        return min((self._due_at(rank) for rank in self._held), default=None)

    def due(self, now: float) -> list[tuple[int, bool]]:
        """Ranks that have waited for long enough, with `at_once`. Each is told once."""
        ranks = sorted(rank for rank in self._held if self._due_at(rank) <= now)
        return [(rank, self._held.pop(rank)) for rank in ranks]

    def _due_at(self, rank: int) -> float:
        return max(self._group_not_before, self._not_before.get(rank, 0.0))
