"""What one training process knows of its own life.

Identity, generation, held-back interrupt, parked state.

Shared by the runtime (which writes it from messages), the decorator and `TrainState`. Knows no
sockets and no collectives. The only writer of `held` is the main thread; `pending` is written by
the runtime thread and read by the main thread: the signal handler runs in the main thread, so
between looking at `held` and raising nothing can slip in.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from taskd.errors import Interrupted

if TYPE_CHECKING:
    from collections.abc import Callable

    from taskd.checkpoint.folder import Checkpoint
    from taskd.core.commands import Move
    from taskd.native.arenas import Arenas
    from taskd.native.black_box import BlackBox, Phase
    from taskd.worker.profiling.profiler import Profile
    from taskd.worker.saving.periodic import Periodic
    from taskd.worker.saving.snapshots import Found, Snapshots


@dataclass
class Plan:
    """What `Resume` said.

    The cut's version (None: everybody starts afresh) and each rank's move.
    """

    generation: int
    version: int | None
    moves: dict[int, Move]


@dataclass
class Life:
    """One incarnation of one rank.

    `version` counts commits of all TrainStates together (with one TrainState it equals its `step`):
    the order of commits is the same on every rank, so the count names one point of the program.
    """

    rank: int
    world_size: int
    incarnation: int
    box: BlackBox | None = None
    # Extras (version -> bytes) and DDP layout that the predecessor of this incarnation left in its
    # black box.
    inherited_extras: dict[int, bytes] = field(default_factory=dict)
    inherited_layout: bytes | None = None

    job_id: str = ""
    generation: int = 0
    version: int | None = None  # None: no TrainState has been restored in this process
    in_recoverable: bool = False
    plan: Plan | None = None  # None on the first, undisturbed entry
    # TrainStates of the present entry, by name
    states: dict[str, Any] = field(default_factory=dict)
    # those of the last entry; emptied by restore()
    parked: dict[str, Any] = field(default_factory=dict)
    torn: bool = False  # what is parked is no whole copy of `version`
    held: bool = False  # in the vote before optimizer.step(), or between that and commit()
    is_voting: bool = False  # in that vote
    pending: str | None = None  # reason of an interrupt that has not been raised yet
    on_commit: Callable[[], None] | None = None  # set by the runtime: first commit after a resume
    # ... called out, at the end of a step: whether another one is wanted
    on_boundary: Callable[[], bool] | None = None
    # ... whether the vote has passed for somebody
    on_broken_vote: Callable[[RuntimeError], bool] | None = None
    checkpoint: Checkpoint | None = None  # what the state was read from at the last fresh start
    # generation, and decisions in it so far: the same on all ranks, as all take part in each
    councils: tuple[int, int] = (-1, 0)
    periodic: Periodic | None = None  # writes checkpoints in this entry
    arenas: Arenas | None = None  # memory for snapshots that outlives this process
    snapshots: Snapshots | None = None  # makes them in this entry
    found: Found | None = None  # that from which this entry goes on
    shard: str = ""  # which part of the state this rank has; "": all of it
    # set by the runtime: an event of this kind to the agent
    tell: Callable[..., None] = lambda _kind, **_fields: None
    restored_at: float | None = None  # monotonic time at which restore() of this entry was done
    restored_from: str = ""  # what it said
    random_at_restore: Any = None  # the state of torch's global generator then
    # takes marks while the default domain is profiled; set by the profiler's thread
    profile: Profile | None = None
    # communication is profiled: the pulse writes gloo's calls to the black box
    wants_calls: bool = False
    profiling_mb: int = 5000  # limit of the whole profiling folder

    @classmethod
    def of(cls, bootstrap: dict[str, Any]) -> Life:
        """As the agent describes it, without any memory that outlives it."""
        return cls(
            bootstrap["rank"],
            bootstrap["world_size"],
            bootstrap["incarnation"],
            job_id=bootstrap["job_id"],
            generation=bootstrap["generation"],
        )

    @property
    def is_reentry(self) -> bool:
        """True while the function runs as part of a recovery, survivors and replacements alike."""
        return self.plan is not None

    @property
    def is_half_way(self) -> bool:
        """Whether a TrainState is between its optimizer's step and its commit.

        Then there is no whole state to save.
        """
        return any(holding.began for holding in self.states.values())

    def inherit(self, previous: BlackBox) -> None:
        """Take over what the predecessor left, into our own box too.

        Our successor may need it before we commit. Closes `previous`.
        """
        assert self.box is not None
        self.inherited_extras = previous.read_extras()
        self.inherited_layout = previous.read_layout()
        previous.close()
        for version, payload in sorted(self.inherited_extras.items())[-2:]:
            self.box.write_extras(version, payload)
        if self.inherited_layout is not None:
            self.box.write_layout(self.inherited_layout)

    def snapshot_versions(self) -> tuple[int, ...]:
        """Those of this rank's state that are whole in node memory."""
        return () if self.arenas is None else self.arenas.versions()

    def mark(self, phase: Phase) -> None:
        """The main thread begins something else.

        Note it in the black box, and in the profile if there is one.
        """
        if self.box is not None:
            self.box.mark_phase(phase)
        profile = self.profile  # once: another thread takes it away
        if profile is not None:
            profile.mark(phase, time.monotonic_ns())

    def hold(self) -> None:
        """The optimizer begins to write.

        From here to `release_hold` an interrupt would tear the state.
        """
        self.held = True

    def release_hold(self) -> None:
        """A commit is complete.

        Raises the interrupt that was held back, if any, unless another step is wanted first.
        """
        if self.on_commit is not None:
            # still held: it takes a lock, which an Interrupted raised in the middle could leave
            # taken
            self.on_commit()
        if self.pending is not None and self.on_boundary is not None and self.on_boundary():
            self.held = False
            return
        self.drop_hold()

    def drop_hold(self) -> None:
        """Nothing is half-way. Raises the interrupt that was held back, if any."""
        self.held = False
        if self.pending is not None:
            reason, self.pending = self.pending, None
            raise Interrupted(reason)


_current: Life | None = None


def current() -> Life | None:
    """The life of this process, or None outside a taskd job."""
    return _current


def set_current(life: Life | None) -> None:
    """Called by the runtime at its start, and in forked children (data loaders), which are no workers."""
    global _current  # noqa: PLW0603
    _current = life
