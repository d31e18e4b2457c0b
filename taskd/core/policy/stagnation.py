"""Recoveries that lead nowhere: how many there were since the newest committed version last grew.

Owns the count and its limits. The repeat rules (`taskd.core.policy.ladder`) know a failure that is
the same each time; here it does not matter what failed. What counts:

    own failures    recoveries in which something failed that nobody did from outside. A rank that
                    fails again while the others wait for it counts again, in the same recovery
    deaths          of the rank that died most often. This is for what is killed from outside: an
                    operator may well kill every rank of a job once before its next step, but the
                    same rank again and again is killed by what it does (out of memory)

A new commit sets both to nothing. One that only does again what was lost is none. Where no version
is known (no `TrainState`, or no `taskd.recoverable`), living longer than `SHORT_LIFE_S` after the
last recovery is taken for it; whether such a script makes progress cannot be seen, so failures that
are equal are told of for ever, and end nothing.
"""

from collections import Counter
from collections.abc import Iterable

from taskd.core.faults import FROM_OUTSIDE, Fault, FaultKind, TimedFault, describe, signature
from taskd.core.policy.ladder import SHORT_LIFE_S

WARN_AFTER = 3  # two in a row may be bad luck; said again each time the count has doubled
OWN_LIMIT = 6  # more than each repeat rule needs (`HANG_LIMIT` is 4): their reasons say more
DOUBTFUL_AFTER = 3  # exceptions of one rank: its process may be what is broken
DEATH_LIMIT = 32  # at a few seconds each: minutes, in which a reader of the warnings may act

_SHOWN_RANKS = 8


class Stagnation:
    """One per job."""

    def __init__(self) -> None:
        self._floor = 0  # a version above it is progress
        self._answered_at: float | None = None  # when training was last told to go on
        self._faults: dict[int, TimedFault] = {}  # those since the last progress, by id, in order
        self._times: Counter[tuple[int, int]] = Counter()  # (generation, rank) -> its faults there
        # id of a fault -> its place: (generation, which fault of its rank in there)
        self._places: dict[int, tuple[int, int]] = {}
        self._own: Counter[tuple[int, int]] = Counter()  # places of faults not caused from outside
        self._deaths: Counter[int] = Counter()
        self._most_deaths = 0
        self._said = 0  # the count at the last warning
        self._equal = _Equal()

    # ------------------------------------------------------------------ what happens

    def saw(self, now: float, generation: int, newest: int | None) -> bool:
        """A recovery of this generation is under way. Returns whether there was progress before it.

        `newest` is the newest version that anybody is known to have committed.
        """
        if newest is None:
            is_first = not any(timed.generation == generation for timed in self._faults.values())
            since = self._answered_at
            is_alive = since is not None and now - since >= SHORT_LIFE_S
            has_grown = is_first and not self._floor and is_alive
        else:
            has_grown = newest > self._floor
            self._floor = max(newest, self._floor)
        if has_grown:
            present = [timed for timed in self._faults.values() if timed.generation == generation]
            for counter in (self._faults, self._times, self._places, self._own, self._deaths):
                counter.clear()
            self._most_deaths = self._said = 0
            for timed in present:
                self.take(timed)
        return has_grown

    def answered(self, now: float, newest: int | None) -> None:
        """Training goes on. If steps were lost, `newest` is to be exceeded all the same."""
        self._answered_at = now
        if newest is not None:
            self._floor = newest

    def take(self, timed: TimedFault) -> None:
        """One more fault."""
        assert timed.generation is not None
        rank, life = timed.fault.rank, id(timed)
        self._times[timed.generation, rank] += 1
        self._faults[life] = timed
        self._places[life] = (timed.generation, self._times[timed.generation, rank])
        self._deaths[rank] += 1
        self._most_deaths = max(self._most_deaths, self._deaths[rank])
        self.explained(timed)

    def explained(self, timed: TimedFault) -> None:
        """It is known now what it was, if it ever will be."""
        if timed.fault.kind is FaultKind.LOST or id(timed) not in self._places:
            return
        if timed.fault.kind not in FROM_OUTSIDE:
            self._own[self._places[id(timed)]] += 1
        self._equal.take(timed)

    def forget(self, timed: TimedFault) -> None:
        """It was the consequence of another one."""
        if self._faults.pop(id(timed), None) is None:
            return
        place = self._places.pop(id(timed))
        self._own[place] -= timed.fault.kind not in FROM_OUTSIDE
        self._own += Counter()  # drops what is zero
        self._deaths[timed.fault.rank] -= 1
        self._most_deaths = max(self._deaths.values(), default=0)

    def exceptions_of(self, rank: int) -> int:
        """How often this rank has raised since the last progress."""
        kind = FaultKind.RAISED
        faults = (timed.fault for timed in self._faults.values())
        return sum(fault.rank == rank and fault.kind is kind for fault in faults)

    # ------------------------------------------------------------------ what is to be said of it

    def verdict(self) -> tuple[str, Fault] | None:
        """Why the job must end, and the fault that tells most of it.

        None: it may be tried again.
        """
        if len(self._own) < OWN_LIMIT and self._most_deaths < DEATH_LIMIT:
            return None
        telling = self._telling()
        return f"{self._told()}; last, {describe(telling)}", telling

    def warning(self) -> str | None:
        """What to say now: the first time, and each time that the count has doubled."""
        count = max(len(self._own), self._most_deaths)
        if count < WARN_AFTER:
            return self._equal.warning()
        if count < 2 * self._said:
            return None
        self._said = count
        return (
            f"{self._told()}; last, {describe(self._telling())}. The job ends after "
            f"{OWN_LIMIT} failures of its own, or {DEATH_LIMIT} of one "
            "rank, unless it commits a new step"
        )

    def _told(self) -> str:
        faults = self._faults.values()
        generations = len({timed.generation for timed in faults})
        kinds = Counter(timed.fault.kind.value for timed in faults)
        what = ", ".join(f"{count} times {kind}" for kind, count in kinds.most_common())
        since = f"since step {self._floor}" if self._floor else "so far"
        return (
            f"no new step {since} in {generations} "
            f"{'recovery' if generations == 1 else 'recoveries'}: "
            f"{_ranks(timed.fault.rank for timed in faults)} {what}"
        )

    def _telling(self) -> Fault:
        """The newest with a traceback, else the newest own failure, else the newest that is known.

        That is one of which the exit status has come.
        """
        newest_first = [timed.fault for timed in reversed(self._faults.values())]
        return max(
            newest_first,
            key=lambda fault: (
                fault.traceback is not None,
                fault.kind not in FROM_OUTSIDE,
                fault.kind is not FaultKind.LOST,
            ),
        )


class _Equal:
    """Failures in a row that are equal, however long the job has lived in between."""

    def __init__(self) -> None:
        self._failure: tuple[FaultKind, str] | None = None
        self._generations: set[int | None] = set()
        self._newest: TimedFault | None = None
        self._said = 0

    def take(self, timed: TimedFault) -> None:
        failure = (timed.fault.kind, signature(timed.fault))
        if failure != self._failure or timed.fault.version is not None:
            self._failure, self._said = failure, 0
            self._generations.clear()
        if timed.fault.version is None:
            self._generations.add(timed.generation)
        self._newest = timed

    def warning(self) -> str | None:
        count = len(self._generations)
        if self._newest is None or count < max(WARN_AFTER, 2 * self._said):
            return None
        self._said = count
        return (
            f"the same failure came {count} times in a row: {describe(self._newest.fault)}. "
            "Whether the job makes progress in between cannot "
            "be seen without a TrainState"
        )


def _ranks(ranks: Iterable[int]) -> str:
    found = sorted(set(ranks))
    names = ", ".join(map(str, found[:_SHOWN_RANKS]))
    more = " ..." if len(found) > _SHOWN_RANKS else ""
    return f"rank{'s' if len(found) > 1 else ''} {names}{more}"
