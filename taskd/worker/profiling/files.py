"""Where a profile is written.

<base>/<job>/<rank>/<unix seconds>, in files of 10 MiB, within a limit for the whole folder.

Owns paths, modes, rotation and the removal of old files. Knows nothing of what the lines say.
Symbolic links are refused from the base on: the folder may be writable for others, and a link in it
would let them choose what is written to or removed.
"""

import os
import pathlib
import re
import stat
import time
from collections.abc import Callable
from contextlib import suppress

MAX_FILE_BYTES = 10 * 1024 * 1024
GROUPS_FILE = "parallel_group.json"
_DIRECTORY_MODE = 0o755
_FILE_MODE = 0o644
_KEPT = 3  # files of a rank and job that stay in any case
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_MAX_NAME = 200


def part_of_path(name: str) -> str:
    """A job's name as one component of a path."""
    text = re.sub(r"[^\w.-]", "_", name)[:_MAX_NAME]
    return text if text.strip(".") else "_"


def open_folder(base: pathlib.Path, *parts: str) -> int:
    """A descriptor of <base>/<parts>, made as far as it is missing.

    Raises OSError, also for a symbolic link.
    """
    base.parent.mkdir(parents=True, exist_ok=True)
    descriptor = _open_directory(os.fspath(base), None)
    for part in parts:
        above = descriptor
        try:
            descriptor = _open_directory(part, above)
        finally:
            os.close(above)
    return descriptor


def _open_directory(name: str, above: int | None) -> int:
    is_new = True
    try:
        os.mkdir(name, _DIRECTORY_MODE, dir_fd=above)
    except FileExistsError:
        is_new = False
    descriptor = os.open(name, _DIRECTORY, dir_fd=above)
    if is_new:
        with suppress(OSError):  # the umask may have taken bits away
            os.fchmod(descriptor, _DIRECTORY_MODE)
    return descriptor


def create_file(folder: int, name: str) -> int:
    """A descriptor of a new file. Raises FileExistsError, also for a symbolic link."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_APPEND | os.O_CLOEXEC
    descriptor = os.open(name, flags, _FILE_MODE, dir_fd=folder)
    with suppress(OSError):
        os.fchmod(descriptor, _FILE_MODE)
    return descriptor


def write_all(descriptor: int, data: bytes) -> None:
    """All or nothing, as far as the file system lets us: what a full disk cut off is taken back."""
    before = os.fstat(descriptor).st_size
    rest = memoryview(data)
    try:
        while rest:
            rest = rest[os.write(descriptor, rest) :]
    except OSError:
        with suppress(OSError):
            os.ftruncate(descriptor, before)
        raise


class ProfileFiles:
    """The files of one rank. Used by one thread. Everything but `close` raises OSError."""

    def __init__(
        self, base: pathlib.Path, job_id: str, rank: int, head: Callable[[], bytes]
    ) -> None:
        """`head`: asked for the first line of each file.

        Nothing is touched until the first `open`.
        """
        self._base = base
        self._job = part_of_path(job_id)
        self._rank = str(rank)
        self._head = head
        self._descriptor = -1
        self._name = ""
        self._size = 0

    @property
    def path(self) -> str:
        """Of the present file (while there is none: of the folder), for log lines."""
        return os.path.join(self._base, self._job, self._rank, self._name).rstrip("/")

    def open(self) -> None:
        """Begin the next file."""
        self.close()
        folder = open_folder(self._base, self._job, self._rank)
        try:
            # Not before the last one, which may have been begun in this very second: the order of
            # names is that of time.
            seconds = max(int(time.time()), int(self._name or 0) + 1)
            while self._descriptor < 0:
                try:
                    self._descriptor = create_file(folder, str(seconds))
                except FileExistsError:  # of the file before, or of an earlier life of this rank
                    seconds += 1
            self._name = str(seconds)
        finally:
            os.close(folder)
        head = self._head()
        self._size = len(head)
        write_all(self._descriptor, head)

    def write(self, data: bytes) -> bool:
        """Append whole lines. True: a new file was begun for them."""
        is_new = self._size + len(data) > MAX_FILE_BYTES or os.fstat(self._descriptor).st_nlink == 0
        if is_new:
            self.open()
        write_all(self._descriptor, data)
        self._size += len(data)
        return is_new

    def close(self) -> None:
        """Twice is once."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            # a network file system may report a lost write here; nothing can be done about it
            with suppress(OSError):
                os.close(descriptor)

    def trim(self, limit_mb: int) -> int:
        """Above the limit: remove the oldest fifth of this rank's files in every job; how many."""
        if _bytes_below(os.fspath(self._base)) <= limit_mb * 1024 * 1024:
            return 0
        removed = 0
        with os.scandir(self._base) as jobs:
            folders = [entry.name for entry in jobs if entry.is_dir(follow_symlinks=False)]
        for job in folders:
            removed += self._trim_job(job)
        return removed

    def _trim_job(self, job: str) -> int:
        path = os.path.join(self._base, job, self._rank)
        try:
            folder = os.open(path, _DIRECTORY)
        except OSError:  # this rank has no files of that job
            return 0
        try:
            with os.scandir(folder) as entries:
                names = sorted(
                    (
                        entry.name
                        for entry in entries
                        if _is_profile(entry.name) and entry.is_file(follow_symlinks=False)
                    ),
                    key=int,
                )
            removed = 0
            if len(names) > _KEPT:
                for name in names[: max(1, len(names) // 5)]:
                    if (job, name) != (self._job, self._name):
                        with suppress(OSError):  # another rank was faster, or it is somebody else's
                            os.unlink(name, dir_fd=folder)
                            removed += 1
            return removed
        finally:
            os.close(folder)


def _is_profile(name: str) -> bool:
    return name.isascii() and name.isdigit()


def _bytes_below(path: str) -> int:
    """Of all regular files. What vanishes meanwhile, or may not be read, does not count."""
    total, todo = 0, [path]
    while todo:
        try:
            with os.scandir(todo.pop()) as entries:
                for entry in entries:
                    with suppress(OSError):
                        if entry.is_dir(follow_symlinks=False):
                            todo.append(entry.path)
                        else:
                            status = entry.stat(follow_symlinks=False)
                            total += status.st_size if stat.S_ISREG(status.st_mode) else 0
        except OSError:
            continue
    return total
