"""Names of the folders in a checkpoint directory. Knows no file system.

    step-000000001200                            a periodic checkpoint after 1200 committed steps
    dump-000000001200-2                          a second dump of that version
    save-000000001200                            one that the script asked for at that point
    .step-000000001200.partial-<mark>-<attempt>  being written
    .step-000000001200.removed-<mark>-<unique>   being deleted

<mark> stands for the job, <attempt> for one series of writings. What begins with a dot is never
loaded.
"""

import hashlib
import re
from dataclasses import dataclass
from enum import Enum

from taskd.errors import CheckpointError

MAX_VERSION = 10**12 - 1  # twelve digits, so that names sort like numbers
_FINAL = re.compile(r"(step|dump|save)-(\d{12})(?:-([2-9]|[1-9]\d{1,3}))?")
_HIDDEN = re.compile(
    r"\.(step|dump|save)-(\d{12})\.(partial|removed)-([0-9a-f]{12})-([A-Za-z0-9_-]{1,64})"
)
_ATTEMPT = re.compile(r"[A-Za-z0-9_-]{1,64}")


class Kind(Enum):
    """Why a checkpoint was written. The values are in manifests."""

    PERIODIC = "periodic"  # every n steps; the older ones are deleted
    DUMP = "dump"  # because the job had to end; taskd never deletes it
    SAVED = "saved"  # because the script said so; nor this


_PREFIX = {Kind.PERIODIC: "step", Kind.DUMP: "dump", Kind.SAVED: "save"}
_KIND = {prefix: kind for kind, prefix in _PREFIX.items()}


@dataclass(frozen=True)
class Hidden:
    """A folder that is being written (`is_partial`) or deleted."""

    kind: Kind
    version: int
    is_partial: bool
    mark: str
    attempt: str


def job_mark(job: str) -> str:
    """Stands for the job in names of folders, whatever characters its id has."""
    return hashlib.sha256(job.encode()).hexdigest()[:12]


def final_name(kind: Kind, version: int, number: int = 1) -> str:
    """The published name; `number` tells apart those of one version."""
    if not 0 <= version <= MAX_VERSION:
        raise CheckpointError(f"version {version} is not between 0 and {MAX_VERSION}")
    return f"{_PREFIX[kind]}-{version:012d}" + (f"-{number}" if number > 1 else "")


def parse_final(name: str) -> tuple[Kind, int] | None:
    """Kind and version, None for a name that is not ours."""
    found = _FINAL.fullmatch(name)
    return (_KIND[found[1]], int(found[2])) if found else None


def partial_name(kind: Kind, version: int, job: str, attempt: str) -> str:
    """The name while it is written: the same for all writers of one attempt."""
    if not _ATTEMPT.fullmatch(attempt):
        raise CheckpointError(f"attempt {attempt!r}: expected 1 to 64 of A-Z, a-z, 0-9, _ and -")
    return f".{final_name(kind, version)}.partial-{job_mark(job)}-{attempt}"


def removed_name(kind: Kind, version: int, job: str, unique: str) -> str:
    """The name from the moment at which its deletion begins."""
    return f".{final_name(kind, version)}.removed-{job_mark(job)}-{unique}"


def parse_hidden(name: str) -> Hidden | None:
    """What a name that begins with a dot says, None if it is not ours."""
    found = _HIDDEN.fullmatch(name)
    return (
        Hidden(_KIND[found[1]], int(found[2]), found[3] == "partial", found[4], found[5])
        if found
        else None
    )
