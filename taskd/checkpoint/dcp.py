"""DCP's description of a piece of a tensor or of a plain value that is to be written."""

from collections.abc import Sequence

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType


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
