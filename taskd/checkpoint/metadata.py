"""Reading DCP's `.metadata`, which is a pickle, without running what somebody may have put into it.

The unpickler knows the classes that DCP writes there and nothing else; what comes out is then
checked value by value.
"""

import io
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint import metadata as dcp

from taskd.checkpoint import files
from taskd.checkpoint.dcp import internal
from taskd.checkpoint.manifest import METADATA_NAME, Manifest, is_count
from taskd.errors import CorruptCheckpointError

_DCP_CLASSES = (
    "ChunkStorageMetadata",
    "TensorStorageMetadata",
    "BytesStorageMetadata",
    "Metadata",
    "MetadataIndex",
    "TensorProperties",
    "StorageMeta",
    "_MEM_FORMAT_ENCODING",
)
_ADMITTED: dict[tuple[str, str], Any] = {
    **{
        (module.__name__, name): getattr(module, name)
        for module, names in (
            (dcp, _DCP_CLASSES),
            (filesystem, ("_StorageInfo",)),
            (torch, ("Size",)),
            (torch.serialization, ("_get_layout",)),
        )
        for name in names
        if hasattr(module, name)
    },
    **{
        ("torch", name): value
        for name, value in vars(torch).items()
        if isinstance(value, torch.dtype)
    },
}


class _Refused(Exception):  # noqa: N818
    """The pickle names something that DCP's metadata has no use for."""


def _member(*arguments: Any) -> Any:
    """In place of `getattr`, by which CPython 3.11.2 pickles a member of an Enum.

    3.11.7 pickles its class and its value, as 3.10 and 3.12 do. DCP has one Enum in its metadata.
    """
    encoding = _ADMITTED.get((dcp.__name__, "_MEM_FORMAT_ENCODING"))
    match arguments:
        case (owner, str(name)) if encoding is not None and owner is encoding:
            if name in encoding.__members__:
                return encoding[name]
    raise _Refused("builtins.getattr")


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member
        try:
            return _ADMITTED[module, name]
        except KeyError:
            raise _Refused(f"{module}.{name}") from None


def read(path: Path, manifest: Manifest) -> dcp.Metadata:
    """The metadata of the checkpoint at `path`.

    Its file is verified, and every place that it names lies within a file of the manifest.

    Raises:
        CorruptCheckpointError: names the file.
    """
    sizes = {file.name: file.size_bytes for file in manifest.files}
    (entry,) = (file for file in manifest.files if file.name == METADATA_NAME)
    place = path / METADATA_NAME
    files.check_content(place, entry.size_bytes, entry.sha256, path)
    try:
        metadata = _Unpickler(io.BytesIO(files.read(place, entry.size_bytes))).load()
        reason = _problem(metadata, sizes)
    except _Refused as error:
        raise CorruptCheckpointError(
            f"{place}: contains pickled code: refused ({error})"
        ) from error
    # A damaged pickle may raise anything.
    except Exception as error:
        raise CorruptCheckpointError(f"{place}: is damaged: {error!r}") from error
    if reason:
        raise CorruptCheckpointError(f"{place}: is damaged: {reason}")
    return metadata


def _problem(metadata: Any, sizes: dict[str, int]) -> str:
    if (
        type(metadata) is not dcp.Metadata
        or type(metadata.state_dict_metadata) is not dict
        or type(metadata.storage_data) is not dict
    ):
        return "it is no metadata of DCP"
    for index, info in metadata.storage_data.items():
        if (
            type(index) is not dcp.MetadataIndex
            or type(info) is not internal(filesystem, "_StorageInfo")
            or info.transform_descriptors
        ):
            return f"{index!r} is stored in a way that is not known"
        is_within = info.relative_path in sizes and is_count(info.offset) and is_count(info.length)
        if not is_within or info.offset + info.length > sizes[info.relative_path]:
            return f"{index.fqn} is said to be outside the files of the manifest"
    for name, content in metadata.state_dict_metadata.items():
        reason = _problem_of(name, content, metadata.storage_data)
        if reason:
            return f"{name!r} {reason}"
    return ""


def _problem_of(name: Any, content: Any, storage: dict[Any, Any]) -> str:
    if type(name) is not str:
        return "is no name"
    if type(content) is dcp.BytesStorageMetadata:
        return "" if dcp.MetadataIndex(name) in storage else "is not stored anywhere"
    is_tensor = (
        type(content) is dcp.TensorStorageMetadata
        and type(content.properties) is dcp.TensorProperties
    )
    if (
        not is_tensor
        or type(content.size) is not torch.Size
        or not isinstance(content.properties.dtype, torch.dtype)
        or type(content.chunks) is not list
    ):
        return "is neither a tensor nor a value"
    for chunk in content.chunks:
        shapes_fit = type(chunk) is dcp.ChunkStorageMetadata and len(chunk.sizes) == len(
            chunk.offsets
        ) == len(content.size)
        if not shapes_fit or any(
            offset < 0 or size < 0 or offset + size > whole
            for offset, size, whole in zip(chunk.offsets, chunk.sizes, content.size, strict=True)
        ):
            return f"has a piece outside its shape {tuple(content.size)}"
        if dcp.MetadataIndex(name, chunk.offsets) not in storage:
            return f"has a piece at {tuple(chunk.offsets)} that is not stored anywhere"
    return ""
