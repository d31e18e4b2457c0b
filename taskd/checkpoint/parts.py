"""What one writer tells the publisher: where each piece of each tensor lies in which file.

JSON, because nothing that comes from a file is ever unpickled.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from taskd.checkpoint import files
from taskd.checkpoint.manifest import MAX_BYTES, FileEntry
from taskd.errors import CheckpointError, CorruptCheckpointError


@dataclass(frozen=True)
class Entry:
    """One piece of a tensor, or one plain value (`offsets` None), in a data file.

    Shapes and offsets in elements.
    """

    name: str
    offsets: tuple[int, ...] | None
    sizes: tuple[int, ...]  # of the piece
    global_shape: tuple[int, ...]
    dtype: str  # "float32"; "" for a plain value
    file: str
    offset_bytes: int
    length_bytes: int
    digest: str = ""  # of what others may have written, too: theirs must be equal


@dataclass(frozen=True)
class Part:
    """What a rank wrote, or the problem that kept it from writing."""

    rank: int
    entries: tuple[Entry, ...] = ()
    files: tuple[FileEntry, ...] = ()
    problem: str = ""
    user_files: tuple[FileEntry, ...] = ()
    user_problem: str = ""  # why it has none


def encode(part: Part) -> bytes:
    """The content of `rank-<rank>.json`."""
    return json.dumps(asdict(part)).encode()


def read(path: Path, rank: int) -> Part:
    """The part that `rank` handed over.

    Raises CheckpointError: it could not write it, or the file is damaged.
    """
    try:
        fields = json.loads(files.read(path, MAX_BYTES))
        entries = tuple(_entry(entry) for entry in fields["entries"])
        written, own = (
            tuple(FileEntry(**file) for file in fields[name]) for name in ("files", "user_files")
        )
        part = Part(
            fields["rank"], entries, written, fields["problem"], own, fields["user_problem"]
        )
    except (ValueError, TypeError, KeyError, RecursionError, AttributeError) as error:
        raise CorruptCheckpointError(f"{path}: is damaged: {error!r}") from error
    if part.problem:
        raise CheckpointError(part.problem)
    if part.rank != rank:
        raise CorruptCheckpointError(f"{path}: was written by rank {part.rank}")
    return part


def _entry(fields: dict[str, Any]) -> Entry:
    offsets = fields["offsets"]
    shapes = {name: tuple(fields[name]) for name in ("sizes", "global_shape")}
    return Entry(**{**fields, **shapes, "offsets": None if offsets is None else tuple(offsets)})
