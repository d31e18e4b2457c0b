"""Files in a format of the user's own, beside the tensors of a checkpoint.

They appear with it, all of them, or not at all.

    every writer   <draft>/user.<rank>/   written by a function of the user's, synced and hashed
    publisher      <draft>/user/          those of all writers, listed in the manifest

They must not cost the tensors: if a rank cannot write its own, or two ranks write the same name,
none is published, and a warning says why.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import stat
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from taskd.checkpoint import files
from taskd.checkpoint.manifest import USER_FOLDER, FileEntry, is_file_of_user
from taskd.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from taskd.checkpoint.draft import Draft
    from taskd.checkpoint.parts import Part

log = logging.getLogger(__name__)


def staging(draft: Draft, rank: int) -> Path:
    """Where a rank writes them."""
    return draft.path / f"{USER_FOLDER}.{rank}"


def collect(
    draft: Draft, rank: int, fill: Callable[[Path], object]
) -> tuple[tuple[FileEntry, ...], str]:
    """Let `fill` write its files. Returns them, on the disk and hashed, or none and the problem."""
    folder = staging(draft, rank)
    try:
        os.mkdir(folder)
        fill(folder)
        found = tuple(_entry(folder, path) for path in _walk(folder))
    except Exception as error:  # the user's function: whatever it raises, the tensors are saved
        log.warning(
            "%s: rank %d: the files of on_dump() could not be written: %s",
            draft,
            rank,
            error,
            exc_info=not isinstance(error, CheckpointError),
        )
        shutil.rmtree(folder, ignore_errors=True)
        return (), f"rank {rank}: {error}"
    return found, ""


def merge(draft: Draft, parts: Sequence[Part]) -> list[FileEntry]:
    """Bring those of all ranks together. What it returns is in place and on the disk."""
    problem = next((part.user_problem for part in parts if part.user_problem), "")
    names = [file.name for part in parts for file in part.user_files]
    if len(set(names)) != len(names):
        problem = problem or (
            f"{next(name for name in names if names.count(name) > 1)} was written by two ranks"
        )
    if not problem:
        try:
            return _move(draft, parts)
        except OSError as error:
            problem = f"{error.filename}: {error.strerror}"
    with suppress(OSError):
        files.remove(draft.path / USER_FOLDER)
    log.warning("%s: the files of on_dump() are left out: %s", draft, problem)
    return []


def _move(draft: Draft, parts: Sequence[Part]) -> list[FileEntry]:
    moved, folder = [], draft.path / USER_FOLDER
    if folder.is_symlink():
        raise OSError(errno.ELOOP, "is a symbolic link", os.fspath(folder))
    for part in parts:
        for file in part.user_files:
            target = draft.path / file.name
            os.makedirs(target.parent, exist_ok=True)
            os.rename(staging(draft, part.rank) / Path(file.name).relative_to(USER_FOLDER), target)
            moved.append(file)
    for folder in {Path(parent) for parent, _, _ in os.walk(draft.path / USER_FOLDER)}:
        files.sync_folder(folder)
    return moved


def _walk(folder: Path) -> Iterator[Path]:
    for parent, folders, names in os.walk(folder):
        for name in (*names, *(name for name in folders if (Path(parent) / name).is_symlink())):
            yield Path(parent) / name


def _entry(folder: Path, path: Path) -> FileEntry:
    name = f"{USER_FOLDER}/{path.relative_to(folder)}"
    if not is_file_of_user(name) or not stat.S_ISREG(os.lstat(path).st_mode):
        raise CheckpointError(
            f"{path.relative_to(folder)} is no regular file, or its name is too long"
        )
    with open(path, "rb") as file:
        sha256, size_bytes = files.digest(file.fileno())
        os.fsync(file.fileno())
    return FileEntry(name, size_bytes, sha256)
