"""Messages to core events and core commands to messages, and back. Keeps the core free of the wire.

A message has the name and the fields of the event or command it stands for, so translation is by
name. Which ones travel is said here, once. `now` is the receiver's: an event happened when its
message was read (durations say the rest).
"""

from dataclasses import fields
from typing import Any

from taskd.core import commands, events
from taskd.errors import LocalProtocolError, RemoteProtocolError
from taskd.wire import messages, schema
from taskd.wire.codec import Envelope
from taskd.wire.messages import Message, WorkerMessage

_EVENTS: tuple[type[events.Event], ...] = (
    events.AgentRegistered,
    events.AgentLeft,
    events.WorkerStarted,
    events.WorkerDeclared,
    events.WorkerLost,
    events.WorkerExitKnown,
    events.WorkerPaused,
    events.WorkerMayAdvance,
    events.WorkerRaised,
    events.WorkerRecovered,
    events.WorkerReturned,
    events.WorkerFinished,
    events.WorkerExamined,
    events.WorkerDumped,
    events.WorkerHolds,
    events.AgentDraining,
    events.WorkerReady,
    events.WorkerUncaught,
    events.WorkerProfiling,
    events.WorkerMirrors,
    events.AgentMirrors,
    events.MirrorsHeld,
)
_COMMANDS: tuple[type[commands.Command], ...] = (
    commands.Interrupt,
    commands.ReplaceWorker,
    commands.KillWorker,
    commands.Resume,
    commands.RestartGroup,
    commands.Release,
    commands.GiveUp,
    commands.Dump,
    commands.Publish,
    commands.Advance,
    commands.SetProfiling,
    commands.Pair,
)
MESSAGE_BY_CORE: dict[type, type[Message]] = {
    cls: getattr(messages, cls.__name__) for cls in (*_EVENTS, *_COMMANDS)
}
_EVENT_BY_MESSAGE = {MESSAGE_BY_CORE[cls]: cls for cls in _EVENTS}
_COMMAND_BY_MESSAGE = {MESSAGE_BY_CORE[cls]: cls for cls in _COMMANDS}
_NAMES: dict[type[Message], tuple[str, ...]] = {
    cls: tuple(item.name for item in fields(cls)) for cls in MESSAGE_BY_CORE.values()
}


def event_to_message(event: object) -> Message:
    """The message for an event. Raises `LocalProtocolError` if this event does not travel."""
    return _to_message(event)


def command_to_message(command: object) -> Message:
    """The message for a command. Raises `LocalProtocolError` if this command does not travel."""
    return _to_message(command)


def message_to_event(envelope: Envelope, message: Message, now: float) -> events.Event:
    """The event that a message reports. Raises `RemoteProtocolError` if it reports none."""
    cls = _EVENT_BY_MESSAGE.get(type(message))
    if cls is None:
        raise RemoteProtocolError("malformed", f"{type(message).__name__} is no event")
    _check_life(message)
    return cls(now=now, cause=envelope.cause, **_values(message))


def check(message: Message) -> None:
    """Raise ProtocolError if a peer that knows the rules would refuse this message of ours (except for its size)."""
    record = schema.record(type(message))
    _check_life(record.unpack(record.pack(message), type(message).__name__))


def _check_life(message: Message) -> None:
    fault = getattr(message, "fault", None)
    if (
        isinstance(message, WorkerMessage)
        and fault is not None
        and (fault.rank, fault.incarnation) != (message.rank, message.incarnation)
    ):
        raise RemoteProtocolError(
            "malformed", f"{type(message).__name__} tells a fault of another life"
        )


def message_to_command(envelope: Envelope, message: Message) -> commands.Command:
    """The command that a message carries. Raises `RemoteProtocolError` if it carries none."""
    cls = _COMMAND_BY_MESSAGE.get(type(message))
    if cls is None:
        raise RemoteProtocolError("malformed", f"{type(message).__name__} is no command")
    return cls(cause=envelope.cause, **_values(message))


def _to_message(thing: object) -> Message:
    cls = MESSAGE_BY_CORE.get(type(thing))
    if cls is None:
        raise LocalProtocolError(f"{type(thing).__name__} is not sent between processes")
    return cls(**{name: getattr(thing, name) for name in _NAMES[cls]})


def _values(message: Message) -> dict[str, Any]:
    return {name: getattr(message, name) for name in _NAMES[type(message)]}
