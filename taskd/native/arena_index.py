"""The index of a snapshot in an arena.

Which tensor lies where, of what type and shape, with what checksum. Bytes in, values out.

msgpack maps and lists of plain values, nothing executable:

    [1, [[name, dtype, [dimension, ...], offset, length, checksum], ...], rest]

`rest` is whatever else belongs to the snapshot, bytes that only their owner understands. Knows
neither torch nor shared memory.
"""

import math
from dataclasses import dataclass

import msgpack

INDEX_VERSION = 1
ALIGNMENT = 64  # of every tensor's first byte: a cache line, and more than any dtype needs

# What one entry takes at most besides its name and its dimensions: a list, the lengths of both,
# dtype, three words.
_ENTRY_BYTES = 80
_DIMENSION_BYTES = 9
_FRAME_BYTES = 32

_MAX_NAME_BYTES = 1 << 16  # names are paths in a module tree
_MAX_DIMENSIONS = 64  # torch allows no more


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor.

    `offset` and `length` in bytes within its buffer, `dtype` as torch prints it without "torch.".
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    length: int
    checksum: int


def aligned(count: int) -> int:
    """The next offset at which a tensor may begin."""
    return -(-count // ALIGNMENT) * ALIGNMENT


def room_for(name: str, shape: tuple[int, ...], length: int) -> int:
    """Bytes that a tensor takes in a buffer at most, with its entry."""
    return length + ALIGNMENT + len(name.encode()) + _ENTRY_BYTES + _DIMENSION_BYTES * len(shape)


def room_for_rest(rest: bytes) -> int:
    """Bytes that everything else of a snapshot takes at most."""
    return len(rest) + ALIGNMENT + _FRAME_BYTES


def encode(entries: list[Entry], rest: bytes) -> bytes:
    """The index as bytes."""
    rows = [
        (entry.name, entry.dtype, entry.shape, entry.offset, entry.length, entry.checksum)
        for entry in entries
    ]
    packed: bytes = msgpack.packb((INDEX_VERSION, rows, rest))
    return packed


def decode(data: bytes, data_bytes: int) -> tuple[list[Entry], bytes]:
    """Entries and rest.

    `data_bytes`: how much of the buffer lies in front of the index; an entry beyond it is refused.

    Raises:
        ValueError: it is no index of this version, whatever the bytes are. The text says what is
            wrong.
    """
    try:
        unpacked = msgpack.unpackb(data, use_list=True, strict_map_key=True)
    except (ValueError, RecursionError, msgpack.exceptions.UnpackException) as error:
        raise ValueError(f"the index cannot be decoded: {error or type(error).__name__}") from None
    if not (
        isinstance(unpacked, list)
        and len(unpacked) == 3
        and isinstance(unpacked[1], list)
        and isinstance(unpacked[2], bytes)
    ):
        raise ValueError("the index has another form")
    if unpacked[0] != INDEX_VERSION:
        raise ValueError(f"the index has version {unpacked[0]!r}, {INDEX_VERSION} is understood")
    entries = [_entry(row, data_bytes) for row in unpacked[1]]
    if len({entry.name for entry in entries}) != len(entries):
        raise ValueError("the index has a name twice")
    return entries, unpacked[2]


def _entry(row: object, data_bytes: int) -> Entry:
    if not (isinstance(row, list) and len(row) == 6):
        raise ValueError("the index has an entry of another form")
    name, dtype, shape, *words = row
    if not (
        isinstance(name, str)
        and isinstance(dtype, str)
        and isinstance(shape, list)
        and len(name) <= _MAX_NAME_BYTES
        and len(shape) <= _MAX_DIMENSIONS
    ):
        raise ValueError("the index has an entry of another form")
    if not all(type(word) is int and word >= 0 for word in (*shape, *words)):
        raise ValueError(f"the index has an entry with impossible numbers: {name[:100]!r}")
    offset, length, checksum = words
    count = math.prod(shape)
    if (
        offset % ALIGNMENT
        or offset + length > data_bytes
        or (length == 0) != (count == 0)
        or (count and length % count)
    ):
        raise ValueError(f"the index has an entry that does not fit its buffer: {name[:100]!r}")
    return Entry(name, dtype, tuple(shape), offset, length, checksum)
