"""Checkpoints of states that are one run of bytes for each rank: no tensors, no torch.

    __0_0.safetensors   rank 0: the header, which says what lies where, and the bytes
    __1_0.safetensors   rank 1
    taskd.json          the manifest: size and SHA-256 of each

The format is that of safetensors: eight bytes with the length of a JSON header, the header, the
bytes. So whoever knows it (MindSpore's own `load_checkpoint`, too) reads these files without us.
Names, drafts, publication and what is read first are as for every checkpoint of taskd.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from taskd.checkpoint import files, manifest, owners, parts
from taskd.checkpoint.finish import date, give_name, tidy
from taskd.checkpoint.manifest import FLAT_SUFFIX, FileEntry, Manifest
from taskd.errors import CheckpointError, CorruptCheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from taskd.checkpoint.draft import Draft
    from taskd.checkpoint.folder import Checkpoint

_LENGTH = struct.Struct("<Q")
_CHUNK_BYTES = 4 << 20
_MAX_HEADER_BYTES = 100_000_000  # of safetensors itself


@dataclass(frozen=True, slots=True)
class Layout:
    """One tensor within the bytes: its type (as safetensors names it), shape, and place."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True)
class Flat:
    """The state of one rank. `notes`: texts that travel with it."""

    layout: tuple[Layout, ...]
    notes: dict[str, str]
    data: memoryview


def file_name(rank: int) -> str:
    """Of what this rank has written."""
    return f"__{rank}_0{FLAT_SUFFIX}"


def header(layout: tuple[Layout, ...], notes: dict[str, str]) -> bytes:
    """What stands in front of the bytes."""
    document: dict[str, Any] = {"__metadata__": notes}
    for one in layout:
        document[one.name] = {
            "dtype": one.dtype, "shape": list(one.shape), "data_offsets": [one.start, one.end],
        }  # fmt: skip
    text = json.dumps(document, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the bytes begin at a multiple of eight
    return _LENGTH.pack(len(text)) + text


def write(draft: Draft, rank: int, state: Flat, pieces: Iterable[memoryview] | None = None) -> None:
    """Write this rank's part, on the disk when it returns, and hand it over to the publisher.

    `pieces`: the bytes one after the other, where they are not in `state` in one run.

    Raises:
        CheckpointError: it cannot be written (a full disk): nothing of it is left, and the
            publisher is told.
    """
    path = draft.path / file_name(rank)
    try:
        draft.join(rank)
        head = header(state.layout, state.notes)
        entry = _write(path, head, [state.data] if pieces is None else pieces)
        draft.hand_over(rank, parts.encode(parts.Part(rank, files=(entry,))))
    except BaseException as error:
        why = error.strerror if isinstance(error, OSError) else repr(error)
        problem = f"{draft}: rank {rank}: {path} could not be written: {why}"
        with suppress(OSError):
            files.remove(path)
        _refuse(draft, rank, problem)
        if not isinstance(error, OSError):
            raise
        raise CheckpointError(problem) from error


def refuse(draft: Draft, rank: int, problem: str) -> None:
    """Tell the publisher that there will be no part of this rank, which has not begun with it.

    A publisher that is told nothing waits until its time is over. Raises nothing.
    """
    with suppress(OSError):
        draft.join(rank)
    _refuse(draft, rank, problem)


def publish(draft: Draft, framework: str, keep: int | None = None) -> Path:
    """Publish what all writers have handed over; for the first writer.

    `framework`: name and version of what has trained. `keep`: of a periodic one, how many are left.

    Raises:
        CheckpointError: it was not published; nothing of it is left, the earlier ones are as
            before.
    """
    try:
        path = _publish(draft, framework)
    except BaseException as error:
        draft.withdraw()
        if isinstance(error, OSError):
            raise CheckpointError(
                f"{draft}: {error.filename or draft.path} could not be written: {error.strerror}"
            ) from error
        raise
    tidy(draft, keep, is_flat=True)
    return path


def read(checkpoint: Checkpoint, rank: int) -> Flat:
    """What this rank has written, verified in full.

    Raises:
        CorruptCheckpointError: it is none of this kind, lacks the rank, or is damaged.
    """
    name, path = file_name(rank), checkpoint.path
    entry = next((one for one in checkpoint.manifest.files if one.name == name), None)
    if entry is None:
        raise CorruptCheckpointError(
            f"{path}: has no {name}: it was written by {checkpoint.manifest.torch} with "
            f"{checkpoint.manifest.world_size} ranks"
        )
    files.check_content(path / name, entry.size_bytes, entry.sha256, path)
    content = memoryview(files.read(path / name, entry.size_bytes))
    try:
        return _decode(content)
    except (ValueError, TypeError, LookupError, struct.error, RecursionError) as error:
        raise CorruptCheckpointError(f"{path / name}: is damaged: {error!r}") from error


def _refuse(draft: Draft, rank: int, problem: str) -> None:
    # Its folder is not made again: then the publisher has given up already.
    with suppress(OSError):
        draft.hand_over(rank, parts.encode(parts.Part(rank, problem=problem)))


def _write(path: Path, head: bytes, pieces: Iterable[memoryview]) -> FileEntry:
    digest, size = hashlib.sha256(head), len(head)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    with open(os.open(path, flags, 0o644), "wb", buffering=0) as file:
        _write_all(file, memoryview(head))
        for data in pieces:
            size += len(data)
            for start in range(0, len(data), _CHUNK_BYTES):
                chunk = data[start : start + _CHUNK_BYTES]
                digest.update(chunk)
                _write_all(file, chunk)
        os.fsync(file.fileno())
    return FileEntry(path.name, size, digest.hexdigest())


def _write_all(file: Any, data: memoryview) -> None:
    while data:
        data = data[file.write(data) :]


def _publish(draft: Draft, framework: str) -> Path:
    missing = draft.missing()
    if missing:
        raise CheckpointError(f"{draft}: no part of rank {', '.join(map(str, missing))}")
    read_parts = [parts.read(draft.part_path(rank), rank) for rank in draft.writers]
    listed = tuple(file for part in read_parts for file in part.files)
    for file in listed:
        files.check_size(draft.path / file.name, file.size_bytes, draft.path)
    found = Manifest(
        job=draft.job,
        kind=draft.kind,
        version=draft.version,
        generation=draft.generation,
        world_size=draft.world_size,
        writers=draft.writers,
        saved_at=date(),
        fault=draft.fault,
        torch=framework,
        states=draft.states,
        host=socket.gethostname(),
        publisher=owners.myself(),
        files=listed,
    )
    files.write_new(draft.path / manifest.FILE_NAME, manifest.encode(found))
    return give_name(draft)


def _decode(content: memoryview) -> Flat:
    (length,) = _LENGTH.unpack_from(content)
    start = _LENGTH.size + length
    if length > _MAX_HEADER_BYTES or start > len(content):
        raise ValueError(f"a header of {length} bytes")
    document = json.loads(bytes(content[_LENGTH.size : start]))
    notes = document.pop("__metadata__")
    if not all(isinstance(text, str) for text in (*notes, *notes.values())):
        raise ValueError("notes that are no texts")
    data = content[start:]
    layout = tuple(_layout(name, said, len(data)) for name, said in document.items())
    return Flat(layout, notes, data)


def _layout(name: str, said: Any, size: int) -> Layout:
    start, end = said["data_offsets"]
    shape, dtype = tuple(said["shape"]), said["dtype"]
    if not (manifest.is_count(start) and manifest.is_count(end) and start <= end <= size):
        raise ValueError(f"{name} lies from {start} to {end} of {size} bytes")
    if not (isinstance(dtype, str) and all(manifest.is_count(side) for side in shape)):
        raise ValueError(f"{name} is {dtype!r} of shape {shape}")
    return Layout(name, dtype, shape, start, end)
