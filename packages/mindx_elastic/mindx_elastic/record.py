"""What one rank says of its dying gasp: the manifest that lies beside its files.

A second copy lies where the next start looks for it (`place.record_path`). Owns the format and its
strict reading: nothing is believed before the checksum and the type of each value are right.
"""

import hashlib
import json
import re
from dataclasses import asdict, dataclass, fields
from datetime import datetime, timezone
from typing import Any

from mindx_elastic import files
from mindx_elastic.errors import DamagedFileError

FORMAT = 1
SAVING, SAVED, FAILED = "saving", "saved", "failed"
LEFT = "left to others"  # its replicas save, or its chip is faulty
_STATES = (SAVING, SAVED, FAILED, LEFT)
SUFFIX = ".json"  # beside the file: no pattern for checkpoints fits it
MAX_BYTES = 16 << 20  # groups of 65,536 ranks need 0.5 MB
MAX_RANK = 65_535  # what is above is no rank, but damage
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class SavedFile:
    """A file as it was written."""

    path: str
    size_bytes: int
    fingerprint: str


@dataclass(frozen=True)
class Record:
    """The dying gasp of one rank.

    `groups` are the ranks that hold the same state, as far as this rank knows: its own group, or
    all of them.
    """

    job: str
    framework: str  # "mindspore" or "torch"
    rank: int
    world_size: int
    epoch: int
    step: int  # the last whole one
    state: str
    files: tuple[SavedFile, ...]
    groups: tuple[tuple[int, ...], ...]
    fault_ranks: tuple[int, ...]
    prefix: str  # of the names of ordinary checkpoints beside it; "" if nothing is known of them
    cause: str
    began_at: str  # when this life of the training began; UTC, ISO 8601, sorts like time
    saved_at: str


def now() -> str:
    """As in `began_at` and `saved_at`."""
    return datetime.now(timezone.utc).isoformat(timespec="microseconds")


def encode(record: Record) -> bytes:
    """The content of the file."""
    document = {"format": FORMAT, **json.loads(json.dumps(asdict(record)))}
    return json.dumps({**document, "checksum": _checksum(document)}, indent=1).encode() + b"\n"


def write(path: str, record: Record) -> None:
    """Raises OSError."""
    files.write(path, encode(record))


def read(path: str) -> Record:
    """Raises DamagedFileError, which names the file."""
    data = files.read(path, MAX_BYTES)
    try:
        return _decode(data)
    except DamagedFileError as error:
        raise DamagedFileError(f"{path}: {error}") from error


def _checksum(document: dict[str, Any]) -> str:
    text = json.dumps(document, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _decode(data: bytes) -> Record:
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise DamagedFileError(f"is damaged: {error}") from error
    if not isinstance(document, dict):
        raise DamagedFileError("is damaged: no JSON object")
    if document.get("format") != FORMAT:
        raise DamagedFileError(
            f"has format {document.get('format')!r}; this version reads format {FORMAT}"
        )
    if document.pop("checksum", None) != _checksum(document):
        raise DamagedFileError("is damaged: its checksum is wrong")
    del document["format"]
    if document.keys() != {field.name for field in fields(Record)}:
        raise DamagedFileError(f"has the fields {sorted(document)}")
    return _record(document)


def _record(document: dict[str, Any]) -> Record:
    for name in ("job", "framework", "prefix", "cause", "began_at", "saved_at"):
        _check(isinstance(document[name], str), name, document[name])
    for name in ("rank", "world_size", "epoch", "step"):
        _check(_is_count(document[name]), name, document[name])
    _check(document["state"] in _STATES, "state", document["state"])
    saved, groups, faults = document["files"], document["groups"], document["fault_ranks"]
    _check(isinstance(saved, list), "files", saved)
    _check(isinstance(groups, list) and all(_are_ranks(one) for one in groups), "groups", groups)
    _check(_are_ranks(faults), "fault_ranks", faults)
    return Record(
        **{
            **document,
            "files": tuple(_file(one) for one in saved),
            "groups": tuple(tuple(one) for one in groups),
            "fault_ranks": tuple(faults),
        }
    )


def _file(entry: object) -> SavedFile:
    _check(
        isinstance(entry, dict)
        and entry.keys() == {"path", "size_bytes", "fingerprint"}
        and isinstance(entry["path"], str)
        and _is_count(entry["size_bytes"])
        and isinstance(entry["fingerprint"], str)
        and _SHA256.fullmatch(entry["fingerprint"]) is not None,
        "files",
        entry,
    )
    assert isinstance(entry, dict)
    return SavedFile(**entry)


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


def _are_ranks(value: object) -> bool:
    return isinstance(value, list) and all(_is_count(rank) and rank <= MAX_RANK for rank in value)


def _check(is_right: bool, field: str, value: object) -> None:
    if not is_right:
        raise DamagedFileError(f"has a wrong value for {field}: {str(value)[:100]}")


def saved_file(path: str) -> SavedFile:
    """Describe a file that was just written. Raises DamagedFileError."""
    size, found = files.fingerprint(path)
    return SavedFile(path, size, found)


def check_files(record: Record) -> None:
    """Raises DamagedFileError unless all its files are as they were written."""
    for file in record.files:
        size, found = files.fingerprint(file.path)
        if size != file.size_bytes:
            raise DamagedFileError(f"{file.path}: has {size} bytes, {file.size_bytes} were written")
        if found != file.fingerprint:
            raise DamagedFileError(f"{file.path}: its content has changed since it was written")
