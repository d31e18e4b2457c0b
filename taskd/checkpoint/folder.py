"""The directory of a job's checkpoints: which are whole, which is the newest, which may go.

Needs no torch: what a file holds is the business of load.py. Never deletes anything but whole
periodic checkpoints of the same job.
"""

import os
import stat
from dataclasses import dataclass
from pathlib import Path

from taskd.checkpoint import files, manifest
from taskd.checkpoint.draft import discard, or_left
from taskd.checkpoint.manifest import Manifest
from taskd.checkpoint.names import Kind, parse_final, parse_hidden
from taskd.errors import CheckpointError, CorruptCheckpointError


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint."""

    path: Path
    manifest: Manifest

    def order(self) -> tuple[int, str, str]:
        """Newer is larger: by version, and by time for the same version."""
        return self.manifest.version, self.manifest.saved_at, self.path.name


@dataclass(frozen=True)
class Scan:
    """A directory as it was: `valid` newest first.

    `passed_over` says why each of the others is not among them.
    """

    valid: list[Checkpoint]
    passed_over: list[tuple[Path, str]]


def scan(
    directory: Path, job: str | None, *, is_full: bool = False, is_flat: bool | None = None
) -> Scan:
    """Look at every checkpoint in `directory`, which may be missing. Changes nothing.

    Args:
        directory: as given to the drafts.
        job: whose checkpoints count; None: any.
        is_full: compare the checksums of all files, which reads all of them; else their presence
            and sizes.
        is_flat: those alone that flat.py has written, or those alone that it has not.

    Raises:
        CheckpointError: the directory cannot be read.
    """
    found: list[Checkpoint] = []
    passed_over: list[tuple[Path, str]] = []
    try:
        names = sorted(os.listdir(directory))
    except FileNotFoundError:
        return Scan([], [])
    except OSError as error:
        raise CheckpointError(f"{directory}: cannot be read: {error.strerror}") from error
    for name in names:
        path = Path(directory) / name
        hidden = parse_hidden(name)
        if hidden is not None and hidden.is_partial:
            passed_over.append((path, "was not finished"))
        elif parse_final(name) is not None:
            try:
                one = check(path, job, is_full=is_full)
                if is_flat in (None, one.manifest.is_flat):
                    found.append(one)
                else:
                    passed_over.append((path, f"is a checkpoint of {one.manifest.torch}"))
            except CorruptCheckpointError as error:
                passed_over.append(
                    (path, str(error).removeprefix(f"{path}: ").removeprefix(f"{path}{os.sep}"))
                )
    return Scan(sorted(found, key=Checkpoint.order, reverse=True), passed_over)


def newest_valid(
    directory: Path, job: str | None, *, is_full: bool = False
) -> tuple[Checkpoint | None, list[tuple[Path, str]]]:
    """The newest one that is whole, dump or periodic, and what was passed over and why.

    Only as many are read in full as it takes.

    Raises CheckpointError.
    """
    found = scan(directory, job)
    passed_over = list(found.passed_over)
    for checkpoint in found.valid:
        wrong = problems(checkpoint.path, is_full=True) if is_full else []
        if not wrong:
            return checkpoint, passed_over
        passed_over.append((checkpoint.path, wrong[0].removeprefix(f"{checkpoint.path}{os.sep}")))
    return None, passed_over


def check(path: Path, job: str | None, *, is_full: bool = False) -> Checkpoint:
    """The checkpoint at `path`.

    Raises CorruptCheckpointError, which names the file and the reason: the first of `problems`.
    """
    found = _inspect(path, job)
    for problem in _problems_of_files(found, is_full=is_full):
        raise problem
    return found


def problems(path: Path, *, is_full: bool) -> list[str]:
    """Everything that is wrong with the checkpoint at `path`, each with the file's name.

    Empty: it is whole.
    """
    try:
        found = _inspect(path, None)
    except CorruptCheckpointError as error:
        return [str(error)]
    return [str(problem) for problem in _problems_of_files(found, is_full=is_full)]


def _inspect(path: Path, job: str | None) -> Checkpoint:
    """All but the data files."""
    if path.is_symlink():
        raise CorruptCheckpointError(f"{path}: is a symbolic link")
    if not path.is_dir():
        raise CorruptCheckpointError(
            f"{path}: " + ("is no folder" if path.exists() else "is missing")
        )
    content = manifest.read(path)
    if job is not None and content.job != job:
        raise CorruptCheckpointError(f"{path}: belongs to job {content.job}")
    named = parse_final(path.name)
    if named is not None and named != (content.kind, content.version):
        raise CorruptCheckpointError(
            f"{path}: its manifest is that of version {content.version}, {content.kind.value}"
        )
    return Checkpoint(path, content)


def _problems_of_files(checkpoint: Checkpoint, *, is_full: bool) -> list[CorruptCheckpointError]:
    found, path = [], checkpoint.path
    for file in checkpoint.manifest.files:
        try:
            if is_full:
                files.check_content(path / file.name, file.size_bytes, file.sha256, path)
            else:
                files.check_size(path / file.name, file.size_bytes, path)
        except CorruptCheckpointError as error:
            found.append(error)
    return found


def exposure(*paths: Path) -> str | None:
    """Which of these folders other users own or can write, and what follows; None: none of them.

    Raises nothing. Where all users are one, as in many containers, it means nothing.
    """
    for path in paths:
        try:
            found = os.stat(path)
        except OSError:
            continue
        mode = stat.S_IMODE(found.st_mode)
        if found.st_uid not in (0, os.geteuid()):
            who = f"belongs to user {found.st_uid}"
        elif mode & stat.S_IWOTH:
            who = f"can be written by every user (mode {mode:04o})"
        else:
            continue
        return (
            f"{path} {who}: whoever can write there can give the job another state, which "
            "checksums do not show"
        )
    return None


def retain(
    directory: Path, job: str, keep: int, *, up_to: int, flat_ranks: int | None = None
) -> list[Path]:
    """Delete the periodic checkpoints of `job` but the newest `keep`.

    Those that are not whole neither count nor are deleted, and so do those that this job could not
    or did not go on from: it never deletes for their sake what it has written.

    Args:
        directory, job: as for `scan`.
        keep: how many are left.
        up_to: the version that was just published.
        flat_ranks: flat ones of so many ranks alone, which read their own; None: those that any
            number of ranks reads.

    Returns what was deleted. Raises CheckpointError.
    """
    if keep < 1:
        raise CheckpointError(f"keep {keep}: at least one checkpoint is kept")
    periodic = [
        one
        for one in scan(directory, job, is_flat=flat_ranks is not None).valid
        if one.manifest.kind is Kind.PERIODIC
        and one.manifest.version <= up_to
        and flat_ranks in (None, one.manifest.world_size)
    ]
    removed = []
    for one in periodic[keep:]:
        ours = {manifest.FILE_NAME, *(file.name for file in one.manifest.files)}
        with or_left(job, one.path):
            if not set(os.listdir(one.path)) - ours:  # else somebody has put something there
                discard(one.path, Kind.PERIODIC, one.manifest.version, job)
                removed.append(one.path)
    return removed
