"""One recovery in the making: its faults, its times, and the `RecoveryRecord` made of them.

Owns the meaning of each duration. Decides nothing. A recovery is one generation. A fault while
ranks leave their step or start makes it longer, not two. One after that, before the last rank's
first new commit, begins another: the record of the first says that it was not completed, and the
time of the second counts from the death with which all began. So a job that goes round and round
leaves a record each time.

    death | detect | manager learned | decide | commands | quiesce | last survivor paused
                                                          | respawn | last replacement at the gate
    resume | groups | state | first step |

A restart of the group waits for starts. Its record comes later, when every rank has made its first
step, where that can be seen, and counts until then: until the starts otherwise. Which steps it does
again is known when a rank has said from which version it goes on. If it is cut short before, the
recovery that follows counts them.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from taskd.core.commands import Move, RecoveryRecord
from taskd.core.events import WorkerRecovered
from taskd.core.faults import FaultKind, TimedFault
from taskd.core.policy.ladder import Choice, Outcome, Strategy


@dataclass(slots=True)
class Attempt:
    """The recovery that is under way."""

    cause: str
    began_at: float  # for a recovery without a fault: when it was seen to be needed
    strategy: Strategy = Strategy.RETRY
    reason: str = ""  # why that strategy
    skipped: dict[Strategy, str] = field(default_factory=dict)  # and why not these
    ended_as: Outcome | None = None  # the job has ended by it, so that no other one follows
    taken_over: str = ""  # what an earlier manager has to do with it
    outage_began_at: float | None = None  # with the first death of those that were cut short before
    faults: list[TimedFault] = field(default_factory=list)
    followers: set[tuple[int, int]] = field(default_factory=set)
    version: int | None = None
    moves: tuple[Move, ...] = ()  # of the last plan, and to whom it went
    ranks: tuple[int, ...] = ()
    # Before a restart of all: the newest version, until somebody says from which one all go on; and
    # the version that was saved just then.
    committed: int = 0
    kept: int = 0
    redone: int = 0  # committed steps to be done again, over all plans of this recovery
    broken: set[int] = field(default_factory=set)  # ranks in which an exception came back
    doubtful: set[int] = field(default_factory=set)  # ranks that raise again and again
    decided_at: float | None = None
    commanded_at: float = 0.0
    quiesced_at: float = 0.0
    respawned_at: float = 0.0
    slowest: WorkerRecovered | None = None
    waiting: set[int] = field(default_factory=set)  # ranks that have not recovered (or started) yet
    is_restart: bool = False  # it waits for starts, not for commits

    def take_over(self, faults: list[TimedFault], *, is_known: bool) -> None:
        """An earlier manager was answering these: replaced the ranks, and counted the restarts.

        `is_known` False: it is not known what it was answering.
        """
        self.faults += faults
        if faults:
            self.strategy = Strategy.RECOVER_IN_PLACE
            self.taken_over = "the manager was restarted meanwhile"
        elif not is_known:
            unknown = "what came before is not known: the time counts from then"
            self.taken_over = f"this manager came later, and {unknown}"

    @property
    def is_incurable(self) -> bool:
        """Whether the processes that are there cannot go on, whatever they hold."""
        return any(timed.fault.is_incurable for timed in self.faults)

    def pass_over(self, choice: Choice) -> None:
        """Why no strategy before the chosen one can work."""
        self.skipped.update(choice.skipped)

    def end_by(self, strategy: Strategy, reason: str) -> None:
        """The job ends: with a dump, or without."""
        self.strategy, self.reason, self.committed = strategy, reason, 0
        is_saved = strategy is Strategy.DUMP
        self.ended_as = Outcome.DUMP_OR_EXIT if is_saved else Outcome.EXIT_ONLY

    def commanded(self, now: float) -> None:
        """The commands of a new generation go out."""
        self.commanded_at = self.quiesced_at = self.respawned_at = now
        self.decided_at = now if self.decided_at is None else self.decided_at
        self.slowest, self.is_restart = None, False
        self.waiting.clear()

    def paused(self, now: float, *, replaced: bool) -> None:
        """A rank waits at the gate."""
        if replaced:
            self.respawned_at = now
        else:
            self.quiesced_at = now

    @property
    def all_stopped_at(self) -> float:
        """When the last rank came to the gate."""
        return max(self.quiesced_at, self.respawned_at)

    def resumed(
        self, version: int | None, moves: tuple[Move, ...], ranks: Iterable[int], redone: int
    ) -> None:
        """The plan goes out to these ranks."""
        if version is not None:
            self.went_on_from(version)
        self.version, self.moves, self.ranks = version, moves, tuple(ranks)
        self.waiting = set(self.ranks)
        self.redone += redone
        self.is_restart = False

    def restarted(self, waiting: Iterable[int], committed: int, kept: int) -> None:
        """All ranks are to start anew. `kept`: the version that was just saved."""
        self.resumed(None, (), (), 0)
        self.committed, self.kept = max(self.committed, committed), kept or self.kept
        self.waiting, self.is_restart = set(waiting), True

    def went_on_from(self, version: int) -> None:
        """All have started anew, and say from which version: what they had saved is not redone.

        0: from the beginning, or they have no versions.
        """
        self.version = version or self.version
        self.redone += max(0, self.committed - version)
        self.committed = 0

    @property
    def steps_redone(self) -> int:
        """Committed steps to be done again: at most, if nobody has said from where he goes on."""
        return self.redone + max(0, self.committed - self.kept)

    def follow(self, before: "Attempt") -> None:
        """That one was cut short: this one goes on with its outage, and with what it left open."""
        self.outage_began_at = before.began_outage()
        self.committed, self.kept = before.committed, before.kept
        before.committed = 0

    def recovered(self, rank: int, event: WorkerRecovered | None) -> bool:
        """A rank is back (None: without a new commit). Returns whether it was the last one."""
        if rank not in self.waiting:
            return False
        self.waiting.discard(rank)
        if event is not None:
            self.slowest = max(self.slowest or event, event, key=duration_of)
            if self.committed:  # they have all begun anew: this is the first step from there
                self.went_on_from(event.version - 1)
        return not self.waiting

    def victims_of(self, death: TimedFault) -> list[TimedFault]:
        """Exceptions taken for causes so far, that came after this death: its consequences.

        So is broken communication, of the loss of a node.
        """
        kinds = {FaultKind.RAISED}
        if death.fault.kind is FaultKind.NODE_LOST:
            kinds.add(FaultKind.COMMUNICATION)
        return [
            timed
            for timed in self.faults
            if timed.fault.kind in kinds
            and timed.generation == death.generation
            and timed.died_at >= death.died_at
        ]

    def demote(self, timed: TimedFault) -> None:
        """Not a cause after all."""
        self.faults.remove(timed)
        self.followers.add(timed.fault.life)
        self.broken.discard(timed.fault.rank)
        self.doubtful.discard(timed.fault.rank)

    def began_outage(self) -> float:
        """When the first death came since a recovery was completed."""
        died_at = min((timed.died_at for timed in self.faults), default=self.began_at)
        return died_at if self.outage_began_at is None else min(self.outage_began_at, died_at)

    def record(
        self, now: float, generation: int, restarts_used: int, max_restarts: int,
        not_completed: str = "",
    ) -> RecoveryRecord:  # fmt: skip
        """The record, when the last rank is back; `not_completed`: what came before that."""
        first = min(self.faults, key=lambda timed: timed.died_at, default=None)
        died_at = first.died_at if first else self.began_at
        learned_at = first.learned_at if first else self.began_at
        slowest = self.slowest
        return RecoveryRecord(
            generation=generation,
            strategy=self.strategy.value,
            faults=tuple(timed.fault for timed in sorted(self.faults, key=TimedFault.order)),
            followers=len(self.followers),
            version=self.version,
            sources=self._sources(),
            steps_redone=self.steps_redone,
            detect_s=max(0.0, learned_at - died_at),
            decide_s=max(0.0, (self.decided_at or learned_at) - learned_at),
            quiesce_s=self.quiesced_at - self.commanded_at,
            respawn_s=self.respawned_at - self.commanded_at,
            groups_s=slowest.groups_s if slowest else 0.0,
            state_s=slowest.state_s if slowest else 0.0,
            first_step_s=slowest.first_step_s if slowest else 0.0,
            total_s=max(0.0, now - self.began_outage()),
            restarts_used=restarts_used,
            max_restarts=max_restarts,
            reason="; ".join(filter(None, (self.reason, self.taken_over))),
            not_completed=not_completed,
            skipped=self._skipped(),
            code=self._result(not_completed).value,
        )

    def _skipped(self) -> tuple[tuple[str, str], ...]:
        """Why no cheaper strategy. What no choice has told is the reason of this one."""
        if self.strategy is Strategy.ELASTIC and not self.faults:
            return ()  # nodes are back: there was nothing to recover from
        cheaper = list(Strategy)[: list(Strategy).index(self.strategy)]
        otherwise = self.reason or self.taken_over
        told = ((each.value, self.skipped.get(each, otherwise)) for each in cheaper)
        return tuple((name, why) for name, why in told if why)

    def _result(self, not_completed: str) -> Outcome:
        if not not_completed:
            return Outcome.RECOVERED
        return Outcome.FAILED if self.ended_as is None else self.ended_as

    def _sources(self) -> tuple[tuple[int, str], ...]:
        """Where each rank had the state from."""
        kept = "nothing" if self.version is None else "kept"
        moved = {move.rank: _source(move) for move in self.moves}
        return tuple((rank, moved.get(rank, kept)) for rank in self.ranks)


@dataclass(slots=True)
class StartedAnew:
    """A restart of the group after all processes have started: a first step may be reported."""

    attempt: Attempt
    generation: int
    restarts_used: int
    complete_at: float  # when the last one had started, or had made its step
    until: float  # no report is waited for any longer
    waiting: set[int]  # ranks that have not reported one
    went_on_from: int | None = None  # the oldest version that a rank went on from

    def learn(self, version: int | None) -> None:
        """A rank says from which version it went on."""
        if version is not None:
            before = self.went_on_from
            self.went_on_from = version if before is None else min(before, version)

    def tell(self) -> None:
        """Into the record: from where all went on, if anybody has said it."""
        if self.went_on_from is not None:
            self.attempt.went_on_from(self.went_on_from)


def _source(move: Move) -> str:
    return "snapshot" if move.source is None else f"rank {move.source}"


def duration_of(event: WorkerRecovered) -> float:
    """From `Resume`, or from the start of the process, to the first step; seconds."""
    return event.groups_s + event.state_s + event.first_step_s
