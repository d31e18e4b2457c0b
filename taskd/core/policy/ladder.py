"""Which recovery to try and why no cheaper one; the restart budget; when to stop trying.

Owns the policy. Knows nothing of phases, messages or time beyond the durations handed in.

The ladder, from cheap to dear:

    retry              every process is alive: all leave the step and enter their function again
    recover-in-place   some processes are gone: they alone are replaced
    recover            a node is gone: all wait until it, or another in its place, is there
    elastic-training   nobody came in place of the node: the others go on without it
    restart            nothing can be kept: all processes are replaced
    dump               nothing may be replaced: the state is written to disk, then the job ends
    exit               the job ends

Repeat rules (a deterministic failure must not burn the budget):
- what taskd itself refused (`Fault.is_final`), once: nothing would be different the next time;
- the same exception at the same version in three recoveries: the first time all processes are kept,
  the second time that of the rank which raised it is replaced, as it may be broken
  (`taskd.core.job.stopped`), and the third time even a new process has raised it. Where no process
  may be replaced, the second time is the last;
- the same crash or exit of the same rank, or the same broken communication, at the same version
  three times;
- a hang at the same version four times (each has a longer limit than the one before, see
  `taskd.core.policy.hangs`); twice, if others wait for ranks that have returned;
- in a job without `taskd.recoverable`: three equal failures in a row, each within a minute of its
  start. Being killed from outside says nothing against the script and does not count here.

Whatever is different each time, and leads nowhere all the same, is ended by
`taskd.core.policy.stagnation`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum

from taskd.core.faults import FROM_OUTSIDE, Fault, FaultKind, describe, signature

EXCEPTION_LIMIT = 3  # precise evidence: two are no accident, three are not that process either
EXIT_LIMIT = 3  # an exit or a signal is weaker evidence: two may be bad luck
UNEQUAL_STEPS = "unequal steps"  # signature of a hang: others wait for ranks that have returned
UNEQUAL_LIMIT = 2  # nothing changes the number of steps; the network may have been it
HANG_LIMIT = 4  # a limit that was too short for something that takes long is no evidence at all
SHORT_LIFE_S = 60.0  # a script without commits shows progress by living longer than this


class Strategy(str, Enum):
    """How to recover. The values are those of the log line."""

    RETRY = "retry"
    RECOVER_IN_PLACE = "recover-in-place"
    RECOVER = "recover"
    ELASTIC = "elastic-training"
    RESTART = "restart"
    DUMP = "dump"
    EXIT = "exit"


class Outcome(IntEnum):
    """What came of a recovery. The codes are MindCluster's."""

    RECOVERED = 0  # every rank has made a new step
    FAILED = 405  # it was not completed, and another strategy may be tried
    DUMP_OR_EXIT = 406  # it was not completed, and the job was saved before it ended
    EXIT_ONLY = 499  # it was not completed, and the job has ended unsaved


# What is allowed if nobody says anything. A smaller world may read its data in another way, so
# nobody gets one without asking for it.
BY_DEFAULT = frozenset(Strategy) - {Strategy.DUMP, Strategy.ELASTIC}
NOT_ALLOWED = "not allowed (recover-strategy)"

# What a name of the `recover-strategy` list allows. "recover" and "recover-in-place" replace
# processes, which includes leaving them all alive, and replacing all where nothing can be kept;
# "recover" replaces nodes as well. Those that lose a node see that as broken communication first,
# and have to leave their step, so that "elastic-training" includes "retry".
_IN_PLACE = {Strategy.RETRY, Strategy.RECOVER_IN_PLACE, Strategy.RESTART}
_ALLOWED_BY = {
    "retry": {Strategy.RETRY},
    "recover": _IN_PLACE | {Strategy.RECOVER},
    "recover-in-place": _IN_PLACE,
    "elastic-training": {Strategy.RETRY, Strategy.ELASTIC},
    "dump": {Strategy.DUMP},
    "exit": set(),
}
STRATEGY_NAMES = tuple(_ALLOWED_BY)


def allowed(names: Iterable[str]) -> frozenset[Strategy]:
    """What these names allow; none at all: everything but a dump and elastic training.

    Raises KeyError for a name that is not in `STRATEGY_NAMES`.
    """
    named = [_ALLOWED_BY[name] for name in names]
    return frozenset({Strategy.EXIT}.union(*named)) if named else BY_DEFAULT


@dataclass(frozen=True, slots=True)
class Choice:
    """The strategy, why, and why not the cheaper ones."""

    strategy: Strategy
    reason: str
    skipped: tuple[tuple[Strategy, str], ...] = ()


def choose(
    *,
    is_declared: bool,
    lost: Sequence[int],
    absent: Sequence[int] = (),
    no_cut: str | None = None,
    has_survivors: bool = True,
    bound: str | None = None,
    allowed: frozenset[Strategy] = BY_DEFAULT,
) -> Choice:
    """The cheapest strategy that can work.

    Args:
        is_declared: the job uses `taskd.recoverable`, and a process or node memory may have state.
        lost: ranks whose process is gone.
        absent: nodes that are lost, and waited for.
        bound: why the job cannot go on without these nodes, if that is so.
        no_cut: why no copy of the state can be gone on from, if that is so.
        has_survivors: a process is left; else it is node memory that has the state.
        allowed: what the user allows (`recover-strategy`).
    """
    skipped: list[tuple[Strategy, str]] = []
    obstacle = no_cut or (None if is_declared else "no live worker uses taskd.recoverable")
    gone = f"{len(lost)} process{'es are' if len(lost) != 1 else ' is'} gone" if lost else None
    held = "the others hold the state"
    if not has_survivors:
        gone, held = gone and "every process is gone", "node memory has snapshots"
    away = f"node {', '.join(map(str, absent))} is lost" if absent else None
    for strategy, problem, reason in (
        (Strategy.RETRY, obstacle or away or gone, "every process is alive"),
        (Strategy.RECOVER_IN_PLACE, obstacle or away, f"{gone}, {held}"),
        (
            Strategy.RECOVER,
            obstacle or (None if absent else "no node is lost"),
            f"{away}, and waited for; {held}",
        ),
        (
            Strategy.ELASTIC,
            obstacle or (bound if absent else "no node is lost"),
            f"{away}: the job goes on without it",
        ),
        (Strategy.RESTART, None, obstacle or "nothing milder is allowed"),
        (Strategy.DUMP, obstacle, "nothing milder is allowed"),
    ):
        if strategy in allowed and problem is None:
            return Choice(strategy, reason, tuple(skipped))
        skipped.append((strategy, problem or NOT_ALLOWED))
    return Choice(Strategy.EXIT, "nothing milder is possible", tuple(skipped))


@dataclass(slots=True)
class Budget:
    """Restarts used, which only grows, against `--max_restarts` of the job."""

    used: int = 0

    def adopt(self, used: int) -> None:
        """An agent remembers this much."""
        self.used = max(self.used, used)

    def spend(self, fault: Fault, allowed: int) -> str | None:
        """Use one restart for this fault. Returns why the job must end if there is none left."""
        if self.used >= allowed:
            return (
                f"restart budget spent: {self.used} of {allowed} restarts used (--max_restarts) "
                f"when {describe(fault)}"
            )
        self.used += 1
        return None


@dataclass(slots=True)
class RepeatRules:
    """Remembers faults, to see when the same one comes back."""

    _exceptions: dict[tuple[str, int | None], set[int]] = field(default_factory=dict)
    _exits: dict[tuple[object, ...], int] = field(default_factory=dict)
    _last_failure: tuple[FaultKind, str] | None = None
    _failures_in_a_row: int = 0
    _before: tuple[tuple[FaultKind, str] | None, int] = (None, 0)

    def has_come_back(self, fault: Fault, generation: int) -> bool:
        """Whether this exception has been seen in an earlier recovery at the same version."""
        return bool(self._exceptions.get((signature(fault), fault.version), set()) - {generation})

    def count(self, fault: Fault, generation: int, *, may_replace: bool = True) -> str | None:
        """Count a fault of a job that uses `taskd.recoverable`.

        Returns why the job must end, or None.
        """
        if fault.kind in FROM_OUTSIDE:
            return None
        if fault.is_final:
            return f"{describe(fault)}. Trying again would change nothing"
        if fault.kind is FaultKind.RAISED:
            seen = self._exceptions.setdefault((signature(fault), fault.version), set())
            seen.add(generation)
            limit = EXCEPTION_LIMIT if may_replace else EXCEPTION_LIMIT - 1
            came_back = f"the same exception came back: {describe(fault)}"
            return came_back if len(seen) >= limit else None
        rank = None if fault.kind in (FaultKind.COMMUNICATION, FaultKind.HANG) else fault.rank
        limit = HANG_LIMIT if fault.kind is FaultKind.HANG else EXIT_LIMIT
        limit = UNEQUAL_LIMIT if signature(fault) == UNEQUAL_STEPS else limit
        key = (fault.kind, rank, signature(fault), fault.version)
        self._exits[key] = self._exits.get(key, 0) + 1
        if self._exits[key] < limit:
            return None
        return f"the same failure came {limit} times: {describe(fault)}"

    def forget_unversioned(self) -> None:
        """There was progress: what failed before any state was there is not what fails now."""
        exceptions, exits = self._exceptions.items(), self._exits.items()
        self._exceptions = {key: seen for key, seen in exceptions if key[-1] is not None}
        self._exits = {key: count for key, count in exits if key[-1] is not None}

    def forget_exception(self, fault: Fault, generation: int) -> None:
        """An exception turned out to be the consequence of an earlier death."""
        self._exceptions.get((signature(fault), fault.version), set()).discard(generation)

    def count_failure(self, fault: Fault, life_s: float) -> str | None:
        """Count a fault of a job without `taskd.recoverable`.

        Returns why the job must end, or None.
        """
        if fault.kind is FaultKind.LOST:
            return None
        self._before = (self._last_failure, self._failures_in_a_row)
        failure = (fault.kind, signature(fault))
        if fault.kind in FROM_OUTSIDE or life_s >= SHORT_LIFE_S:
            self._last_failure, self._failures_in_a_row = None, 0
            return None
        so_far = self._failures_in_a_row if failure == self._last_failure else 0
        self._last_failure, self._failures_in_a_row = failure, so_far + 1
        if self._failures_in_a_row < EXIT_LIMIT:
            return None
        return (
            f"{EXIT_LIMIT} equal failures in a row, each within {SHORT_LIFE_S:g} s of its "
            f"start: {describe(fault)}"
        )

    def forget_failure(self) -> None:
        """The last failure was the consequence of an earlier death, which is counted instead."""
        self._last_failure, self._failures_in_a_row = self._before
