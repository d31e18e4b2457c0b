"""Outputs of the two machines: what to do, imperative.

Each repeats the cause it answers and its generation.
"""

from dataclasses import dataclass, field

from taskd.core.faults import Fault
from taskd.core.votes import Roster


@dataclass(frozen=True, slots=True)
class Command:
    """Base of all commands."""

    cause: str
    generation: int


# ---------------------------------------------------------------- manager to agents, and workers


@dataclass(frozen=True, slots=True)
class Interrupt(Command):
    """To every agent and worker: leave the step, abort collectives, report `WorkerPaused`.

    `reach`: the newest version that anybody committed, the dead included. Whoever is behind it has
    all gradients on the way and finishes the step if it can, so that no committed step is lost with
    its only holder. `finish_step`: nothing is broken, everybody does so, and waits at its end for
    `Advance`.
    """

    reason: str
    reach: int | None = None
    finish_step: bool = False


@dataclass(frozen=True, slots=True)
class Advance(Command):
    """To the agents of `ranks`, and on to them: commit up to `version`, then leave.

    The answer to `WorkerMayAdvance`.
    """

    version: int
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ReplaceWorker(Command):
    """To the agent of `rank`: start `incarnation` of it from the forkserver.

    It waits at the gate for `Resume`. `former_agent`: incarnation of the agent that was lost in
    this place; if its node memory is there still, the rank takes over its own part. "": nobody's.
    """

    node_rank: int
    rank: int
    incarnation: int
    restarts_used: int
    former_agent: str = ""


@dataclass(frozen=True, slots=True)
class KillWorker(Command):
    """To the agent of `rank`: SIGKILL this incarnation (it did not come when called, or hangs).

    `examine`: take its stacks first.
    """

    node_rank: int
    rank: int
    incarnation: int
    reason: str
    examine: bool = False


@dataclass(frozen=True, slots=True)
class Move:
    """What one rank does to reach the cut. Not a command of its own.

    `source`: the rank to receive from, which keeps its own copy or loads its snapshot first.
    `snapshot`: the version to load from node memory. Neither: keep the live copy.
    """

    rank: int
    source: int | None = None
    snapshot: int | None = None


@dataclass(frozen=True, slots=True)
class Resume(Command):
    """To every agent and worker: enter the function again under store prefix taskd/<generation>.

    `version` None: nobody holds state, everybody starts afresh. A rank without a move keeps its
    copy: most do, so that the order is small however large the job is. `store`:
    host:port where the ranks meet; "": where they met before. `active`: the ranks of which the
    world consists, in order; (): all of the job. Everywhere in here ranks are those of the job.
    """

    version: int | None
    moves: tuple[Move, ...]
    restarts_used: int
    store: str = ""
    active: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class RestartGroup(Command):
    """To every agent: kill all workers and start them anew (warm); nothing could be kept in place.

    `incarnations`: (rank, incarnation) for every rank of the job. `store`: host:port where they
    meet; "": at a new store of node 0. `delay_s`: no rank starts for so many seconds, as the starts
    before came to nothing.
    """

    restarts_used: int
    reason: str
    incarnations: tuple[tuple[int, int], ...]
    store: str = ""
    delay_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Release(Command):
    """To every agent and worker: every rank's function has returned; let `recoverable` return."""


@dataclass(frozen=True, slots=True)
class Dump(Command):
    """To every agent and worker: the job ends, and `writers` save their part of `version` first.

    They report `WorkerDumped`. `world_size`: of the job. `reason`: why it ends. `attempt`: never
    used before for a dump of this job. `legacies`: (rank, path of its black box) of those that are
    gone, put in by the agent of their node for a writer that saves what they alone had. `orphaned`:
    (rank, writer who sees to it) of dead ones whose part of the state is left in node memory only.
    `arenas`: (rank, path of its memory), put in likewise, of all that are gone.
    """

    version: int
    writers: tuple[int, ...]
    world_size: int
    reason: str
    attempt: str
    legacies: tuple[tuple[int, str], ...] = ()
    orphaned: tuple[tuple[int, int], ...] = ()
    arenas: tuple[tuple[int, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Publish(Command):
    """To the agent of `rank`, and on to it: every part of the dump of this generation is on disk.

    Give it its name. `withdraw`: remove it.
    """

    node_rank: int
    rank: int
    incarnation: int
    withdraw: bool = False


@dataclass(frozen=True, slots=True)
class Pair(Command):
    """To the agent of `node_rank`: mirror the snapshots of its ranks on the node `buddy`.

    That node takes them at `address`. No part of any recovery. `incarnation`: of the buddy's agent.
    `sources`: (node, incarnation of its agent) of those whose snapshots it is to keep itself.
    """

    node_rank: int
    buddy: int
    address: str
    incarnation: str
    sources: tuple[tuple[int, str], ...]


@dataclass(frozen=True, slots=True)
class ReturnMirrors(Command):
    """To the agent of `node_rank`: give back, or fetch, snapshots of ranks of the node `owner`.

    The agent of `holder` keeps mirrors of them and is asked at `address`; that of `owner` asks, and
    says `MirrorsReturned`. `incarnation`: of the owner's agent; `holder_incarnation`: the other.
    """

    node_rank: int
    owner: int
    incarnation: str
    holder: int
    address: str
    holder_incarnation: str
    version: int
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class OfferPlace(Command):
    """To a spare: the node `node_rank` is lost, its place is yours. No part of any recovery.

    `store`: as in `Resume`.
    """

    node_rank: int
    store: str = ""


@dataclass(frozen=True, slots=True)
class Preload(Command):
    """To a spare: import what the workers do, see `ImportsKnown`. No part of any recovery."""

    modules: tuple[str, ...]
    variables: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Proceed(Command):
    """To a torchrun that asked: meet the others as usual. No part of any recovery."""


@dataclass(frozen=True, slots=True)
class Dismiss(Command):
    """To a spare, which may end: the job is over. No part of any recovery."""

    succeeded: bool
    reason: str


@dataclass(frozen=True, slots=True)
class KeepRoster(Command):
    """To every agent: who votes if this manager is missing. No part of any recovery."""

    roster: Roster


@dataclass(frozen=True, slots=True)
class SetProfiling(Command):
    """To every agent and worker: profile the domains of this code. No part of any recovery."""

    wanted: int


@dataclass(frozen=True, slots=True)
class GiveUp(Command):
    """To every agent: end the job as failed.

    The culprit raises its own exception, the others are stopped.

    `dump`: the path of the checkpoint that was left behind, or "".
    """

    reason: str
    culprit: int | None
    fault: Fault | None = None
    dump: str = ""


# ---------------------------------------------------------------- manager, for its own shell


@dataclass(frozen=True, slots=True)
class RecoveryRecord:
    """The story of one recovery, for the log line and the JSON record.

    Durations in seconds, see docs/operations.md.
    """

    generation: int
    # "retry", "recover-in-place", "recover", "elastic-training" or "restart"; "dump" or "exit" if
    # the job ended by it
    strategy: str
    faults: tuple[Fault, ...]
    followers: int  # others whose communication broke as a consequence
    version: int | None
    sources: tuple[tuple[int, str], ...]  # (rank, "kept" or "rank N" or "snapshot" or "nothing")
    steps_redone: int
    detect_s: float
    decide_s: float
    quiesce_s: float
    respawn_s: float
    groups_s: float
    state_s: float
    first_step_s: float
    total_s: float
    restarts_used: int
    max_restarts: int
    # These explain the decision and are none themselves: in a story that an earlier version has
    # written they may be others.
    reason: str = field(default="", compare=False)  # why that strategy
    not_completed: str = ""  # what came before the last rank's first new commit; "": nothing did
    # (cheaper strategy, why not that one), from cheap to dear
    skipped: tuple[tuple[str, str], ...] = field(default=(), compare=False)
    code: int = field(default=0, compare=False)  # `taskd.core.policy.ladder.Outcome`


@dataclass(frozen=True, slots=True)
class RecordRecovery(Command):
    """Write the line and the JSON record."""

    record: RecoveryRecord


@dataclass(frozen=True, slots=True)
class RepeatOrder(Command):
    """Say `order`, the last one to all, to the agent of `node_rank` alone: it may lack it."""

    node_rank: int
    order: Command


@dataclass(frozen=True, slots=True)
class ReportStraggler(Command):
    """Say that a rank is slow. Nothing else is done about it.

    Seconds per step, its own and the median of the others.
    """

    rank: int
    phase: str
    own_s: float
    others_s: float


@dataclass(frozen=True, slots=True)
class ReportNoProgress(Command):
    """Say that recoveries lead nowhere: what keeps happening, and when the job ends by it."""

    text: str


@dataclass(frozen=True, slots=True)
class ReportWorld(Command):
    """Say that the job goes on with fewer nodes, or with more again. `is_smaller`: which."""

    text: str
    is_smaller: bool


@dataclass(frozen=True, slots=True)
class ReportNoBuddy(Command):
    """Say that snapshots cannot be mirrored: all nodes are on this host."""

    host: str


@dataclass(frozen=True, slots=True)
class ReportNotJoined(Command):
    """Say which nodes have not registered, although others have, and what follows from that."""

    text: str


@dataclass(frozen=True, slots=True)
class EndJob(Command):
    """The job is over: the manager leaves with success or failure.

    `left_alone`: or agents have gone on without it, and it leaves because there is nothing that it
    could decide any more.
    """

    succeeded: bool
    reason: str
    left_alone: bool = False


# ---------------------------------------------------------------- agent, for its own shell


@dataclass(frozen=True, slots=True)
class OpenStore(Command):
    """All start anew in this generation: their store is needed (node 0 hosts it)."""


@dataclass(frozen=True, slots=True)
class SpawnWorker(Command):
    """Start a process for this incarnation.

    `gated`: it takes part in a recovery and waits for `Resume`. `former_agent`: as in
    `ReplaceWorker`. `start`: all start anew in this generation, and this rank has not since; it
    meets the others at the store of that start, and nothing that its predecessor left is of use.
    None: it replaces a process.
    """

    rank: int
    incarnation: int
    gated: bool
    restarts_used: int
    after_reaped: bool = False
    former_agent: str = ""
    start: int | None = None


@dataclass(frozen=True, slots=True)
class SignalWorker(Command):
    """Send a signal to the process group of this incarnation."""

    rank: int
    incarnation: int
    signal_number: int


@dataclass(frozen=True, slots=True)
class Drain(Command):
    """This node is to end, as if SIGTERM had come to the agent. `detail`: what has come."""

    detail: str


@dataclass(frozen=True, slots=True)
class ExamineWorker(Command):
    """Let this incarnation write down its stacks; `WorkerExamined` follows if it does."""

    rank: int
    incarnation: int


@dataclass(frozen=True, slots=True)
class TellWorker(Command):
    """Pass a command (Interrupt, Resume, Release, GiveUp) to one worker."""

    rank: int
    incarnation: int
    command: Command


@dataclass(frozen=True, slots=True)
class TellManager(Command):
    """Report an event to the manager."""

    event: object = field(default=None)


@dataclass(frozen=True, slots=True)
class FinishRun(Command):
    """The agent loop ends.

    `outcome`: "succeeded", "failed" or "dumped"; `faults` become torchrun's failures.
    """

    outcome: str
    reason: str
    faults: tuple[Fault, ...] = ()


@dataclass(frozen=True, slots=True)
class FallBack(Command):
    """No manager: from here on behave like plain torchrun (restart the group on failure, warm)."""

    reason: str
