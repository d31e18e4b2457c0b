"""Several reports of one agent in one message.

When a job is interrupted, and when it goes on, each rank of a node says so within milliseconds of
the others. A message for each of them costs the manager of thousands of nodes most of its time in
the transport.

Only reports of a fixed, small size travel so. What must not be missing (a death, a registration)
goes alone: its answer names it by its number.
"""

from collections.abc import Iterable

from taskd.core import events
from taskd.errors import RemoteProtocolError
from taskd.wire import codec, schema
from taskd.wire.messages import MESSAGE_BY_RECORD, Batch, Message

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


def may_wait(message: Message) -> bool:
    """Whether this may go out with others of its kind."""
    return message.code in _CODES


def batch_of(reports: Iterable[tuple[str, Message]]) -> Batch:
    """One message for these, at most MAX_REPORTS, each with its cause."""
    return Batch(
        tuple(
            (message.code, schema.cut_text(cause), codec.body_of(message))
            for cause, message in reports
        )
    )


def check(batch: Batch) -> None:
    """Raise `RemoteProtocolError` if there are more reports than an agent may send at once."""
    if len(batch.reports) > MAX_REPORTS:
        raise RemoteProtocolError(
            "size", f"{len(batch.reports)} reports at once, allowed are {MAX_REPORTS}"
        )


def read(code: int, body: bytes) -> Message:
    """One report of a batch. Raises `RemoteProtocolError`, also for what has to come alone."""
    if code not in _CODES:
        raise RemoteProtocolError("malformed", f"messages of type {code} do not come in a batch")
    return codec.read_body(code, schema.parse(body, codec.MAX_MESSAGE_BYTES))
