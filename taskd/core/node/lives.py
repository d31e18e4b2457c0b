"""The lives of one node's workers: what the agent knows of each, present ones and those replaced.

Owns the table. Decides nothing: see `taskd.core.node.machine`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from taskd.core import events as ev
from taskd.core.commands import SpawnWorker
from taskd.core.faults import Fault, FaultKind
from taskd.core.node.spacing import Spacing
from taskd.core.worker_state import WorkerState

# In one registration, which is one message. Of a node on which more failed at once the record is
# less exact.
_TOLD_FAILURES = 32

StopReport = ev.WorkerPaused | ev.WorkerRaised | ev.WorkerReturned


@dataclass(slots=True)
class Life:
    """One life of one worker on this node."""

    rank: int
    incarnation: int
    state: WorkerState = WorkerState.STARTING
    is_gated: bool = False  # it begins in a recovery, and waits for Resume
    has_process: bool = True  # or is being started; False: reaped, or not asked for yet
    spawn: SpawnWorker | None = None  # held back until the life before is reaped
    start: int | None = None  # of all: this rank has had no process since
    is_declared: bool = False
    is_entered: bool = False
    has_waited: bool = False  # at the gate, where all others meet it
    version: int | None = None
    clean: bool = True
    interrupted: int = -1  # newest generation told by Interrupt (or by the bootstrap)
    resumed: int = -1  # ... by Resume (or by the bootstrap)
    is_told_release: bool = False
    died_at: float | None = None
    kill_at: float | None = None
    is_examined: bool = False  # it hangs, and writes down its stacks before it is killed
    waits_since: float | None = None  # it can go on only when the manager says so
    # The newest report of each kind, to be repeated to a manager that comes later.
    started: ev.WorkerStarted | None = None
    holds: ev.WorkerHolds | None = None
    stopped: StopReport | None = None
    offer: ev.WorkerMayAdvance | None = None  # it could commit one step more, and waits in its step
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

        It has come to its function or to the gate before it, or replaces one that had to.
        """
        return self.is_entered or self.is_gated or self.has_waited

    def stop(self, event: StopReport | ev.WorkerMayAdvance, now: float) -> None:
        """It left its function and waits at the gate, or asks in it how far to go."""
        self.state, self.waits_since = WorkerState.PAUSED, now
        if isinstance(event, ev.WorkerMayAdvance):
            self.offer, self.version, self.clean = event, event.version, True
            return
        self.stopped, self.offer = event, None
        if isinstance(event, ev.WorkerPaused):
            self.version, self.clean, self.has_waited = event.version, event.clean, True
            return
        self.is_declared = self.is_entered = True
        if isinstance(event, ev.WorkerRaised):
            self.version, self.clean = event.fault.version, event.clean
        else:
            self.state, self.version = WorkerState.RETURNED, event.version

    def lose(self, now: float) -> None:
        """Its process is gone, or as good as gone; or will not be started."""
        self.state, self.waits_since = WorkerState.LOST, now
        self.stopped = self.offer = self.spawn = None

    def answer_to(self, generation: int) -> ev.WorkerPaused | ev.WorkerMayAdvance | None:
        """The report that answered the Interrupt of that generation, if it came."""
        said = self.offer or self.stopped
        if not isinstance(said, ev.WorkerPaused | ev.WorkerMayAdvance):
            return None
        return said if said.generation == generation else None

    @property
    def is_called_out(self) -> bool:
        """Whether its function has returned, and Interrupt was passed on to it since."""
        return self.state is WorkerState.RETURNED and self.interrupted > self.resumed

    @property
    def may_advance(self) -> bool:
        """Whether it waits within its function, and could commit one step more."""
        said = self.stopped
        return self.offer is not None or (isinstance(said, ev.WorkerRaised) and said.may_advance)

    @property
    def snapshots(self) -> tuple[int, ...]:
        """What it said of node memory when it began to wait, or has left there."""
        said = self.lost if self.state is WorkerState.LOST else self.offer or self.stopped
        return () if said is None or isinstance(said, ev.WorkerReturned) else said.snapshots

    def interrupt(self, generation: int) -> None:
        """Interrupt is passed on to it: it will offer its step again, or leave."""
        self.interrupted = generation
        if self.offer is not None and self.stopped is None:
            self.state, self.waits_since = WorkerState.RUNNING, None
        self.offer = None

    def proceed(self) -> None:
        """Mark as running after Resume or Advance."""
        self.state, self.waits_since, self.clean = WorkerState.RUNNING, None, True
        self.stopped = self.offer = None

    def resume(self, generation: int, version: int | None) -> None:
        """Resume is passed on to it. `version` may be older than what it held."""
        self.resumed = self.interrupted = generation
        self.proceed()
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
        shard = "" if self.holds is None else self.holds.shard
        failure = self._failure(now) if tell_failure else None
        return ev.WorkerReport(
            self.rank, self.incarnation, self.state, self.is_declared, self.version, self.clean,
            self.is_entered, self.snapshots, shard, self.may_advance, failure,
        )  # fmt: skip

    @property
    def has_failed(self) -> bool:
        """Whether there is something to be told of how it failed, or the one before."""
        return (self.fault or self.before or self.raised) is not None

    def is_victim(self) -> bool:
        """Whether the failure of another one explains its own."""
        return self.raised is not None and self.raised.fault.kind is FaultKind.COMMUNICATION

    @property
    def raised(self) -> ev.WorkerRaised | None:
        """The exception that left its function, and for which it waits."""
        return self.stopped if isinstance(self.stopped, ev.WorkerRaised) else None

    def raised_by(self, now: float) -> ev.WorkerRaised | None:
        """The same, told now."""
        if (raised := self.raised) is None:
            return None
        return replace(raised, now=now, age_s=raised.age_s + max(0.0, now - raised.now))

    def _failure(self, now: float) -> ev.ReportedFailure | None:
        if (raised := self.raised_by(now)) is not None:
            return ev.ReportedFailure(replace(raised.fault, traceback=None), raised.age_s)
        failed = self if self.fault is not None else self.before if self.recovered is None else None
        if failed is None or failed.fault is None or failed.died_at is None:
            return None
        age_s = max(0.0, now - failed.died_at)
        return ev.ReportedFailure(replace(failed.fault, traceback=None), age_s, failed is not self)


class Lives:
    """`present` by rank, `former` (replaced, not reaped yet) by rank and incarnation."""

    def __init__(
        self, ranks: Iterable[int], incarnations: Mapping[int, int], generation: int,
        *, are_there: bool = True,
    ) -> None:  # fmt: skip
        """`are_there` False: nothing runs before the manager orders it."""
        self.present = {
            rank: Life(rank, incarnations.get(rank, 0), resumed=generation)
            for rank in sorted(ranks)
        }
        for life in () if are_there else self.present.values():
            life.state, life.has_process = WorkerState.LOST, False
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
        lives = self.present.values()
        failed = sorted((life for life in lives if life.has_failed), key=Life.is_victim)
        told = {life.rank for life in failed[:_TOLD_FAILURES]}
        return tuple(life.report(now, tell_failure=life.rank in told) for life in lives)

    def said(self, now: float) -> list[ev.WorkerEvent]:
        """What a manager that joined must hear of each life beyond the registration.

        First who lives, and can be recovered in place: whoever died since the registration was
        written is replaced in place only if another one says so.
        """
        told: list[ev.WorkerEvent] = []
        for life in self.all():
            started = life.started if life.is_live else None
            if started is not None:
                # since the registration was written, perhaps
                told.append(replace(started, now=now))
            if life.is_live and life.is_declared:  # perhaps sooner than its start is known here
                cause = "declared" if started is None else started.cause
                who = (now, cause, life.rank, life.incarnation)
                told.append(ev.WorkerDeclared(*who, life.is_entered))
        for life in self.all():
            if life.lost is not None and life.died_at is not None:
                told.append(replace(life.lost, now=now, age_s=max(0.0, now - life.died_at)))
            stopped = life.raised_by(now) or life.stopped
            kept = (life.holds, life.exit_known, stopped, life.offer, life.recovered)
            told += [replace(event, now=now) for event in kept if event is not None]
        return told

    def faults(self) -> list[Fault]:
        """How present lives failed."""
        return [life.fault for life in self.present.values() if life.fault is not None]

    def blocked(self) -> list[Life]:
        """Present lives that can go on only when the manager says so."""
        needed = (WorkerState.LOST, WorkerState.PAUSED)
        return [life for life in self.present.values() if life.state in needed]

    def waiting_since(self, *, is_released: bool) -> float | None:
        """Since when this node needs the manager; None: it does not.

        From the first that stopped on, or, if all have returned and none is called out since, from
        the last of them.
        """
        blocked = [life.waits_since for life in self.blocked() if life.waits_since is not None]
        if blocked:
            return min(blocked)
        lives, done = self.present.values(), (WorkerState.RETURNED, WorkerState.FINISHED)
        if is_released or any(life.state not in done or life.is_called_out for life in lives):
            return None
        waiting = (life.waits_since for life in lives if life.waits_since is not None)
        return max(waiting, default=None)

    def have_finished(self) -> bool:
        """Whether every worker of the node has ended as it should."""
        return all(life.state is WorkerState.FINISHED for life in self.present.values())

    def put_successor(self, life: Life, spawn: SpawnWorker, kill_at: float) -> None:
        """A new life, not started yet, takes the place of `life`, which is gone by `kill_at`."""
        if life.has_process:
            life.kill_at = life.kill_at if life.is_examined else kill_at
            self.former[life.rank, life.incarnation] = life
        successor = self.present[life.rank] = Life(
            life.rank,
            spawn.incarnation,
            is_gated=spawn.gated,
            has_process=False,
            spawn=spawn,
            start=spawn.start,
            interrupted=spawn.generation,
            resumed=spawn.generation - spawn.gated,
        )
        if spawn.gated:
            successor.before = life if life.fault is not None else life.before
            if life.holds is not None:
                successor.holds = replace(life.holds, incarnation=spawn.incarnation)
        life.before = None

    def next_spawn(self, rank: int, now: float, *, at_once: bool) -> list[SpawnWorker]:
        """The spawn of this rank, if it may happen now.

        `at_once`: a gated one does not wait until all earlier processes of the rank are reaped.
        Starts that came to nothing let it wait: see `due_spawns`.
        """
        life = self.present[rank]
        if life.spawn is None:
            return []
        has_former = any(former_rank == rank for former_rank, _ in self.former)
        if has_former and not (at_once and life.is_gated):
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
        who = (life.rank, life.incarnation)
        self.spacing.ended(*who, kind, now, started_at, has_entered=life.is_entered)

    def check(self) -> None:
        """Assert that the table agrees with itself."""
        for (rank, incarnation), life in self.former.items():
            assert life.has_process
            assert incarnation < self.present[rank].incarnation
        for life in self.present.values():
            assert not (life.spawn and life.has_process)
            assert life.state is not WorkerState.FINISHED or not life.has_process
