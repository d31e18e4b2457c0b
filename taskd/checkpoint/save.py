"""Writing one rank's part of a checkpoint, through DCP's own file writer.

No collective, no second copy of the state.

    draft = Draft(directory, job, Kind.DUMP, version, attempt, writers, ...)   # on all writers
    write(draft, rank, state, own)   # on each of them
    publish(draft)                   # on the first one, once all have written

A state is a dict from names to tensors, DTensors, Pieces and plain values; who writes what is
decided in pieces.py.
"""

from __future__ import annotations

import hashlib
import io
import logging
import os
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint import FileSystemWriter, filesystem
from torch.distributed.checkpoint.planner import SavePlan

from taskd.checkpoint import parts, user_files, values
from taskd.checkpoint.dcp import internal, piece_item, value_item
from taskd.checkpoint.files import remove
from taskd.checkpoint.names import Kind
from taskd.checkpoint.pieces import Piece, divide, own_memory
from taskd.checkpoint.stream import HashedFiles, Progress
from taskd.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from torch.distributed.checkpoint.metadata import MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem

    from taskd.checkpoint.draft import Draft

log = logging.getLogger(__name__)


@dataclass
class _Plan:
    """DCP's write items, and what they stand for.

    `resolve_data` is the only method of a SavePlanner that writing needs.
    """

    items: dict[MetadataIndex, WriteItem]
    pieces: dict[MetadataIndex, Piece]
    values: dict[MetadataIndex, bytes]
    digests: dict[MetadataIndex, str] = field(default_factory=dict)  # of pieces that may repeat

    def resolve_data(self, item: WriteItem) -> torch.Tensor | io.BytesIO:
        if item.index in self.values:
            return io.BytesIO(self.values[item.index])
        piece = self.pieces[item.index]
        if piece.may_repeat:
            self.digests[item.index] = _digest(piece.tensor)
        return own_memory(piece.tensor)

    @property
    def size_bytes(self) -> int:
        return sum(piece.tensor.nbytes for piece in self.pieces.values()) + sum(
            map(len, self.values.values())
        )


def write(
    draft: Draft,
    rank: int,
    state: Mapping[str, Any],
    own: Mapping[str, Any] | None = None,
    fill: Callable[[Path], object] | None = None,
) -> None:
    """Write this rank's part and hand it over to the publisher.

    The tensors must not change meanwhile.

    Args:
        draft: what is being written.
        rank: this one, of `draft.writers`.
        state: plain tensors and values are the same on all writers; DTensors and Pieces are what
            this rank has.
        own: plain values of this rank alone, for example the state of its random generators. No
            other rank may use their names.
        fill: writes files of the user's own into a folder, see user_files.py.

    Raises:
        CheckpointError: it cannot be written; nothing of this rank's part is left, and the
            publisher is told. The draft is not withdrawn, unless it has no other writers: one that
            begins later would make its folder again.
    """
    if rank not in draft.writers:
        raise CheckpointError(f"{draft}: rank {rank} is none of its writers {draft.writers}")
    files: HashedFiles | None = None
    try:
        draft.join(rank)
        plan = _plan(rank, state, own or {}, draft)
        files = HashedFiles(Progress(f"{draft}: rank {rank}", plan.size_bytes))
        entries = _write(draft, rank, plan, files)
        own_files, own_problem = ((), "") if fill is None else user_files.collect(draft, rank, fill)
        written = tuple(file.entry for file in files.files)
        draft.hand_over(
            rank,
            parts.encode(
                parts.Part(rank, entries, written, user_files=own_files, user_problem=own_problem)
            ),
        )
    # Whatever it was, an interrupt too: what was written is of no use to anybody, and the publisher
    # waits.
    except BaseException as error:
        known = (files.error if files else None) or error
        problem = f"{draft}: rank {rank}: {_text(known)}"
        _undo(draft, rank, problem)
        if isinstance(known, OSError):
            raise CheckpointError(problem) from known
        if isinstance(error, CheckpointError):
            raise CheckpointError(problem) from error
        raise


def refuse(draft: Draft, rank: int, problem: str) -> None:
    """Tell the publisher that this rank's part will not come, without having begun to write it.

    Raises:
        CheckpointError, OSError: it cannot be told.
    """
    draft.join(rank)
    _undo(draft, rank, f"{draft}: rank {rank}: {problem}")


def _plan(rank: int, state: Mapping[str, Any], own: Mapping[str, Any], draft: Draft) -> _Plan:
    both = state.keys() & own.keys()
    if both:
        raise CheckpointError(
            f"{min(both)} is in the state and in the rank's own values: give it once"
        )
    pieces, plain = divide(state, rank, draft.writers, draft.world_size)
    plan = _Plan({}, {}, {})
    for name, value in [*plain, *own.items()]:
        item = value_item(name)
        plan.items[item.index] = item
        plan.values[item.index] = values.pack(name, value)
    for name, piece in pieces:
        tensor = piece.tensor
        item = piece_item(name, piece.offsets, tensor.shape, piece.global_shape, tensor.dtype)
        plan.items[item.index] = item
        plan.pieces[item.index] = piece
    return plan


def _write(draft: Draft, rank: int, plan: _Plan, files: HashedFiles) -> tuple[parts.Entry, ...]:
    writer = FileSystemWriter(draft.path, sync_files=False)  # our files sync themselves
    writer.fs = files
    prefix = internal(filesystem, "_StoragePrefix")(f"__{rank}_")
    with torch.no_grad():
        results = writer.write_data(
            SavePlan(list(plan.items.values()), storage_data=prefix), plan
        ).wait()
    return tuple(
        _entry(plan.items[result.index], result.storage_data, plan.digests.get(result.index, ""))
        for result in results
    )


def _digest(tensor: torch.Tensor) -> str:
    memory = own_memory(tensor).cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(memoryview(memory.numpy())).hexdigest()


def _entry(item: WriteItem, place: Any, digest: str) -> parts.Entry:
    where = (place.relative_path, place.offset, place.length)
    data = item.tensor_data
    if data is None:
        return parts.Entry(item.index.fqn, None, (), (), "", *where)
    dtype = str(data.properties.dtype).removeprefix("torch.")
    return parts.Entry(
        item.index.fqn,
        tuple(data.chunk.offsets),
        tuple(data.chunk.sizes),
        tuple(data.size),
        dtype,
        *where,
        digest,
    )


def _undo(draft: Draft, rank: int, problem: str) -> None:
    if draft.writers == (rank,) and draft.kind is not Kind.DUMP:
        draft.withdraw()
        return
    with suppress(OSError):
        for name in os.listdir(draft.path):
            if (
                name.startswith((f"__{rank}_", f"rank-{rank}.json"))
                or name == user_files.staging(draft, rank).name
            ):
                remove(draft.path / name)
    try:
        # A few bytes, on a disk on which our own file has just made room.
        draft.hand_over(rank, parts.encode(parts.Part(rank, problem=problem)))
    except OSError as error:
        log.warning(
            "%s: rank %d could not tell the publisher that its part will not come: %s",
            draft,
            rank,
            error,
        )


def _text(error: BaseException) -> str:
    if isinstance(error, OSError):
        return f"{error.filename or 'its file'} could not be written: {error.strerror or error}"
    return str(error) or type(error).__name__
