"""One rank in its current life, as the manager knows it.

Owns how what a rank reports changes that. Says nothing about the other ranks.
"""

from dataclasses import dataclass

from taskd.core.faults import Fault, FaultKind
from taskd.core.policy.cut import Copy
from taskd.core.worker_state import WorkerState

_LOST, _FINISHED = WorkerState.LOST, WorkerState.FINISHED  # asked for of each rank, in each fault


@dataclass(slots=True)
class Member:
    """One rank in its current life."""

    rank: int
    node_rank: int
    incarnation: int
    state: WorkerState
    born_at: float
    declared: bool = False
    declared_before: bool = False  # in an earlier life, since all were started
    entered: bool = False  # has come to its recoverable function
    replaced: bool = False  # this life began in a recovery and has not resumed yet
    version: int | None = None
    clean: bool = True
    box_versions: tuple[int, ...] = ()  # of the life before
    shard: str = ""  # what part of the state it has, or had in the life before
    snapshots: tuple[int, ...] = ()  # versions of that part in the memory of its node
    is_kill_ordered: bool = False  # by us, and what it leaves was not told yet
    may_advance: bool = False  # it waits within its function, and could commit one step more

    @property
    def is_live(self) -> bool:
        """Whether there is, or is about to be, a process."""
        return self.state is not _LOST and self.state is not _FINISHED

    @property
    def has_declared(self) -> bool:
        """Whether its script is known to use `taskd.recoverable`."""
        return self.declared or self.declared_before

    @property
    def is_done(self) -> bool:
        """Whether it has nothing more to train."""
        return self.state in (WorkerState.RETURNED, WorkerState.FINISHED)

    @property
    def has_stopped(self) -> bool:
        """Whether it cannot go on before all others are known."""
        return self.state in (WorkerState.LOST, WorkerState.PAUSED, WorkerState.RETURNED)

    @property
    def alive(self) -> bool:
        """Whether what it holds is in a process, see `taskd.core.policy.cut.Holder`."""
        return self.state is not _LOST

    @property
    def node(self) -> int:
        """The node whose memory has its snapshots, for the same."""
        return self.node_rank

    def enter(self) -> None:
        """It has come to its recoverable function."""
        self.declared = self.entered = True

    def pause(
        self, version: int | None, clean: bool, snapshots: tuple[int, ...],
        *, may_advance: bool = False,
    ) -> None:  # fmt: skip
        """It waits at the gate; with `may_advance` in its function, for word how far to go."""
        self.state, self.may_advance = WorkerState.PAUSED, may_advance
        self.version, self.clean, self.snapshots = version, clean, snapshots

    def proceed(self) -> None:
        """It is on its way again within its function."""
        self.state, self.may_advance = WorkerState.RUNNING, False

    def resume(self) -> None:
        """It goes on with all others: what it said when it stopped counts no more."""
        self.state, self.may_advance = WorkerState.RUNNING, False
        self.replaced, self.clean, self.box_versions, self.snapshots = False, True, (), ()

    def lose(
        self, box_versions: tuple[int, ...] = (), snapshots: tuple[int, ...] | None = None
    ) -> None:
        """Its process is gone or as good as gone. `snapshots` None: nobody has looked since."""
        self.state, self.may_advance = WorkerState.LOST, False
        if snapshots is not None:
            self.snapshots = snapshots
        if box_versions or not self.replaced:
            self.box_versions = box_versions

    def begin_life(self, incarnation: int, now: float, *, replaced: bool) -> None:
        """A new process takes the place of the old one."""
        self.incarnation, self.state, self.born_at = incarnation, WorkerState.STARTING, now
        self.declared_before = replaced and self.has_declared
        self.declared = self.entered = self.may_advance = self.is_kill_ordered = False
        self.replaced, self.version, self.clean = replaced, None, True
        if not replaced:
            self.box_versions, self.shard, self.snapshots = (), "", ()

    def fault(self, kind: FaultKind, detail: str = "") -> Fault:
        """A fault of its current life, as the manager sees it."""
        version = self.version
        return Fault(kind, self.rank, self.incarnation, detail, version=version, signature=detail)

    def copy(self) -> Copy:
        """What it holds, for `plan_cut`."""
        return Copy(
            self.rank, self.version, self.clean, self.replaced, self.box_versions, self.shard,
            self.snapshots, self.may_advance, self.node_rank, self.alive,
        )  # fmt: skip
