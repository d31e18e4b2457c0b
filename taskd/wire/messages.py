"""One frozen dataclass per message type, and the registry of their codes. docs/protocol.md says who sends each when.

Fields carry the names of the core event or command that the message stands for; `now` is not sent
(clocks of two hosts do not agree) and `cause` is in the envelope. Codes are never used again for
something else. A field may be added with a default; anything else is a new type, or a new protocol
version.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, TypeVar

from taskd.core.commands import Move
from taskd.core.events import WorkerReport
from taskd.core.faults import Fault
from taskd.core.marks import Mark


@dataclass(frozen=True, slots=True)
class Message:
    """Base of all messages.

    `is_order`: the manager says it, and its numbers are not claims (`schema.MAX_CLAIM`).
    """

    code: ClassVar[int]
    is_order: ClassVar[bool] = False


MESSAGE_BY_CODE: dict[int, type[Message]] = {}

M = TypeVar("M", bound=Message)


def _message(code: int) -> Callable[[type[M]], type[M]]:
    """Enter the class into the registry."""

    def register(cls: type[M]) -> type[M]:
        cls.code = code
        MESSAGE_BY_CODE[code] = cls
        return cls

    return register


# ---------------------------------------------------------------- the link itself: 1 to 19


@_message(1)
@dataclass(frozen=True, slots=True)
class AgentRegistered(Message):
    """An agent introduces itself, or comes back."""

    node_rank: int
    agent_incarnation: str
    node_count: int
    world_size: int
    max_restarts: int
    generation: int
    restarts_used: int
    workers: tuple[WorkerReport, ...]


@_message(2)
@dataclass(frozen=True, slots=True)
class Accepted(Message):
    """The answer to a registration."""

    is_order: ClassVar[bool] = True

    generation: int
    restarts_used: int
    manager_incarnation: str


@_message(3)
@dataclass(frozen=True, slots=True)
class Refused(Message):
    """The other answer to a registration."""

    reason: str


@_message(4)
@dataclass(frozen=True, slots=True)
class Heartbeat(Message):
    """A sign of life, and how far each worker has come."""

    marks: tuple[Mark, ...] = ()


@_message(5)
@dataclass(frozen=True, slots=True)
class HeartbeatAck(Message):
    """The answer to a heartbeat. `known` False: this manager has no registration of yours."""

    is_order: ClassVar[bool] = True

    manager_incarnation: str
    known: bool
    generation: int


@_message(6)
@dataclass(frozen=True, slots=True)
class AgentLeft(Message):
    """An agent says goodbye."""

    node_rank: int
    outcome: str
    detail: str


@_message(7)
@dataclass(frozen=True, slots=True)
class RegisterWorker(Message):
    """A training process without one of our agents introduces itself (`init_taskd_worker`)."""

    rank: int
    pid: int
    framework: str


@_message(8)
@dataclass(frozen=True, slots=True)
class Unsupported(Message):
    """The answer to a message type that the receiver does not know."""

    type: int


@_message(9)
@dataclass(frozen=True, slots=True)
class Rejected(Message):
    """The answer to a message of an agent that is known, which breaks a rule.

    It was not taken in, and he was heard.
    """

    type: int
    sequence: int
    reason: str


# ---------------------------------------------------------------- what happened to a worker: 20 to
# 49


@dataclass(frozen=True, slots=True)
class WorkerMessage(Message):
    """Base of what concerns one life of one worker."""

    rank: int
    incarnation: int


@_message(20)
@dataclass(frozen=True, slots=True)
class WorkerStarted(WorkerMessage):
    """There is a process."""

    pid: int


@_message(21)
@dataclass(frozen=True, slots=True)
class WorkerDeclared(WorkerMessage):
    """Its script uses `recoverable`, or has come to its function."""

    entered: bool = False


@_message(22)
@dataclass(frozen=True, slots=True)
class WorkerLost(WorkerMessage):
    """It is dead or as good as dead."""

    fault: Fault
    age_s: float
    box_versions: tuple[int, ...] = ()
    snapshots: tuple[int, ...] = ()


@_message(23)
@dataclass(frozen=True, slots=True)
class WorkerExitKnown(WorkerMessage):
    """How a worker that was reported as lost ended."""

    fault: Fault


@_message(24)
@dataclass(frozen=True, slots=True)
class WorkerPaused(WorkerMessage):
    """It waits outside its function."""

    generation: int
    version: int | None
    clean: bool
    reason: str = ""
    snapshots: tuple[int, ...] = ()


@_message(25)
@dataclass(frozen=True, slots=True)
class WorkerRaised(WorkerMessage):
    """An exception left its function."""

    generation: int
    fault: Fault
    clean: bool
    age_s: float = 0.0
    snapshots: tuple[int, ...] = ()
    may_advance: bool = False


@_message(26)
@dataclass(frozen=True, slots=True)
class WorkerRecovered(WorkerMessage):
    """First commit after a resume."""

    generation: int
    version: int
    groups_s: float
    state_s: float
    first_step_s: float
    source: str = ""


@_message(27)
@dataclass(frozen=True, slots=True)
class WorkerReturned(WorkerMessage):
    """Its function returned."""

    generation: int
    version: int | None


@_message(28)
@dataclass(frozen=True, slots=True)
class WorkerFinished(WorkerMessage):
    """Its process ended as it should."""


@_message(29)
@dataclass(frozen=True, slots=True)
class WorkerReady(WorkerMessage):
    """Its runtime listens."""

    guarded: bool


@_message(30)
@dataclass(frozen=True, slots=True)
class WorkerUncaught(WorkerMessage):
    """Its script ends by this exception."""

    fault: Fault


@_message(31)
@dataclass(frozen=True, slots=True)
class WorkerExamined(WorkerMessage):
    """The stacks of a rank that hangs."""

    traceback: str


@_message(32)
@dataclass(frozen=True, slots=True)
class WorkerDumped(WorkerMessage):
    """A writer of the last checkpoint is a stage further."""

    generation: int
    stage: str
    detail: str = ""


@_message(33)
@dataclass(frozen=True, slots=True)
class AgentDraining(Message):
    """This node is to end."""

    node_rank: int
    detail: str
    grace_s: float


@_message(34)
@dataclass(frozen=True, slots=True)
class WorkerHolds(WorkerMessage):
    """Which part of the state it has."""

    shard: str


@_message(35)
@dataclass(frozen=True, slots=True)
class WorkerMayAdvance(WorkerMessage):
    """It could commit one step more."""

    generation: int
    version: int
    snapshots: tuple[int, ...] = ()


@_message(45)
@dataclass(frozen=True, slots=True)
class WorkerMirrors(WorkerMessage):
    """Its snapshots are to be mirrored."""


@_message(46)
@dataclass(frozen=True, slots=True)
class AgentMirrors(Message):
    """A node wants mirrors, and takes those of others at this address."""

    node_rank: int
    host: str
    address: str


@_message(47)
@dataclass(frozen=True, slots=True)
class MirrorsHeld(Message):
    """Which snapshots of other nodes' ranks are whole here."""

    node_rank: int
    held: tuple[tuple[int, tuple[int, ...]], ...]


@_message(40)
@dataclass(frozen=True, slots=True)
class WorkerProfiling(WorkerMessage):
    """Which domains it profiles."""

    status: int


# ---------------------------------------------------------------- what to do: 50 to 79


@dataclass(frozen=True, slots=True)
class CommandMessage(Message):
    """Base of commands. The generation is the command's; the envelope's is the sender's."""

    is_order: ClassVar[bool] = True

    generation: int


@_message(50)
@dataclass(frozen=True, slots=True)
class Interrupt(CommandMessage):
    """Leave the step; whoever is behind the version `reach` finishes it first if it can."""

    reason: str
    reach: int | None = None
    finish_step: bool = False


@_message(51)
@dataclass(frozen=True, slots=True)
class ReplaceWorker(CommandMessage):
    """Start this incarnation; it waits at the gate."""

    node_rank: int
    rank: int
    incarnation: int
    restarts_used: int


@_message(52)
@dataclass(frozen=True, slots=True)
class KillWorker(CommandMessage):
    """Kill this incarnation."""

    node_rank: int
    rank: int
    incarnation: int
    reason: str
    examine: bool = False


@_message(53)
@dataclass(frozen=True, slots=True)
class Resume(CommandMessage):
    """Enter the function again."""

    version: int | None
    moves: tuple[Move, ...]
    restarts_used: int


@_message(54)
@dataclass(frozen=True, slots=True)
class RestartGroup(CommandMessage):
    """Kill all workers and start them anew."""

    restarts_used: int
    reason: str
    incarnations: tuple[tuple[int, int], ...]


@_message(55)
@dataclass(frozen=True, slots=True)
class Release(CommandMessage):
    """Every function has returned."""


@_message(56)
@dataclass(frozen=True, slots=True)
class GiveUp(CommandMessage):
    """End the job as failed."""

    reason: str
    culprit: int | None
    fault: Fault | None = None
    dump: str = ""


@_message(57)
@dataclass(frozen=True, slots=True)
class Dump(CommandMessage):
    """The job ends: write the state to disk."""

    version: int
    writers: tuple[int, ...]
    world_size: int
    reason: str
    attempt: str
    legacies: tuple[tuple[int, str], ...] = ()
    orphaned: tuple[tuple[int, int], ...] = ()
    arenas: tuple[tuple[int, str], ...] = ()


@_message(58)
@dataclass(frozen=True, slots=True)
class Publish(CommandMessage):
    """All parts of the dump are on disk: give it its name."""

    node_rank: int
    rank: int
    incarnation: int
    withdraw: bool = False


@_message(59)
@dataclass(frozen=True, slots=True)
class Advance(CommandMessage):
    """Commit up to `version`, then leave."""

    version: int
    ranks: tuple[int, ...]


@_message(65)
@dataclass(frozen=True, slots=True)
class Pair(CommandMessage):
    """Who keeps whose mirrors."""

    node_rank: int
    buddy: int
    address: str
    incarnation: str
    sources: tuple[tuple[int, str], ...]


@_message(60)
@dataclass(frozen=True, slots=True)
class SetProfiling(CommandMessage):
    """Which domains are to be profiled."""

    wanted: int
