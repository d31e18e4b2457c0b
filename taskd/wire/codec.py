"""Bytes to (envelope, message) and back: protocol version, size limit, unknown types.

A frame is one msgpack map of plain types: the envelope's fields, `version`, `type` and `body` (the
message's fields). What comes from outside raises `RemoteProtocolError` and nothing else, whatever
the bytes are.
"""

from dataclasses import dataclass

import msgpack

from taskd.errors import LocalProtocolError, RemoteProtocolError
from taskd.wire import schema
from taskd.wire.messages import MESSAGE_BY_CODE, Message

PROTOCOL_VERSION = 1
# Fits Resume and RestartGroup of 4,096 ranks (about 100 KB) with a traceback, and one node of 1,024
# workers registering.
MAX_MESSAGE_BYTES = 256 * 1024
MAX_INCARNATION_CHARACTERS = 64  # ours have 32; a manager keeps one for each position
ROLES = ("manager", "agent", "worker", "relay", "spare")


@dataclass(frozen=True, slots=True)
class Envelope:
    """Who speaks, in which generation, as which of its messages, and because of what.

    `rank` is None for all but workers, `node_rank` for managers and spares. `incarnation` is a
    random text for managers, agents and spares, a count for workers. `sequence` grows with every
    message of one sender's incarnation.
    """

    job_id: str
    role: str
    node_rank: int | None
    rank: int | None
    incarnation: str | int | None
    generation: int
    sequence: int
    cause: str


def encode(envelope: Envelope, message: Message) -> bytes:
    """The frame of a message.

    Raises `LocalProtocolError` if it is too large, which no job of 4,096 ranks reaches.
    """
    data = frame_of(envelope, message.code, body_of(message))
    if len(data) > MAX_MESSAGE_BYTES:
        raise LocalProtocolError(
            f"{type(message).__name__} has {len(data)} bytes, allowed are {MAX_MESSAGE_BYTES}"
        )
    return data


def frame_of(envelope: Envelope, code: int, body: bytes) -> bytes:
    """The frame of a message of this type whose fields are packed already."""
    frame = {
        "version": PROTOCOL_VERSION,
        "type": code,
        "job_id": envelope.job_id,
        "role": envelope.role,
        "node_rank": envelope.node_rank,
        "rank": envelope.rank,
        "incarnation": envelope.incarnation,
        "generation": envelope.generation,
        "sequence": envelope.sequence,
        "cause": schema.cut_text(envelope.cause),
        "body": None,
    }
    return packed(frame)[:-1] + body  # its last byte is the None in whose place the body stands


def body_of(message: Message) -> bytes:
    """The packed fields of a message."""
    return packed(schema.record(type(message)).pack(message))


def packed(plain: object) -> bytes:
    """Plain data as msgpack."""
    # unicode_errors: an exception's message may hold a lone surrogate, which UTF-8 cannot express.
    data: bytes = msgpack.packb(plain, unicode_errors="replace")
    return data


def decode(data: bytes) -> tuple[Envelope, Message]:
    """The envelope and the message of a frame.

    Raises `RemoteProtocolError` for anything that is not a message of this protocol version. If
    only the message is wrong, the error holds the envelope, so that the sender can be answered.
    """
    frame = schema.parse(data, MAX_MESSAGE_BYTES)
    if not isinstance(frame, dict):
        raise schema.wrong("the frame", "a map", frame)
    schema.check_version(frame.get("version"), PROTOCOL_VERSION)
    envelope = _envelope(frame)
    code = schema.integer(frame.get("type"), "type")
    try:
        return envelope, read_body(code, frame.get("body"))
    except RemoteProtocolError as error:
        error.envelope, error.message_code = envelope, code
        raise


def read_body(code: int, body: object) -> Message:
    """The message of this type from its plain fields. Raises `RemoteProtocolError`."""
    kind = MESSAGE_BY_CODE.get(code)
    if kind is None:
        raise RemoteProtocolError("unknown type", str(code), code)
    message: Message = schema.record(kind).unpack(body, kind.__name__)
    return message


def _envelope(frame: dict[object, object]) -> Envelope:
    role = schema.text(frame.get("role"), "role")
    if role not in ROLES:
        raise RemoteProtocolError("malformed", f"role must be one of {', '.join(ROLES)}")
    return Envelope(
        job_id=schema.text(frame.get("job_id"), "job_id"),
        role=role,
        node_rank=_optional_rank(frame, "node_rank"),
        rank=_optional_rank(frame, "rank"),
        incarnation=_incarnation(frame.get("incarnation")),
        generation=schema.integer(frame.get("generation"), "generation"),
        sequence=schema.integer(frame.get("sequence"), "sequence"),
        cause=schema.cut_text(schema.text(frame.get("cause"), "cause")),
    )


def _optional_rank(frame: dict[object, object], name: str) -> int | None:
    value = frame.get(name)
    return None if value is None else schema.integer(value, name, 0, schema.MAX_RANK)


def _incarnation(value: object) -> str | int | None:
    if value is None:
        return None
    if isinstance(value, str):
        schema.integer(len(value), "the length of incarnation", 0, MAX_INCARNATION_CHARACTERS)
        return value
    return schema.integer(value, "incarnation")
