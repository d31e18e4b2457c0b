"""One life of one rank: the record that the parts of a training process share.

Owns who this process is, and one object for each owner of what it knows:

    plan         what the manager said of the present generation    written by the gate
    interrupts   when the main thread may be interrupted            by the runtime and by a step
    records      what is held of the training state                 by restore, commit, parking
    saving       what keeps copies of it                            by restore and parking
    profiling    what is to be marked                               by the profiler
    supervisor   the runtime, as a training step knows it

`current()` is the only singleton of the process. Knows no sockets, no collectives and no tensors.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from taskd.errors import Interrupted
from taskd.worker.profiling.marks import Switches

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from taskd.checkpoint.folder import Checkpoint
    from taskd.core.commands import Move
    from taskd.core.events import WorkerEvent
    from taskd.native.arenas import Arenas
    from taskd.native.black_box import BlackBox, Phase


class Supervisor:
    """Who follows the steps of this process, and speaks for it. This one: nobody."""

    def tell(self, kind: type[WorkerEvent], cause: str, **fields: Any) -> None:
        """Report an event of this kind to the agent."""

    def report_recovery(self) -> None:
        """The first version since `Resume` is committed."""

    def wants_more(self) -> bool:
        """An interrupt waits at the end of a step: whether another step is to be done first."""
        return False

    def await_device(self) -> None:
        """Return when accelerators have done what this process has asked of them.

        Raises RuntimeError: groups were aborted meanwhile; nothing of it is to be believed.
        """

    def begin_update(self) -> None:
        """The optimizer begins to write, after `await_device`."""

    def end_update(self) -> None:
        """It has written: as `await_device`, if that has asked for collectives."""

    def has_passed(self, error: RuntimeError) -> bool:  # noqa: ARG002
        """The vote before a step ended with `error` here: whether it has passed for others."""
        return False


class SnapshotMaker(Protocol):
    """Copies versions into node memory while training goes on."""

    has_peer: bool
    is_allowed: bool

    def prepare(self, states: dict[str, Any]) -> None:
        """Make room before training begins."""

    def wait(self) -> None:
        """Return when the state may be changed."""

    def may_replace(self) -> bool:
        """Whether this rank can do without its older snapshot."""

    def commit(self) -> None:
        """A version is complete."""

    def close(self) -> None:
        """The entry is over."""


class Checkpointer(Protocol):
    """Writes versions to disk while training goes on."""

    def commit(self) -> None:
        """A version is complete."""

    def wait(self) -> None:
        """Return when everything is on disk."""

    def abandon(self) -> None:
        """The entry is over."""


@dataclass
class Plan:
    """What the manager said of one generation: the cut's version and each rank's move.

    `version` None: everybody starts afresh, as in the first, undisturbed entry.
    """

    generation: int
    version: int | None = None
    moves: dict[int, Move] = field(default_factory=dict)
    awaits_commit: bool = False  # the manager waits for the first commit of this generation
    # Agreements so far: the same number on all ranks, as all take part in each.
    agreements: int = 0

    def receives(self, rank: int) -> bool:
        """Whether this rank gets the state from another one."""
        move = self.moves.get(rank)
        return move is not None and move.source is not None


@dataclass
class Interrupts:
    """Whether `Interrupted` may be raised in the main thread now.

    The only writer of `is_held` is the main thread; `pending` is written by the runtime's thread.
    The signal handler runs in the main thread, so between looking at `is_held` and raising nothing
    can slip in.
    """

    in_recoverable: bool = False
    is_held: bool = False  # from the vote before optimizer.step(), or from that, to commit()
    is_voting: bool = False  # in that vote
    pending: str | None = None  # reason of an interrupt that has not been raised yet
    # The main thread is interrupted even if it is on its way out and cleans up; the runtime's.
    is_urgent: bool = False
    has_cut: bool = False  # that has happened, and nobody has said it yet

    def release(self) -> None:
        """Nothing is half-way. Raises the interrupt that was held back, if any."""
        self.is_held = False
        if self.pending is not None:
            reason, self.pending = self.pending, None
            raise Interrupted(reason)


@dataclass
class Records:
    """What this process holds of the training state.

    `version` counts commits of all TrainStates together (with one TrainState it equals its `step`):
    the order of commits is the same on every rank, so the count names one point of the program.
    The TrainStates are `taskd.worker.state.holding.Holding`, by name.
    """

    states: dict[str, Any] = field(default_factory=dict)  # those of the present entry
    parked: dict[str, Any] = field(default_factory=dict)  # of the last one; emptied by restore()
    version: int | None = None  # None: no TrainState has been restored in this process
    # Those of `version` that are still to be read from elsewhere: until then it is held in part.
    missing: set[str] = field(default_factory=set)
    is_inconsistent: bool = False  # what is parked is no whole copy of `version`
    shard: str = ""  # which part of the state this rank has; "": all of it
    # What the predecessor of this incarnation left in its black box: extras by version, DDP layout.
    inherited_extras: dict[int, bytes] = field(default_factory=dict)
    inherited_layout: bytes | None = None
    keeping: Any = None  # see `taskd.worker.state.keeping.keeping_of`
    logbook: Any = None  # see `taskd.worker.state.logbook.logbook_of`
    layouts: Any = None  # see `taskd.worker.state.buckets`
    step_randoms: Any = None  # see `taskd.worker.state.step_randoms`
    restored_at: float | None = None  # monotonic time at which the last restore() was done
    restored_from: str = ""  # what it said
    random_at_restore: Any = None  # the state of torch's global generator then

    @property
    def whole_version(self) -> int | None:
        """`version`, if no TrainState of it is missing; None: nothing is held as a whole."""
        return None if self.missing else self.version

    def expect(self, names: Iterable[str]) -> None:
        """The first TrainState of this entry was read from elsewhere, where these are as well.

        What is parked is of another version from here on, so that it is missing, too.
        """
        self.missing = {*names, *self.parked, *self.states}

    def settle(self) -> None:
        """A step begins: what the script has not restored by now, it does without."""
        for name in self.missing:
            self.parked.pop(name, None)
        self.missing.clear()

    @property
    def has_restored(self) -> bool:
        """Whether a TrainState of this entry has been restored."""
        return any(holding.is_restored for holding in self.states.values())

    @property
    def is_sharded(self) -> bool:
        """Whether a TrainState of this entry is: then the ranks vote on the steps of all of them.

        By what the script has built, and not by `shard`: that may be of an earlier entry, which a
        new process has not had, and all ranks must vote equally often.
        """
        return any(holding.shard for holding in self.states.values())

    @property
    def is_half_way(self) -> bool:
        """Whether a TrainState is between its optimizer's step and its commit.

        Then there is no whole state to save.
        """
        return any(holding.is_half_way for holding in self.states.values())


@dataclass
class Saving:
    """What keeps copies of the state. The arenas outlive the process, the others an entry."""

    arenas: Arenas | None = None
    # an agent that was lost has left them, and nothing has been verified
    is_unverified: bool = False
    snapshots: SnapshotMaker | None = None
    periodic: Checkpointer | None = None
    checkpoint: Checkpoint | None = None  # what the state was read from at the last fresh start
    directory: Path | None = None  # of checkpoints: what the first restore() of this entry went by
    base: str = ""  # where a relative one begins: the working directory at the first TrainState
    stored: Any = None  # the snapshot from which this entry goes on
    # seconds from SIGTERM to the end of the job, in which it is saved; None: it is not
    grace_s: float | None = None
    is_grace_doubted: bool = False  # and that has been said

    def versions(self) -> tuple[int, ...]:
        """Those of this rank's state that are whole in node memory."""
        return () if self.arenas is None else self.arenas.versions()

    def verify(self) -> list[str]:
        """What of the arenas is damaged and dropped, if it is to be looked at."""
        if self.arenas is None or not self.is_unverified:
            return []
        self.is_unverified = False
        return self.arenas.verify()


@dataclass
class Life:
    """One incarnation of one rank.

    `rank`: that of the job, by which it is known to the agent, for good. `active`: the ranks of
    which the world of its process groups consists, in order; (): all of the job. Which one of them
    it is, is its rank there.
    """

    rank: int
    world_size: int  # of the present world
    incarnation: int
    box: BlackBox | None = None
    job_id: str = ""
    plan: Plan = field(default_factory=lambda: Plan(0))
    interrupts: Interrupts = field(default_factory=Interrupts)
    records: Records = field(default_factory=Records)
    saving: Saving = field(default_factory=Saving)
    keeper_distance: int = 0  # see `taskd.worker.state.keeping`; 0: nodes are not replaced here
    profiling: Switches = field(default_factory=Switches)
    supervisor: Supervisor = field(default_factory=Supervisor)
    is_replacement: bool = False  # it takes the place of a process of a job that goes on
    is_retired: bool = False  # TrainStates that are made from now on only count
    active: tuple[int, ...] = ()
    # The aborted groups of an entry are left in torch until the next one begins: with the store,
    # groups can be made among those who save the job. See `taskd.worker.carried_state`.
    keeps_groups: bool = False
    stop_device: Callable[[], None] | None = None  # makes a wait for a device raise
    is_resized: bool = False  # the world is another one since the last commit
    has_elastic_data: bool = False  # the script reads its data with a `taskd.ElasticSampler`
    job_size: int = 0

    def __post_init__(self) -> None:
        self.job_size = self.world_size

    @property
    def world_rank(self) -> int:
        """Its rank in the present world."""
        return self.world_rank_of(self.rank)

    def world_rank_of(self, rank: int) -> int:
        """The rank in the present world of this rank of the job, which is part of it."""
        return self.active.index(rank) if self.active else rank

    def rank_of(self, world_rank: int) -> int:
        """Opposite of `world_rank_of`."""
        return self.active[world_rank] if self.active else world_rank

    def mark(self, phase: Phase) -> None:
        """Note in the black box, and in the profile, what the main thread begins to do."""
        if self.box is not None:
            self.box.mark_phase(phase)
        profile = self.profiling.profile  # once: another thread takes it away
        if profile is not None:
            profile.mark(phase, time.monotonic_ns())


_life: Life | None = None


def current() -> Life | None:
    """The life of this process; None outside a taskd job, and when it is retired."""
    return None if _life is None or _life.is_retired else _life


def of_process() -> Life | None:
    """The same, retired or not."""
    return _life


def set_current(life: Life | None) -> None:
    """At the runtime's start; None in forked children (data loaders), which are no workers."""
    global _life  # noqa: PLW0603
    _life = life
