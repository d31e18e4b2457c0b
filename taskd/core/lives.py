"""The lives of one node's workers.

What the agent knows of each, the present ones and those not reaped yet.

Owns the table. Decides nothing: see `taskd.core.node`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from taskd.core import events as ev
from taskd.core.commands import SpawnWorker
from taskd.core.faults import Fault, FaultKind
from taskd.core.membership import WorkerState
from taskd.core.spacing import Spacing

# in one registration, which is one message: of a node with more that failed at once the record is
# less exact
_TOLD_FAILURES = 32

Stand = ev.WorkerPaused | ev.WorkerRaised | ev.WorkerReturned


@dataclass(slots=True)
class Life:
    """One life of one worker on this node."""

    rank: int
    incarnation: int
    state: WorkerState = WorkerState.STARTING
    is_gated: bool = False
    # there is one, or it is being started; False: reaped, or not asked for yet
    has_process: bool = True
    spawn: SpawnWorker | None = None  # held back until the life before is reaped
    is_declared: bool = False
    is_entered: bool = False
    version: int | None = None
    clean: bool = True
    interrupted: int = -1  # newest generation told by Interrupt (or by the bootstrap)
    resumed: int = -1  # ... by Resume (or by the bootstrap)
    is_told_release: bool = False
    died_at: float | None = None
    kill_at: float | None = None
    is_examined: bool = False  # it hangs, and writes down its stacks before it is killed
    waits_since: float | None = None  # it can go on only when the manager says so
    started: ev.WorkerStarted | None = None
    holds: ev.WorkerHolds | None = None
    stand: Stand | None = None
    offer: ev.WorkerMayAdvance | None = None
    recovered: ev.WorkerRecovered | None = None
    lost: ev.WorkerLost | None = None
    exit_known: ev.WorkerExitKnown | None = None
    before: "Life | None" = None  # the one that failed and whose place it has taken

    @property
    def is_live(self) -> bool:
        """Whether commands for workers concern it."""
        return self.state not in (WorkerState.LOST, WorkerState.FINISHED)

    @property
    def is_needed(self) -> bool:
        """Whether it trains, as far as known.

        It has come to its function, or replaces one that had to.
        """
        return self.is_entered or self.is_gated

    def enter(self) -> None:
        """It has come to its recoverable function."""
        self.is_declared = self.is_entered = True

    def stand_still(self, event: Stand | ev.WorkerMayAdvance, now: float) -> None:
        """It left its function and waits. Or it is to go on or to leave, and asks which."""
        if isinstance(event, ev.WorkerMayAdvance):
            self.offer, self.waits_since = event, now
            self.state, self.version, self.clean = WorkerState.PAUSED, event.version, True
            return
        self.stand, self.offer, self.waits_since = event, None, now
        if isinstance(event, ev.WorkerReturned):
            self.enter()
            self.state, self.version = WorkerState.RETURNED, event.version
        elif isinstance(event, ev.WorkerRaised):
            self.enter()
            self.state, self.version, self.clean = (
                WorkerState.PAUSED,
                event.fault.version,
                event.clean,
            )
        else:
            self.state, self.version, self.clean = WorkerState.PAUSED, event.version, event.clean

    def lose(self, now: float) -> None:
        """Its process is gone, or as good as gone; or will not be started."""
        self.state, self.waits_since, self.stand, self.offer, self.spawn = (
            WorkerState.LOST,
            now,
            None,
            None,
            None,
        )

    def answer_to(self, generation: int) -> ev.WorkerPaused | ev.WorkerMayAdvance | None:
        """What it said when that generation's interrupt called it out, if it has."""
        said = self.offer or self.stand
        return (
            said
            if isinstance(said, ev.WorkerPaused | ev.WorkerMayAdvance)
            and said.generation == generation
            else None
        )

    @property
    def may_advance(self) -> bool:
        """Whether it waits within its function, and could commit one step more."""
        return self.offer is not None or (
            isinstance(self.stand, ev.WorkerRaised) and self.stand.may_advance
        )

    @property
    def snapshots(self) -> tuple[int, ...]:
        """What it said of node memory when it began to wait."""
        said = self.offer or self.stand
        return () if said is None or isinstance(said, ev.WorkerReturned) else said.snapshots

    def call_out(self, generation: int) -> None:
        """A new Interrupt is passed on to it.

        What it offered before is void: it will offer it again, or come out.
        """
        self.interrupted = generation
        if self.offer is not None and self.stand is None:
            self.state, self.waits_since = WorkerState.RUNNING, None
        self.offer = None

    def go_on(self) -> None:
        """It was told to."""
        self.state, self.stand, self.offer, self.waits_since, self.clean = (
            WorkerState.RUNNING,
            None,
            None,
            None,
            True,
        )

    def resume(self, generation: int, version: int | None) -> None:
        """Resume is passed on to it.

        It goes on from `version`, which may be older than what it held.
        """
        self.resumed = self.interrupted = generation
        self.go_on()
        self.version = version

    @property
    def fault(self) -> Fault | None:
        """How it failed, as far as known."""
        known = self.exit_known or self.lost
        return None if known is None else known.fault

    def report(self, now: float, *, tell_failure: bool) -> ev.WorkerReport:
        """This life, for a registration.

        A manager that is new learns from it what is being recovered.
        """
        return ev.WorkerReport(
            self.rank,
            self.incarnation,
            self.state,
            self.is_declared,
            self.version,
            self.clean,
            self.is_entered,
            self.snapshots,
            "" if self.holds is None else self.holds.shard,
            self.may_advance,
            self._failure(now) if tell_failure else None,
        )

    def _failure(self, now: float) -> ev.ReportedFailure | None:
        failed = self if self.fault is not None else self.before if self.recovered is None else None
        if failed is None or failed.fault is None or failed.died_at is None:
            return None
        return ev.ReportedFailure(
            replace(failed.fault, traceback=None),
            max(0.0, now - failed.died_at),
            failed is not self,
        )


class Lives:
    """`present` by rank, `former` (replaced, not reaped yet) by rank and incarnation."""

    def __init__(
        self, ranks: Iterable[int], incarnations: Mapping[int, int], generation: int
    ) -> None:
        self.present = {
            rank: Life(rank, incarnations.get(rank, 0), resumed=generation)
            for rank in sorted(ranks)
        }
        self.former: dict[tuple[int, int], Life] = {}
        self.spacing = Spacing()

    def all(self) -> list[Life]:
        """Every life that may have a process."""
        return [*self.former.values(), *self.present.values()]

    def of(self, event: ev.WorkerEvent) -> Life | None:
        """The life that this event is about, if it is the present one and has begun."""
        life = self.present.get(event.rank)
        is_it = life is not None and life.incarnation == event.incarnation and life.spawn is None
        return life if is_it else None

    def any_process(self) -> bool:
        """Whether anything is left to be reaped."""
        return any(life.has_process for life in self.all())

    def reports(self, now: float) -> tuple[ev.WorkerReport, ...]:
        """The present lives, for a registration."""
        failed = [
            rank for rank, life in self.present.items() if (life.fault or life.before) is not None
        ]
        told = set(failed[:_TOLD_FAILURES])
        return tuple(
            life.report(now, tell_failure=rank in told) for rank, life in self.present.items()
        )

    def said(self, now: float) -> list[ev.WorkerEvent]:
        """What a manager that joined must hear of each life beyond the registration."""
        told: list[ev.WorkerEvent] = []
        for life in self.all():
            if life.lost is not None and life.died_at is not None:
                told.append(replace(life.lost, now=now, age_s=max(0.0, now - life.died_at)))
            # since the registration was written, perhaps
            if life.is_live and life.started is not None:
                told.append(replace(life.started, now=now))
                if life.is_declared:
                    told.append(
                        ev.WorkerDeclared(
                            now, life.started.cause, life.rank, life.incarnation, life.is_entered
                        )
                    )
            told += [
                replace(event, now=now)
                for event in (life.holds, life.exit_known, life.stand, life.offer, life.recovered)
                if event is not None
            ]
        return told

    def faults(self) -> list[Fault]:
        """How present lives failed."""
        return [life.fault for life in self.present.values() if life.fault is not None]

    def stopped(self) -> list[Life]:
        """Present lives that can go on only when the manager says so."""
        return [
            life
            for life in self.present.values()
            if life.state in (WorkerState.LOST, WorkerState.PAUSED)
        ]

    def waiting_since(self, *, is_released: bool) -> float | None:
        """Since when this node needs the manager.

        The first that stopped, or, if all have returned, the last of them.
        """
        stopped = [life.waits_since for life in self.stopped() if life.waits_since is not None]
        if stopped:
            return min(stopped)
        lives = self.present.values()
        if is_released or any(
            life.state not in (WorkerState.RETURNED, WorkerState.FINISHED) for life in lives
        ):
            return None
        return max(
            (life.waits_since for life in lives if life.waits_since is not None), default=None
        )

    def succeed(self, life: Life, spawn: SpawnWorker, kill_at: float) -> None:
        """Put a new life, not started yet, in the place of `life`, which must be gone by `kill_at`."""
        if life.has_process:
            life.kill_at = life.kill_at if life.is_examined else kill_at
            self.former[life.rank, life.incarnation] = life
        self.present[life.rank] = Life(
            life.rank,
            spawn.incarnation,
            holds=replace(life.holds, incarnation=spawn.incarnation)
            if life.holds is not None and spawn.gated
            else None,
            is_gated=spawn.gated,
            has_process=False,
            spawn=spawn,
            interrupted=spawn.generation,
            resumed=spawn.generation - 1 if spawn.gated else spawn.generation,
            before=(life if life.fault is not None else life.before) if spawn.gated else None,
        )
        life.before = None

    def next_spawn(self, rank: int, now: float, *, at_once: bool) -> list[SpawnWorker]:
        """The spawn that may happen now.

        `at_once` if it is gated, else when all earlier processes of the rank are reaped.

        Starts that came to nothing let it wait: see `due_spawns`.
        """
        life = self.present[rank]
        if life.spawn is None:
            return []
        if not (at_once and life.is_gated) and any(
            former_rank == rank for former_rank, _ in self.former
        ):
            life.spawn = replace(life.spawn, after_reaped=True)
            return []
        if self.spacing.must_wait(rank, now, at_once=at_once):
            return []
        spawn, life.spawn, life.has_process = life.spawn, None, True
        return [spawn]

    def due_spawns(self, now: float) -> list[SpawnWorker]:
        """Those that have waited for long enough after starts that came to nothing."""
        return [
            spawn
            for rank, at_once in self.spacing.due(now)
            for spawn in self.next_spawn(rank, now, at_once=at_once)
        ]

    def end(self, life: Life, kind: FaultKind, now: float) -> None:
        """It has no process any more."""
        life.has_process, life.kill_at = False, None
        started_at = None if life.started is None else life.started.now
        self.spacing.ended(life.rank, kind, now, started_at, has_entered=life.is_entered)

    def check(self) -> None:
        """Assert that the table agrees with itself."""
        for (rank, incarnation), life in self.former.items():
            assert life.has_process
            assert incarnation < self.present[rank].incarnation
        for life in self.present.values():
            assert not (life.spawn and life.has_process)
            assert life.state is not WorkerState.FINISHED or not life.has_process
