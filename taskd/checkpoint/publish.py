"""Turning the parts of all writers into a checkpoint.

DCP's metadata, the manifest, and one rename that makes it exist.
"""

import hashlib
import logging
import math
import pickle
import socket
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultSavePlanner, filesystem
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
)
from torch.distributed.checkpoint.planner import SavePlan

from taskd.checkpoint import files, manifest, owners, parts, user_files
from taskd.checkpoint.dcp import internal, piece_item, value_item
from taskd.checkpoint.draft import Draft
from taskd.checkpoint.finish import date, give_name, tidy
from taskd.checkpoint.manifest import METADATA_NAME, FileEntry, Manifest
from taskd.errors import CheckpointError
from taskd.log import SayOnce

log = logging.getLogger(__name__)

_once = SayOnce()


def publish(draft: Draft, keep: int | None = None) -> Path:
    """Publish what all writers have handed over; for the first writer.

    When it returns, the checkpoint is on the disk.

    Args:
        draft: whose `missing()` is empty.
        keep: of a periodic checkpoint: how many are left, this one included. None: all.

    Raises:
        CheckpointError: it was not published. Nothing of it is left, and the previous checkpoints
            are as before.
    """
    try:
        path = _publish(draft)
    # An interrupt too: a draft that is not published is worth nothing.
    except BaseException as error:
        draft.withdraw()
        if isinstance(error, OSError):
            raise CheckpointError(
                f"{draft}: {error.filename or draft.path} could not be written: {error.strerror}"
            ) from error
        raise
    tidy(draft, keep)
    return path


def _publish(draft: Draft) -> Path:
    missing = draft.missing()
    if missing:
        raise CheckpointError(f"{draft}: no part of rank {', '.join(map(str, missing))}")
    read = [parts.read(draft.part_path(rank), rank) for rank in draft.writers]
    metadata = pickle.dumps(_metadata(draft, read))
    listed = [file for part in read for file in part.files] + user_files.merge(draft, read)
    for file in listed:
        files.check_size(draft.path / file.name, file.size_bytes, draft.path)
    files.write_new(draft.path / METADATA_NAME, metadata)
    listed.append(FileEntry(METADATA_NAME, len(metadata), hashlib.sha256(metadata).hexdigest()))
    files.write_new(
        draft.path / manifest.FILE_NAME, manifest.encode(_manifest(draft, tuple(listed)))
    )
    return give_name(draft)


def _manifest(draft: Draft, listed: tuple[FileEntry, ...]) -> Manifest:
    return Manifest(
        job=draft.job,
        kind=draft.kind,
        version=draft.version,
        generation=draft.generation,
        world_size=draft.world_size,
        writers=draft.writers,
        saved_at=date(),
        fault=draft.fault,
        torch=str(torch.__version__),
        states=draft.states,
        host=socket.gethostname(),
        publisher=owners.myself(),
        files=listed,
    )


def _check_same(
    draft: Draft, first: int, entry: parts.Entry, second: int, other: parts.Entry
) -> None:
    """Of a piece that the ranks `first` and `second` have written: the second one's is kept.

    Those of two sizes are not compared. Running statistics of replicas may differ.
    """
    are_comparable = entry.digest and other.digest and entry.sizes == other.sizes
    if are_comparable and entry.digest != other.digest and _once.is_new(draft.job):
        log.warning(
            "%s: %s differs between rank %d and rank %d, and that of the latter is kept. Unless it "
            "is a buffer, they are parts of different models, as the stages of a pipeline are: "
            "give the TrainState a shard_id that is the same on the ranks of one part alone",
            draft,
            entry.name,
            first,
            second,
        )


def _metadata(draft: Draft, read: list[parts.Part]) -> Metadata:
    """What DCP needs to find every piece. Raises CheckpointError: the parts are no whole."""
    seen: dict[str, tuple[object, ...]] = {}
    info = internal(filesystem, "_StorageInfo")
    storage: dict[MetadataIndex, Any] = {}
    written: dict[MetadataIndex, tuple[int, parts.Entry]] = {}
    plans: list[SavePlan] = []
    for part in read:
        items = []
        for entry in part.entries:
            kind = (entry.global_shape, entry.dtype, entry.offsets is None)
            if seen.setdefault(entry.name, kind) != kind:
                raise CheckpointError(
                    f"{draft}: {entry.name} is {kind[:2]} on rank {part.rank} "
                    f"and {seen[entry.name][:2]} on another"
                )
            item = (
                value_item(entry.name)
                if entry.offsets is None
                else piece_item(
                    entry.name,
                    entry.offsets,
                    entry.sizes,
                    entry.global_shape,
                    getattr(torch, entry.dtype),
                )
            )
            if entry.offsets is None and item.index in storage:
                raise CheckpointError(
                    f"{draft}: {entry.name} was given by two ranks: values of "
                    "one rank need a name of their own"
                )
            # Two ranks may have written the same piece: either will do, if they are equal.
            first = written.setdefault(item.index, (part.rank, entry))
            _check_same(draft, *first, part.rank, entry)
            storage[item.index] = info(entry.file, entry.offset_bytes, entry.length_bytes)
            items.append(item)
        plans.append(SavePlan(items))
    try:
        _, metadata = DefaultSavePlanner(flatten_state_dict=False).create_global_plan(plans)
    except ValueError as error:
        raise CheckpointError(f"{draft}: the pieces do not make up the tensors: {error}") from error
    for name, tensor in metadata.state_dict_metadata.items():
        if not isinstance(tensor, BytesStorageMetadata):
            have, need = (
                sum(math.prod(chunk.sizes) for chunk in tensor.chunks),
                math.prod(tensor.size),
            )
            if have != need:
                raise CheckpointError(
                    f"{draft}: {name} is not whole: {have} of {need} elements were written"
                )
    metadata.storage_data = storage
    metadata.storage_meta = StorageMeta()
    # torch before 2.9 has no version of the format, and does not ask for one
    if hasattr(filesystem, "CURRENT_DCP_VERSION"):
        metadata.version = filesystem.CURRENT_DCP_VERSION
    return metadata
