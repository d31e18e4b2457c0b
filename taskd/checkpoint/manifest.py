"""The manifest of a checkpoint, `taskd.json`.

What it is, who wrote it, and the size and checksum of every file.

Owns the format and its strict reading: nothing in a file is believed before its checksum and the
type of each value are right. Needs no torch.
"""

import hashlib
import json
import re
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from taskd.checkpoint import files
from taskd.checkpoint.names import MAX_VERSION, Kind
from taskd.errors import CorruptCheckpointError

FORMAT = 1
FILE_NAME = "taskd.json"
METADATA_NAME = ".metadata"  # DCP's
USER_FOLDER = "user"  # files of the user's own, see user_files.py
_MAX_NAME = 1024
MAX_BYTES = 64 << 20  # 65,536 writers need 10 MB
FLAT_SUFFIX = ".safetensors"  # of a state without DCP's tensors, see flat.py
# Also what keeps a manifest from pointing outside its folder.
_DATA_NAME = re.compile(r"__\d{1,9}_\d{1,9}\.(distcp|safetensors)")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class FileEntry:
    """One file as it was written."""

    name: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """A complete checkpoint.

    `writers` are the ranks that wrote, of `world_size` that trained; `fault` is "" for a periodic
    one.
    """

    job: str
    kind: Kind
    version: int  # number of committed steps
    generation: int
    world_size: int
    writers: tuple[int, ...]
    saved_at: str  # UTC, ISO 8601; sorts like time
    fault: str
    torch: str
    states: tuple[str, ...]  # names of the TrainStates
    host: str
    publisher: str  # the process that published it, see owners.py
    files: tuple[FileEntry, ...]

    @property
    def size_bytes(self) -> int:
        """Of all files but the manifest."""
        return sum(file.size_bytes for file in self.files)

    @property
    def is_flat(self) -> bool:
        """Whether DCP has no part in it (flat.py): torch cannot read it."""
        return all(file.name != METADATA_NAME for file in self.files)


def is_file_of_checkpoint(name: str) -> bool:
    """Whether a manifest may list a file of this name."""
    return name == METADATA_NAME or _DATA_NAME.fullmatch(name) is not None or is_file_of_user(name)


def is_file_of_user(name: str) -> bool:
    """Whether it is the name of a file within the user's own folder."""
    first, *others = name.split("/")
    return (
        first == USER_FOLDER
        and bool(others)
        and len(name) <= _MAX_NAME
        and all(part not in ("", ".", "..") and "\0" not in part for part in others)
    )


def encode(manifest: Manifest) -> bytes:
    """The content of the file."""
    document = {"format": FORMAT, **asdict(manifest), "kind": manifest.kind.value}
    return json.dumps({**document, "checksum": _checksum(document)}, indent=1).encode() + b"\n"


def decode(data: bytes) -> Manifest:
    """Raises CorruptCheckpointError, whose text is the reason alone."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"is damaged: {error}") from error
    if not isinstance(document, dict):
        raise CorruptCheckpointError("is damaged: no JSON object")
    # First: a later format may have other fields and another checksum.
    if document.get("format") != FORMAT or type(document["format"]) is not int:
        raise CorruptCheckpointError(
            f"has format {document.get('format')!r}; this version of taskd reads format {FORMAT}"
        )
    checksum = document.pop("checksum", None)
    if checksum != _checksum(document):
        raise CorruptCheckpointError("is damaged: its checksum is wrong")
    del document["format"]
    return _manifest(document)


def read(folder: Path) -> Manifest:
    """The manifest of a checkpoint. Raises CorruptCheckpointError, which names the file."""
    path = folder / FILE_NAME
    data = files.read(path, MAX_BYTES)
    try:
        return decode(data)
    except CorruptCheckpointError as error:
        raise CorruptCheckpointError(f"{path}: {error}") from error


def _checksum(document: dict[str, Any]) -> str:
    return hashlib.sha256(
        json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
    ).hexdigest()


def _manifest(document: dict[str, Any]) -> Manifest:
    expected = {field.name for field in fields(Manifest)}
    if document.keys() != expected:
        raise CorruptCheckpointError(
            f"has the fields {sorted(document)}, expected {sorted(expected)}"
        )
    for name in ("version", "generation", "world_size"):
        _check(is_count(document[name]) and document[name] <= MAX_VERSION, name, document[name])
    for name in ("job", "saved_at", "fault", "torch", "host", "publisher"):
        _check(isinstance(document[name], str), name, document[name])
    kinds = {kind.value: kind for kind in Kind}
    _check(
        isinstance(document["kind"], str) and document["kind"] in kinds, "kind", document["kind"]
    )
    writers, states, entries = document["writers"], document["states"], document["files"]
    _check(
        isinstance(writers, list) and all(is_count(rank) for rank in writers), "writers", writers
    )
    _check(
        isinstance(states, list) and all(isinstance(name, str) for name in states), "states", states
    )
    _check(isinstance(entries, list) and len(entries) > 0, "files", entries)
    listed = tuple(_entry(entry) for entry in entries)
    names = [entry.name for entry in listed]
    is_flat = any(name.endswith(FLAT_SUFFIX) for name in names)
    _check(len(set(names)) == len(names) and is_flat != (METADATA_NAME in names), "files", names)
    return Manifest(
        **{
            **document,
            "kind": kinds[document["kind"]],
            "writers": tuple(writers),
            "states": tuple(states),
            "files": listed,
        }
    )


def _entry(entry: object) -> FileEntry:
    _check(
        isinstance(entry, dict) and entry.keys() == {"name", "size_bytes", "sha256"}, "files", entry
    )
    assert isinstance(entry, dict)
    _check(isinstance(entry["name"], str) and is_file_of_checkpoint(entry["name"]), "files", entry)
    _check(
        is_count(entry["size_bytes"])
        and isinstance(entry["sha256"], str)
        and _SHA256.fullmatch(entry["sha256"]) is not None,
        "files",
        entry,
    )
    return FileEntry(**entry)


def is_count(value: object) -> bool:
    """Whether it is an integer, 0 or more, and no bool."""
    return type(value) is int and value >= 0


def _check(is_right: bool, field: str, value: object) -> None:
    if not is_right:
        raise CorruptCheckpointError(f"has a wrong value for {field}: {str(value)[:100]}")
