"""Group files, as MindSpore writes them where GROUP_INFO_FILE says.

Each rank has one. It is a message of protocol buffers, `ParallelGroupMap` of MindSpore's
node_strategy.proto; what is asked of it is field 2, `ckpt_restore_rank_list`: the ranks whose
checkpoints are the same as this rank's. It is read here, so that a strategy can be made where
protobuf is not installed; every other field is skipped, and must be well-formed.
https://protobuf.dev/programming-guides/encoding/
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from mindx_elastic import files
from mindx_elastic.errors import DamagedFileError
from mindx_elastic.record import MAX_RANK

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_BYTES = 1 << 20  # as the original's; 4,096 groups of 4,096 ranks are not in one rank's file
_RESTORE_LIST = 2  # of ParallelGroupMap
_DIM = 1  # of ParallelGroupRanks
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_FIXED_SIZES = {_FIXED64: 8, _FIXED32: 4}
_EXPORT = re.compile(r"\s*export\s+GROUP_INFO_FILE_REFLECT=(\S+)\s*")
# The part of a path that names its rank: device3/group_info.pb, rank_3/group_info.pb
_OWN_PART = re.compile(r"(device_?|rank_?)(\d{1,5})")


def read(path: str) -> tuple[int, ...]:
    """The ranks whose checkpoints are the same. Raises DamagedFileError, which names the file."""
    data = files.read(path, MAX_BYTES)
    try:
        return decode(data)
    except DamagedFileError as error:
        raise DamagedFileError(f"{path}: {error}") from error


def decode(data: bytes) -> tuple[int, ...]:
    """Raises DamagedFileError, whose text is the reason alone."""
    if not data:
        raise DamagedFileError("is empty")
    ranks: list[int] = []
    is_there = False
    for number, wire, value in _fields(data):
        if number == _RESTORE_LIST:
            if not isinstance(value, bytes):
                raise DamagedFileError(f"field {number} has wire type {wire}, expected a message")
            is_there = True
            ranks += _ranks(value)
    if not is_there or not ranks:
        raise DamagedFileError("has no list of ranks to restore from")
    if len(set(ranks)) != len(ranks):
        raise DamagedFileError(f"names a rank twice: {ranks[:20]}")
    if max(ranks) > MAX_RANK:
        raise DamagedFileError(f"names rank {max(ranks)}, more than {MAX_RANK}")
    return tuple(ranks)


def _ranks(data: bytes) -> Iterator[int]:
    for number, wire, value in _fields(data):
        if number != _DIM:
            continue
        if isinstance(value, int):
            yield value
        elif wire == _BYTES:  # packed
            position = 0
            while position < len(value):
                rank, position = _varint(value, position)
                yield rank
        else:
            raise DamagedFileError(f"a rank has wire type {wire}")


def _fields(data: bytes) -> Iterator[tuple[int, int, int | bytes]]:
    """Number, wire type and value of each field of a message."""
    position = 0
    while position < len(data):
        key, position = _varint(data, position)
        number, wire = key >> 3, key & 7
        if number == 0:
            raise DamagedFileError("is damaged: a field with number 0")
        if wire == _VARINT:
            value: int | bytes
            value, position = _varint(data, position)
        elif wire == _BYTES:
            length, position = _varint(data, position)
            value, position = _part(data, position, length)
        elif wire in _FIXED_SIZES:
            value, position = _part(data, position, _FIXED_SIZES[wire])
        else:
            raise DamagedFileError(f"is damaged: field {number} has wire type {wire}")
        yield number, wire, value


def _part(data: bytes, position: int, length: int) -> tuple[bytes, int]:
    if length > len(data) - position:
        raise DamagedFileError("is damaged: it ends within a field")
    return data[position : position + length], position + length


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):  # ten bytes at most
        if position >= len(data):
            raise DamagedFileError("is damaged: it ends within a number")
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    raise DamagedFileError("is damaged: a number of more than ten bytes")


def paths(own: str | None, environment_file: str) -> dict[int, str]:
    """Path of each rank's group file, as far as known. Raises DamagedFileError for no way to tell.

    Args:
        own: GROUP_INFO_FILE_REFLECT or GROUP_INFO_FILE of this rank; the others' lie beside it, in
            folders that are named after their ranks.
        environment_file: the file into which every start writes such variables.
    """
    candidates = [own] if own else _exported(environment_file)
    if not candidates:
        raise DamagedFileError(
            "no group file is known: GROUP_INFO_FILE is not set, and nothing is in "
            f"{environment_file}"
        )
    found: dict[int, str] = {}
    for path in candidates:
        found.update(_siblings(path))
    if not found:
        raise DamagedFileError(
            f"{candidates[-1]}: no part of this path names a rank, as device3 or rank_3 would: "
            "the group files of the other ranks cannot be found"
        )
    return found


def _exported(environment_file: str) -> list[str]:
    try:
        text = files.read(environment_file, MAX_BYTES).decode(errors="replace")
    except DamagedFileError:
        return []
    lines = [_EXPORT.fullmatch(line) for line in text.splitlines()]
    return list(dict.fromkeys(line[1].strip("'\"") for line in lines if line))


def _siblings(path: str) -> dict[int, str]:
    """By rank: the same path with another rank in the last part that names one, where it exists."""
    parts = path.split("/")
    for index in range(len(parts) - 2, -1, -1):  # not the name of the file
        own = _OWN_PART.fullmatch(parts[index])
        if own is None:
            continue
        above = "/".join(parts[:index]) or "/"
        below = parts[index + 1 :]
        found = {}
        for name in sorted(_names(above)):
            other = _OWN_PART.fullmatch(name)
            if other is not None and other[1] == own[1]:
                found[int(other[2])] = os.path.join(above, name, *below)
        return found
    return {}


def _names(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError as error:
        raise DamagedFileError(f"{folder}: cannot be listed: {error}") from error
