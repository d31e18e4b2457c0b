"""Inputs of the two machines: what happened, past tense, with the time at which we learned of it.

`now` is monotonic seconds of the process that runs the machine; `cause` is an id that travels with
everything it leads to. Events of a worker carry rank and incarnation, so that what an earlier life
said is recognised and ignored.
"""

from dataclasses import dataclass, field, replace

from taskd.core.faults import Fault
from taskd.core.marks import Mark
from taskd.core.votes import Roster
from taskd.core.worker_report import ReportedFailure as ReportedFailure  # noqa: PLC0414
from taskd.core.worker_report import WorkerReport as WorkerReport  # noqa: PLC0414
from taskd.core.worker_state import WorkerState


@dataclass(frozen=True, slots=True)
class Event:
    """Base of all events."""

    now: float
    cause: str


# ---------------------------------------------------------------- seen by the manager


@dataclass(frozen=True, slots=True)
class AgentRegistered(Event):
    """An agent introduced itself, for the first time or after it or the manager was cut off.

    `generation` and `restarts_used` are what the agent last heard: a fresh manager adopts the
    largest. `store`: host:port of a store at which the ranks can meet if the node of theirs is
    lost; "": it has none. `met_at`: the one that the newest order named; "": none has. `is_late`:
    it came when the job ran already, in the place of another one. `voter`: host:port at which it
    can be asked for its vote; "": it has none. `term`: of no older manager it takes orders.
    `first_host`: the node that has the store of the rendezvous, if it is one of the job's, and the
    ranks still meet where they met first. `active`: the ranks of which the world consists since the
    newest `Resume`; (): all of the job. `roster`: the newest that it knows, if it has a vote.
    `start`: generation of the newest start of all that it has heard of; None: it came later.
    """

    node_rank: int
    agent_incarnation: str
    node_count: int
    world_size: int
    max_restarts: int
    generation: int
    restarts_used: int
    workers: tuple[WorkerReport, ...]
    store: str = ""
    met_at: str = ""
    is_late: bool = False
    voter: str = ""
    term: int = 0
    first_host: int | None = None
    active: tuple[int, ...] = ()
    roster: Roster | None = None
    start: int | None = None

    @property
    def is_substitute(self) -> bool:
        """Whether it asks for the place of a node that is gone: it has no workers yet."""
        return all(report.state == WorkerState.LOST for report in self.workers)


@dataclass(frozen=True, slots=True)
class SpareRegistered(Event):
    """A torchrun without a place in the job waits for one, or asks whether it has to.

    `host`: the same for all torchruns of a machine. `name`: of that machine, for people. `asks`: it
    is no spare, and meets the others as usual if the job does not run yet. `node_rank`: its index
    then, if it has one. `listens`: where it can be told of another manager, or "". `term`,
    `roster`: as of an agent.
    """

    host: str
    name: str
    asks: bool = False
    node_rank: int | None = None
    listens: str = ""
    term: int = 0
    roster: Roster | None = None


@dataclass(frozen=True, slots=True)
class SpareLeft(Event):
    """A spare waits no more: it takes the place that it was offered, or it ends (`reason`)."""

    takes_place: bool
    reason: str = ""


@dataclass(frozen=True, slots=True)
class ManagerBeganAnew(Event):
    """The machine before this one failed: what it knew comes back with the registrations.

    Agents of `node_ranks` were there. One that does not come back within a lease is lost, as if it
    had been silent since.
    """

    node_ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ManagerElected(Event):
    """The agents elected this manager, as the one before it is missing.

    `ranks_per_node` ranks are on each node. Those nodes that did not agree (`voters` did) are lost
    if they do not register soon. `agents`: (node, incarnation of its agent), as the roster says.
    """

    node_count: int
    ranks_per_node: int
    voters: tuple[int, ...]
    agents: tuple[tuple[int, str], ...] = ()


@dataclass(frozen=True, slots=True)
class RosterKept(Event):
    """An agent knows this roster, and will vote by it."""

    node_rank: int
    number: int


@dataclass(frozen=True, slots=True)
class ImportsKnown(Event):
    """What the workers of this node have imported at their first step, in its order.

    Without the script's own modules. `variables`: names of those in the environment that differ
    between a worker and its torchrun, which no import for others may read.
    """

    node_rank: int
    modules: tuple[str, ...]
    variables: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class AgentLeft(Event):
    """An agent said goodbye.

    `outcome` is "succeeded", "failed", "dumped", "stopped" (SIGTERM, Ctrl-C), or "fallback": it
    goes on without us.
    """

    node_rank: int
    outcome: str
    detail: str


@dataclass(frozen=True, slots=True)
class AgentHeard(Event):
    """Anything arrived from the agent: its lease is renewed. A heartbeat brings its marks."""

    node_rank: int
    marks: tuple[Mark, ...] = ()


@dataclass(frozen=True, slots=True)
class WorkerEvent(Event):
    """Base of what concerns one life of one worker."""

    rank: int
    incarnation: int


@dataclass(frozen=True, slots=True)
class SharedReport(Event):
    """Ranks of one node report the same: as many events like `report`, of these lives in turn."""

    lives: tuple[tuple[int, int], ...]  # one of each rank
    report: WorkerEvent

    def of(self, rank: int, incarnation: int) -> WorkerEvent:
        """The report of one of them."""
        now, cause = self.now, self.cause
        return replace(self.report, now=now, cause=cause, rank=rank, incarnation=incarnation)


@dataclass(frozen=True, slots=True)
class WorkerStarted(WorkerEvent):
    """The agent has a process for this incarnation."""

    pid: int


@dataclass(frozen=True, slots=True)
class WorkerDeclared(WorkerEvent):
    """The worker's script uses `taskd.recoverable`: it can be recovered in place.

    `entered`: it has come to its function. Until then it may be busy with anything, and may end
    well without training.
    """

    entered: bool = False


@dataclass(frozen=True, slots=True)
class WorkerLost(WorkerEvent):
    """The worker is dead or as good as dead. `age_s`: how long ago, as the black box tells.

    `box_versions`: versions for which its black box holds the per-rank extras (RNG, sampler).
    `snapshots`: versions of its state that are whole in the memory of the node.
    """

    fault: Fault
    age_s: float
    box_versions: tuple[int, ...] = ()
    snapshots: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class WorkerExitKnown(WorkerEvent):
    """The kernel said how a worker died that was reported as lost already."""

    fault: Fault


@dataclass(frozen=True, slots=True)
class WorkerPaused(WorkerEvent):
    """The worker left its function (or never entered it) and waits for `Resume`.

    `version` None: it holds no state. `clean` False: its copy is inconsistent (between
    optimizer.step() and commit()). `snapshots`: versions of its state that are whole in the memory
    of the node.
    """

    generation: int
    version: int | None
    clean: bool
    reason: str = ""
    snapshots: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class WorkerMayAdvance(WorkerEvent):
    """It is interrupted, could commit one step more than `version`, and waits to be told.

    `Advance` tells it, or whatever ends its entry. Its vote before the optimizer step broke; or it
    finishes the step that it is in (`Interrupt.finish_step`), and waits after that.
    """

    generation: int
    version: int
    snapshots: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class WorkerRaised(WorkerEvent):
    """An exception left the recoverable function; the worker waits.

    It may be a victim (`FaultKind.COMMUNICATION`). `may_advance`: it is still in its function, in a
    vote that broke (`WorkerMayAdvance`); or it does not come back from something that others may
    wait for (`FaultKind.HANG`).
    """

    generation: int
    fault: Fault
    clean: bool
    age_s: float = 0.0
    snapshots: tuple[int, ...] = ()
    may_advance: bool = False


@dataclass(frozen=True, slots=True)
class WorkerRecovered(WorkerEvent):
    """First commit after a resume. Durations in seconds from the worker's receipt of `Resume`.

    After a restart of the group: first step of an optimizer, seconds from the start of the runtime.
    """

    generation: int
    version: int
    groups_s: float
    state_s: float
    first_step_s: float
    source: str = ""


@dataclass(frozen=True, slots=True)
class WorkerReturned(WorkerEvent):
    """The recoverable function returned; the worker waits for `Release`."""

    generation: int
    version: int | None


@dataclass(frozen=True, slots=True)
class WorkerReady(WorkerEvent):
    """Worker to agent only: the runtime listens. `guarded`: the death alarm can be armed."""

    guarded: bool


@dataclass(frozen=True, slots=True)
class WorkerUncaught(WorkerEvent):
    """Worker to agent only: the script ends by this exception, which describes its exit."""

    fault: Fault


@dataclass(frozen=True, slots=True)
class WorkerExamined(WorkerEvent):
    """The stacks of a rank that hangs, taken before it was killed.

    Python's of every thread, the main thread's native one.
    """

    traceback: str


@dataclass(frozen=True, slots=True)
class WorkerHolds(WorkerEvent):
    """Which part of the state it has, or is about to have: from its restore() on.

    Ranks with an equal `shard` hold equal content; "" is all of it.
    """

    shard: str


WRITTEN = "written"  # stages of a writer of an emergency checkpoint
PUBLISHED = "published"
WITHDRAWN = "withdrawn"
FAILED = "failed"


@dataclass(frozen=True, slots=True)
class WorkerDumped(WorkerEvent):
    """A writer of the emergency checkpoint of `generation` is a stage further.

    `detail`: the path of a published one; why it failed.
    """

    generation: int
    stage: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class AgentDraining(Event):
    """This node is to end in `grace_s` seconds (SIGTERM).

    The job is to be saved at the next step boundary. `detail`: who asked.
    """

    node_rank: int
    detail: str
    grace_s: float


@dataclass(frozen=True, slots=True)
class WorkerDraining(WorkerEvent):
    """Worker to agent only: it got SIGTERM, and goes on. Its node is to end."""


@dataclass(frozen=True, slots=True)
class AgentMirrors(Event):
    """A rank of this node wants mirrors of its snapshots.

    `host`: equal for nodes that fail together, which are never each other's buddy. `address`: where
    this agent takes snapshots of others.
    """

    node_rank: int
    host: str
    address: str


@dataclass(frozen=True, slots=True)
class MirrorsHeld(Event):
    """What this node has of the snapshots of another one: (rank, versions that are whole).

    From now to the next `Resume` it keeps these.
    """

    node_rank: int
    held: tuple[tuple[int, tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True)
class MirrorsReturned(Event):
    """The answer to `ReturnMirrors`: this node has these snapshots again, or not all of them.

    `reason`: why not; "": it has. `ranks`: that have the snapshot of `version`.
    """

    node_rank: int
    generation: int
    holder: int
    version: int
    ranks: tuple[int, ...]
    reason: str = ""


@dataclass(frozen=True, slots=True)
class WorkerMirrors(WorkerEvent):
    """Worker to agent only: its snapshots are to be mirrored in the memory of another node."""


@dataclass(frozen=True, slots=True)
class WorkerProfiling(WorkerEvent):
    """Which domains are profiled, in answer to `SetProfiling` or later. No part of any recovery."""

    status: int


@dataclass(frozen=True, slots=True)
class WorkerFinished(WorkerEvent):
    """The process ended with exit code 0, as it should."""


@dataclass(frozen=True, slots=True)
class OrderDropped(Event):
    """An order fits into no message, so that nobody obeys it. `reason`: which, and its size."""

    reason: str


@dataclass(frozen=True, slots=True)
class Tick(Event):
    """A deadline passed."""


# ---------------------------------------------------------------- seen by the agent only


@dataclass(frozen=True, slots=True)
class AlarmRang(WorkerEvent):
    """The robust futex of the worker lost its owner: it is dying. `died_at`: on our own clock."""

    died_at: float
    version: int | None
    phase: str
    box_versions: tuple[int, ...] = ()
    snapshots: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class WorkerExited(WorkerEvent):
    """The process is reaped. `status`: exit code, or minus the signal number."""

    status: int
    version: int | None
    phase: str
    box_versions: tuple[int, ...] = ()
    # the exception that ended the script, a crash, the kernel's reason: if there is word of it
    last_words: Fault | None = None
    snapshots: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class WorkerStartFailed(WorkerEvent):
    """The process could not be started."""

    detail: str
    snapshots: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ManagerJoined(Event):
    """The manager accepted our registration. `term`: in which it was elected; 0: it was not."""

    generation: int
    restarts_used: int
    term: int = 0


@dataclass(frozen=True, slots=True)
class ManagerLost(Event):
    """The manager has been silent for too long. `grace_s`: until the next one can be there."""

    grace_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ManagerHostHeard(Event):
    """Whether the host of a silent manager answers, be it that nobody listens there."""

    answers: bool


@dataclass(frozen=True, slots=True)
class ManagerRefused(Event):
    """The manager does not want us; `reason` says why. `is_taken`: another agent has the place."""

    reason: str
    is_taken: bool = False


@dataclass(frozen=True, slots=True)
class CommandReceived(Event):
    """A command of the manager (`taskd.core.commands`) arrived."""

    command: object = field(default=None)
