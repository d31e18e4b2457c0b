"""Records of core to messages and back. Keeps the core free of the wire.

A message has the fields of its record (`taskd.wire.messages`), so translation is by position. `now`
is the receiver's: an event happened when its message was read (durations say the rest).
"""

from dataclasses import fields
from typing import Any

from taskd.core.commands import Command
from taskd.core.events import Event, WorkerEvent
from taskd.errors import LocalProtocolError, RemoteProtocolError
from taskd.wire import schema
from taskd.wire.codec import Envelope
from taskd.wire.messages import COMMAND_BY_CODE, EVENT_BY_CODE, MESSAGE_BY_RECORD, Message

_EVENT_OF = {MESSAGE_BY_RECORD[event]: event for event in EVENT_BY_CODE.values()}
_COMMAND_OF = {MESSAGE_BY_RECORD[command]: command for command in COMMAND_BY_CODE.values()}
_NAMES = {cls: tuple(item.name for item in fields(cls)) for cls in MESSAGE_BY_RECORD.values()}
_WITH_FAULT = frozenset(
    cls
    for cls, event in _EVENT_OF.items()
    if issubclass(event, WorkerEvent) and "fault" in _NAMES[cls]
)


def event_to_message(event: object) -> Message:
    """The message for an event. Raises `LocalProtocolError` if this event does not travel."""
    return _to_message(event)


def command_to_message(command: object) -> Message:
    """The message for a command. Raises `LocalProtocolError` if this command does not travel."""
    return _to_message(command)


def message_to_event(cause: str, message: Message, now: float) -> Event:
    """The event that a message reports. Raises `RemoteProtocolError` if it reports none."""
    cls = _EVENT_OF.get(type(message))
    if cls is None:
        raise RemoteProtocolError("malformed", f"{type(message).__name__} is no event")
    _check_life(message)
    return cls(now, cause, *_values(message))


def message_to_command(envelope: Envelope, message: Message) -> Command:
    """The command that a message carries. Raises `RemoteProtocolError` if it carries none."""
    cls = _COMMAND_OF.get(type(message))
    if cls is None:
        raise RemoteProtocolError("malformed", f"{type(message).__name__} is no command")
    return cls(envelope.cause, *_values(message))


def check(message: Message) -> None:
    """Raise ProtocolError if a peer would refuse this message of ours (except for its size)."""
    record = schema.record(type(message))
    _check_life(record.unpack(record.pack(message), type(message).__name__))


def _check_life(message: Any) -> None:
    """A fault in a worker's report is of the rank and the incarnation of that report."""
    if type(message) not in _WITH_FAULT:
        return
    fault = message.fault
    if (fault.rank, fault.incarnation) != (message.rank, message.incarnation):
        raise RemoteProtocolError(
            "malformed", f"{type(message).__name__} tells a fault of another life"
        )


def _to_message(record: object) -> Message:
    cls = MESSAGE_BY_RECORD.get(type(record))
    if cls is None:
        raise LocalProtocolError(f"{type(record).__name__} is not sent between processes")
    return cls(*[getattr(record, name) for name in _NAMES[cls]])


def _values(message: Message) -> list[Any]:
    return [getattr(message, name) for name in _NAMES[type(message)]]
