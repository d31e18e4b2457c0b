"""What two agents say to each other about mirrors.

Bytes to values and back. docs/protocol.md, "Between peer nodes", has the conversation.

    Ask     for a snapshot that is to come back            from the node in the place of a lost one
    Offer   a snapshot is there; `transfer` numbers it   } from the node whose snapshot it is, or
    Piece   its next bytes                               } that gives it back
    Answer  to all: go on, or not                          from the other one

A frame is one msgpack list: version, code, and the fields in order. Whatever bytes come, `decode`
raises RemoteProtocolError or returns values of the right types and sizes; whether they make sense
is for the receiver to say.
"""

from dataclasses import dataclass, fields
from typing import Any

import msgpack

from taskd.errors import RemoteProtocolError
from taskd.wire import schema

VERSION = 1
# half of what the transport lets through; a frame costs 0.1 ms beside its copies
PIECE_BYTES = 512 * 1024
MAX_FRAME_BYTES = PIECE_BYTES + 4096
UNDER_WAY_BYTES = 8 * PIECE_BYTES  # enough for 1 GB/s at 4 ms; more would only fill buffers
MAX_SNAPSHOT_BYTES = 1 << 46  # of one rank; no node has as much memory

GO = "go"  # to an Offer: the place is there
TAKEN = "taken"  # to a Piece: the next one may come
KEPT = "kept"  # to the last Piece, or to an Offer of what is there: the mirror is whole
LATER = "later"  # to an Offer or an Ask: not now, ask again
DAMAGED = "damaged"  # to the last Piece: it was not what it should be
REFUSED = "refused"  # to an Offer: there will be no mirror of this rank here; to an Ask: it is gone
STAGES = (GO, TAKEN, KEPT, LATER, DAMAGED, REFUSED)


@dataclass(frozen=True, slots=True)
class Ask:
    """`node_rank` has taken the place of the node that had this snapshot.

    `incarnation` of the agent that asks, `to` that of the one which is meant.
    """

    transfer: int
    job_id: str
    node_rank: int
    incarnation: str
    to: str
    rank: int
    version: int


@dataclass(frozen=True, slots=True)
class Offer:
    """`incarnation` of the agent that offers, `to` that of the one which is meant.

    Nobody else knows both. From `kind` on: `arena_copy.Outline`.
    """

    transfer: int
    job_id: str
    node_rank: int
    incarnation: str
    to: str
    rank: int
    kind: int
    sequence: int
    version: int
    generation: int
    data_bytes: int
    index_bytes: int
    index_sum: int
    seal: int


@dataclass(frozen=True, slots=True)
class Piece:
    """The bytes from `offset`, at most PIECE_BYTES."""

    transfer: int
    offset: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Answer:
    """`stage`: one of STAGES. `taken`: bytes that have come so far. `reason`: for people."""

    transfer: int
    stage: str
    taken: int = 0
    reason: str = ""


Frame = Offer | Piece | Answer | Ask
_CODES: dict[int, type[Frame]] = {1: Offer, 2: Piece, 3: Answer, 4: Ask}
_CODE_OF = {cls: code for code, cls in _CODES.items()}
_NAMES = {cls: tuple(item.name for item in fields(cls)) for cls in _CODE_OF}
_WIDE = frozenset({"index_sum", "seal"})  # checksums have all 64 bits


def encode(frame: Frame) -> bytes:
    """The bytes of a frame."""
    values = [getattr(frame, name) for name in _NAMES[type(frame)]]
    cut = [
        schema.cut_text(value, schema.MAX_TEXT_BYTES // 4) if isinstance(value, str) else value
        for value in values
    ]
    data: bytes = msgpack.packb([VERSION, _CODE_OF[type(frame)], *cut])
    return data


def decode(data: bytes) -> Frame:
    """What the bytes say. Raises RemoteProtocolError."""
    values = schema.parse(data, MAX_FRAME_BYTES)
    if not isinstance(values, list) or len(values) < 2:
        raise schema.wrong("the frame", "a list", values)
    schema.check_version(values[0], VERSION)
    code = schema.integer(values[1], "code")
    cls = _CODES.get(code)
    if cls is None:
        raise RemoteProtocolError("unknown type", f"no frame has the code {code}")
    names = _NAMES[cls]
    if len(values) - 2 != len(names):
        raise schema.wrong(cls.__name__, f"a list of {len(names)}", values)
    frame = cls(*(_checked(name, value) for name, value in zip(names, values[2:], strict=True)))
    if isinstance(frame, Answer) and frame.stage not in STAGES:
        raise RemoteProtocolError("malformed", "stage is none that we know")
    if (
        isinstance(frame, Offer)
        and not 0 < frame.data_bytes + frame.index_bytes <= MAX_SNAPSHOT_BYTES
    ):
        raise RemoteProtocolError("malformed", f"a snapshot has at most {MAX_SNAPSHOT_BYTES} bytes")
    return frame


def _checked(name: str, value: object) -> Any:
    if name == "data":
        if not isinstance(value, bytes) or not 0 < len(value) <= PIECE_BYTES:
            raise schema.wrong(name, f"1 to {PIECE_BYTES} bytes", value)
        return value
    if name in ("job_id", "incarnation", "to", "stage", "reason"):
        return schema.text(value, name)
    if name in ("rank", "node_rank"):
        return schema.integer(value, name, 0, schema.MAX_RANK)
    return schema.integer(value, name, 0, (1 << 64) - 1 if name in _WIDE else schema.MAX_INTEGER)
