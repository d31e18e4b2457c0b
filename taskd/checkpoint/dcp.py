"""DCP's description of a piece of a tensor or of a plain value that is to be written."""

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from taskd.errors import CheckpointError


def internal(module: ModuleType, name: str) -> Any:
    """What DCP does not document.

    Raises CheckpointError: this torch has it no more, so that nothing is written or read.
    """
    try:
        return getattr(module, name)
    except AttributeError:
        raise CheckpointError(
            f"torch {torch.__version__} has no {module.__name__}.{name}: with this torch taskd "
            "neither writes nor reads checkpoints; recovery in place goes on"
        ) from None


def value_item(name: str) -> WriteItem:
    """A plain value."""
    return WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO)


def piece_item(
    name: str,
    offsets: Sequence[int],
    sizes: Sequence[int],
    global_shape: Sequence[int],
    dtype: torch.dtype,
) -> WriteItem:
    """The box of `sizes` at `offsets` in a tensor of `global_shape`."""
    data = TensorWriteData(
        chunk=ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes)),
        properties=TensorProperties(dtype=dtype),
        size=torch.Size(global_shape),
    )
    index = MetadataIndex(name, data.chunk.offsets)
    return WriteItem(index, WriteItemType.SHARD, tensor_data=data)
