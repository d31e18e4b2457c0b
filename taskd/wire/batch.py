"""Several reports of one agent in one message.

When a job is interrupted, and when it goes on, each rank of a node says so within milliseconds of
the others, and most of them say the same. A message for each costs the manager of thousands of
nodes most of its time in the transport, and reading what is equal most of the rest. So what ranks
report alike is written once, with the lives that report it.

Only reports of a fixed, small size travel so. What must not be missing (a death, a registration)
goes alone: its answer names it by its number.
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any

from taskd.core import events
from taskd.errors import RemoteProtocolError
from taskd.wire import codec, schema, translate
from taskd.wire.messages import MESSAGE_BY_RECORD, Batch, Message, Told

MAX_REPORTS = 16  # of the longest reasons and causes these fit into one message
_EVENTS = (
    events.WorkerStarted,
    events.WorkerDeclared,
    events.WorkerPaused,
    events.WorkerRecovered,
    events.WorkerReturned,
    events.WorkerHolds,
    events.WorkerMayAdvance,
)
_CODES = frozenset(MESSAGE_BY_RECORD[event].code for event in _EVENTS)
_WHOSE = ("rank", "incarnation")
# Nobody asks which rank took how long: the record of a recovery has the times of the slowest.
_DURATIONS = ("groups_s", "state_s", "first_step_s")
_ALIKE = {
    code: attrgetter(
        "code",
        *(
            item.name
            for item in fields(MESSAGE_BY_RECORD[event])
            if item.name not in (*_WHOSE, *_DURATIONS)
        ),
    )
    for event in _EVENTS
    for code in (MESSAGE_BY_RECORD[event].code,)
}


@dataclass(slots=True)
class _Group:
    """What some ranks report alike. `message`: of the slowest."""

    cause: str
    message: Any
    ranks: list[int]
    incarnations: list[int]


def may_wait(message: Message) -> bool:
    """Whether this may go out with others of its kind."""
    return message.code in _CODES


def batch_of(reports: Iterable[tuple[str, Message]]) -> Batch:
    """One message for these, at most MAX_REPORTS, each with its cause.

    What ranks report alike stands where the first of them did, but for a rank that has reported
    something else since.
    """
    groups: list[_Group] = []
    number_of: dict[object, int] = {}  # by what is equal
    newest: dict[int, int] = {}  # by rank
    for cause, message in reports:
        told: Any = message
        key = (cause, _ALIKE[message.code](message))
        number = number_of.get(key, -1)
        if newest.get(told.rank, -1) >= number:
            number = number_of[key] = len(groups)
            groups.append(_Group(cause, told, [], []))
        group = groups[number]
        if _seconds(told) > _seconds(group.message):
            group.message = told
        group.ranks.append(told.rank)
        group.incarnations.append(told.incarnation)
        newest[told.rank] = number
    return Batch(tuple(_told(group) for group in groups))


def _seconds(message: Any) -> float:
    return sum(getattr(message, name, 0.0) for name in _DURATIONS)


def _told(group: _Group) -> Told:
    message: Message = group.message
    plain = schema.record(type(message)).pack(message)
    assert isinstance(plain, dict)
    for name in _WHOSE:
        del plain[name]
    return Told(
        message.code,
        schema.cut_text(group.cause),
        tuple(group.ranks),
        tuple(group.incarnations),
        codec.packed(plain),
    )


def check(batch: Batch) -> None:
    """Raise `RemoteProtocolError` if there are more reports than an agent may send at once."""
    if len(batch.reports) > MAX_REPORTS:
        raise RemoteProtocolError(
            "size", f"{len(batch.reports)} reports at once, allowed are {MAX_REPORTS}"
        )


def read(told: Told, now: float) -> events.Event:
    """What was told, as an event: that of a rank, or a `SharedReport` of several.

    Raises `RemoteProtocolError`, also for what has to come alone.
    """
    if told.type not in _CODES:
        raise RemoteProtocolError(
            "malformed", f"messages of type {told.type} do not come in a batch"
        )
    lives = tuple(zip(told.ranks, told.incarnations, strict=False))
    if not lives or len(told.ranks) != len(told.incarnations) or len(dict(lives)) != len(lives):
        raise RemoteProtocolError("malformed", "a report in a batch names no life of each rank")
    body = schema.parse(told.body, codec.MAX_MESSAGE_BYTES)
    if isinstance(body, dict):
        body["rank"], body["incarnation"] = lives[0]
    message = codec.read_body(told.type, body)
    report = translate.message_to_event(told.cause, message, now)
    if len(lives) == 1:
        return report
    assert isinstance(report, events.WorkerEvent)
    return events.SharedReport(now, told.cause, lives, report)
