"""The types of messages and their codes. docs/protocol.md says who sends each of them when.

A record of core (an event or a command) that travels has its code in a table here; its message is
a class of the same name that is derived from it, with the same fields and defaults except those
that are not sent: `now` (clocks of two hosts do not agree) and `cause` (it is in the envelope). To
add a field, add it to the record, with a default. Only messages that stand for no record are
written out here: those of the link itself.

Codes are never used again for something else. Any other change than a new field with a default is a
new type, or a new protocol version.
"""

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields, make_dataclass
from typing import ClassVar, TypeVar, get_type_hints

from taskd.core import commands, events, votes
from taskd.core.marks import Mark

EVENT_BY_CODE: Mapping[int, type[events.Event]] = {
    1: events.AgentRegistered,
    6: events.AgentLeft,
    10: events.SpareRegistered,
    11: events.SpareLeft,
    12: events.RosterKept,
    13: events.ImportsKnown,
    20: events.WorkerStarted,
    21: events.WorkerDeclared,
    22: events.WorkerLost,
    23: events.WorkerExitKnown,
    24: events.WorkerPaused,
    25: events.WorkerRaised,
    26: events.WorkerRecovered,
    27: events.WorkerReturned,
    28: events.WorkerFinished,
    29: events.WorkerReady,
    30: events.WorkerUncaught,
    31: events.WorkerExamined,
    32: events.WorkerDumped,
    33: events.AgentDraining,
    34: events.WorkerHolds,
    35: events.WorkerMayAdvance,
    36: events.WorkerDraining,
    40: events.WorkerProfiling,
    45: events.WorkerMirrors,
    46: events.AgentMirrors,
    47: events.MirrorsHeld,
    48: events.MirrorsReturned,
}
COMMAND_BY_CODE: Mapping[int, type[commands.Command]] = {
    50: commands.Interrupt,
    51: commands.ReplaceWorker,
    52: commands.KillWorker,
    53: commands.Resume,
    54: commands.RestartGroup,
    55: commands.Release,
    56: commands.GiveUp,
    57: commands.Dump,
    58: commands.Publish,
    59: commands.Advance,
    60: commands.SetProfiling,
    65: commands.Pair,
    66: commands.OfferPlace,
    67: commands.Dismiss,
    68: commands.Proceed,
    69: commands.KeepRoster,
    61: commands.Preload,
    62: commands.ReturnMirrors,
}
_NOT_SENT = frozenset({"now", "cause"})


@dataclass(frozen=True, slots=True)
class Message:
    """Base of all messages.

    `is_order`: the manager says it, and its numbers are not claims (`schema.MAX_CLAIM`). The
    generation of a command is the command's own; that of the envelope is the sender's.
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


def _message_of(record: type) -> type[Message]:
    """The class of messages that carry this record."""
    hints = get_type_hints(record)
    return make_dataclass(
        record.__name__,
        [
            (item.name, hints[item.name])
            if item.default is MISSING
            else (item.name, hints[item.name], field(default=item.default))
            for item in fields(record)
            if item.name not in _NOT_SENT
        ],
        bases=(Message,),
        namespace={
            "__doc__": record.__doc__,
            "__module__": __name__,
            "is_order": issubclass(record, commands.Command),
        },
        frozen=True,
        slots=True,
    )


MESSAGE_BY_RECORD: Mapping[type, type[Message]] = {
    record: _message(code)(_message_of(record))
    for code, record in (*EVENT_BY_CODE.items(), *COMMAND_BY_CODE.items())
}
globals().update({cls.__name__: cls for cls in MESSAGE_BY_RECORD.values()})


@_message(2)
@dataclass(frozen=True, slots=True)
class Accepted(Message):
    """The answer to a registration."""

    is_order: ClassVar[bool] = True

    generation: int
    restarts_used: int
    manager_incarnation: str
    term: int = 0


@_message(3)
@dataclass(frozen=True, slots=True)
class Refused(Message):
    """The other answer to a registration. `is_taken`: another agent has the place."""

    reason: str
    is_taken: bool = False


@_message(14)
@dataclass(frozen=True, slots=True)
class Postponed(Message):
    """Another answer to a registration: not yet. The agent asks again, as if nobody answered."""

    reason: str


@_message(4)
@dataclass(frozen=True, slots=True)
class Heartbeat(Message):
    """A sign of life, and how far each worker has come."""

    marks: tuple[Mark, ...] = ()


@_message(5)
@dataclass(frozen=True, slots=True)
class HeartbeatAck(Message):
    """The answer to a heartbeat. `known` False: this manager has no registration of the sender."""

    is_order: ClassVar[bool] = True

    manager_incarnation: str
    known: bool
    generation: int


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
    """The answer to a message that breaks a rule, for an agent that is registered.

    The message changed nothing, but counted as a sign of life.
    """

    type: int
    sequence: int
    reason: str


@dataclass(frozen=True, slots=True)
class Told:
    """What some ranks of a node report alike, each in its life; see `taskd.wire.batch`."""

    travels_as_list: ClassVar[bool] = True

    type: int
    cause: str
    ranks: tuple[int, ...]
    incarnations: tuple[int, ...]
    body: bytes


@_message(37)
@dataclass(frozen=True, slots=True)
class Batch(Message):
    """Reports of the ranks of one agent, in the order in which each rank made them."""

    reports: tuple[Told, ...]


@_message(70)
@dataclass(frozen=True, slots=True)
class AskVote(votes.AskVote, Message):
    """From agent to agent; see the base."""


@_message(71)
@dataclass(frozen=True, slots=True)
class Vote(votes.Vote, Message):
    """The answer to `AskVote`; see the base."""


@_message(72)
@dataclass(frozen=True, slots=True)
class Elected(votes.Elected, Message):
    """From the agent that has started a manager to all voters and spares; see the base."""
