"""Reading a checkpoint into tensors of any world size.

Each rank reads what it needs, alone: no collective, no process group.

What is read is verified first, in full; nothing is ever unpickled that could run code.
"""

from __future__ import annotations

import io
import math
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint import planner_helpers
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
)
from torch.distributed.tensor import DTensor

from taskd.checkpoint import files, folder, metadata, values
from taskd.checkpoint.dcp import internal
from taskd.checkpoint.pieces import Piece
from taskd.errors import CheckpointError, CorruptCheckpointError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from pathlib import Path

    from torch.distributed.checkpoint.planner import ReadItem


@dataclass(frozen=True)
class Contents:
    """What a checkpoint holds: global shape and dtype of each tensor, names of the plain values."""

    tensors: dict[str, tuple[tuple[int, ...], torch.dtype]]
    values: tuple[str, ...]


def contents(path: Path) -> Contents:
    """What the checkpoint at `path` holds, without reading it. Raises CorruptCheckpointError."""
    return _contents(metadata.read(path, folder.check(path, None).manifest))


def load(
    path: Path, state: Mapping[str, torch.Tensor | Piece], names: Collection[str] | None = None
) -> dict[str, Any]:
    """Read tensors into `state`, and return plain values.

    Args:
        path: of the checkpoint.
        state: plain tensors, DTensors on any mesh, or Pieces: of each, what this rank holds is
            overwritten. A subset of the checkpoint's tensors will do.
        names: the plain values to return; None: all.

    Raises:
        CorruptCheckpointError: it is not whole. Unless reading itself fails, nothing has been
            overwritten yet.
        CheckpointError: it does not fit `state`: a name, shape or dtype differs. Nothing has been
            overwritten.
    """
    manifest = folder.check(path, None).manifest
    stored = metadata.read(path, manifest)
    held = _contents(stored)
    chosen = held.values if names is None else names
    unknown = sorted({*state, *chosen} - held.tensors.keys() - set(held.values))
    if unknown:
        raise CheckpointError(
            f"{path}: holds no "
            f"{', '.join(unknown[:5])}"
            + (f" and {len(unknown) - 5} more" if len(unknown) > 5 else "")
        )
    targets = {name: _target(path, name, tensor, held) for name, tensor in state.items()}
    items: dict[str, list[ReadItem]] = {}
    for name, target in targets.items():
        for item in _items(path, name, target, stored):
            items.setdefault(stored.storage_data[item.storage_index].relative_path, []).append(item)
    places = {
        name: stored.storage_data[MetadataIndex(name)] for name in chosen if name in held.values
    }
    needed = {*items, *(place.relative_path for place in places.values())}
    for file in manifest.files:
        if file.name in needed:
            files.check_content(path / file.name, file.size_bytes, file.sha256, path)
    loaded = {
        name: _value(path / place.relative_path, name, place) for name, place in places.items()
    }
    for file_name, wanted in items.items():
        _fill(path / file_name, wanted, stored, targets)
    return loaded


def _contents(stored: Metadata) -> Contents:
    tensors: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    plain: list[str] = []
    for name, content in sorted(stored.state_dict_metadata.items()):
        if isinstance(content, BytesStorageMetadata):
            plain.append(name)
        else:
            tensors[name] = tuple(content.size), content.properties.dtype
    return Contents(tensors, tuple(plain))


def _target(path: Path, name: str, tensor: torch.Tensor | Piece, held: Contents) -> Piece | None:
    """What this rank holds, None for a DTensor on the mesh of others."""
    if name not in held.tensors:
        raise CheckpointError(f"{path}: {name} is a plain value there, not a tensor")
    if isinstance(tensor, DTensor) and tensor.device_mesh.get_coordinate() is None:
        return None
    piece = tensor if isinstance(tensor, Piece) else Piece.of(tensor)
    shape, dtype = held.tensors[name]
    if tuple(piece.global_shape) != shape:
        raise CheckpointError(
            f"{path}: {name} has shape {shape} there, and {tuple(piece.global_shape)} here"
        )
    if piece.tensor.dtype != dtype:
        raise CheckpointError(f"{path}: {name} is {dtype} there, and {piece.tensor.dtype} here")
    return piece


def _items(path: Path, name: str, target: Piece | None, stored: Metadata) -> list[ReadItem]:
    """Which stored pieces hold which part of the target: DCP's resharding."""
    if target is None:
        return []
    chunk = ChunkStorageMetadata(torch.Size(target.offsets), target.tensor.shape)
    found = (
        internal(planner_helpers, "create_read_items_for_chunk_list")(
            name, stored.state_dict_metadata[name], [chunk]
        )
        if target.tensor.numel()
        else []
    )
    if sum(math.prod(item.lengths) for item in found) != target.tensor.numel():
        raise CorruptCheckpointError(
            f"{path}: {name}: its pieces do not cover offsets "
            f"{tuple(target.offsets)}, shape {tuple(target.tensor.shape)}"
        )
    return found


def _value(path: Path, name: str, place: Any) -> Any:
    with files.opened(path) as descriptor:
        try:
            return values.unpack(_pread(descriptor, place.length, place.offset))
        except CorruptCheckpointError as error:
            raise CorruptCheckpointError(f"{path}: {name} {error}") from error


def _fill(
    path: Path, wanted: list[ReadItem], stored: Metadata, targets: dict[str, Piece | None]
) -> None:
    with files.opened(path) as descriptor:
        # In the order of the file, so that a disk or the network reads ahead.
        for item in sorted(wanted, key=lambda item: stored.storage_data[item.storage_index].offset):
            place, name = stored.storage_data[item.storage_index], item.storage_index.fqn
            target = targets[name]
            assert target is not None
            try:
                # One piece at a time, and of a bounded size: see MAX_PIECE_BYTES.
                piece = values.unpack(_pread(descriptor, place.length, place.offset))
                source = _narrow(piece, item.storage_offsets, item.lengths)
                _copy(source, _narrow(target.tensor.detach(), item.dest_offsets, item.lengths))
            except (CorruptCheckpointError, RuntimeError, AttributeError, IndexError) as error:
                raise CorruptCheckpointError(f"{path}: {name} {error}") from error


def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
    if source.dtype != target.dtype or source.shape != target.shape:
        raise CorruptCheckpointError(
            f"is {source.dtype}, {tuple(source.shape)} in the file; its "
            f"metadata say {target.dtype}, {tuple(target.shape)}"
        )
    for dimension, (size, stride) in enumerate(zip(target.shape, target.stride(), strict=True)):
        if not stride and size > 1:  # it repeats its memory, which is written once
            target, source = target.narrow(dimension, 0, 1), source.narrow(dimension, 0, 1)
    with torch.no_grad():
        target.copy_(source)


def _narrow(tensor: torch.Tensor, offsets: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
    for dimension, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
        tensor = tensor.narrow(dimension, offset, length)
    return tensor


def _pread(descriptor: int, count: int, offset: int) -> bytes:
    """All of it: one pread returns 2 GiB at most."""
    buffer = io.BytesIO()
    while count:
        data = os.pread(descriptor, count, offset)
        if not data:
            raise CorruptCheckpointError("ends too early")
        buffer.write(data)
        count, offset = count - len(data), offset + len(data)
    return buffer.getvalue()
