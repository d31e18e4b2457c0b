"""System calls for files that must be whole or absent.

Knows nothing of what they hold, but refuses links and pipes in their place.
"""

import ctypes
import errno
import hashlib
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from taskd.errors import CorruptCheckpointError

_READ_BYTES = 4 << 20  # SHA-256 reaches its full rate far below
_AT_FDCWD = -100
_RENAME_NOREPLACE = 1
# File systems that do not know the flag (NFS), kernels and C libraries that do not know the call.
_NO_SUCH_CALL = {errno.EINVAL, errno.ENOSYS, errno.ENOTSUP}


@contextmanager
def opened(path: Path, within: Path | None = None) -> Iterator[int]:
    """Descriptor of a regular file. A link is not followed, a pipe not waited for.

    Args:
        path: of the file.
        within: a folder above it: a link in place of any folder below is not followed either.

    Raises:
        CorruptCheckpointError: it is missing, no regular file, or cannot be read.
    """
    try:
        descriptor = _open(path, path.parent if within is None else within)
    except FileNotFoundError:
        raise CorruptCheckpointError(f"{path}: is missing") from None
    except OSError as error:
        # a folder that is a link is "not a directory"
        is_link = error.errno == errno.ELOOP or _has_link(path, within)
        reason = "is a symbolic link" if is_link else f"cannot be opened: {error.strerror}"
        raise CorruptCheckpointError(f"{path}: {reason}") from error
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise CorruptCheckpointError(f"{path}: is no regular file")
        try:
            yield descriptor
        except OSError as error:
            raise CorruptCheckpointError(
                f"{path}: cannot be read: {error.strerror or error}"
            ) from error
    finally:
        os.close(descriptor)


def _open(path: Path, within: Path) -> int:
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
    *folders, name = path.relative_to(within).parts
    parent = os.open(within, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for folder in folders:
            below = os.open(folder, flags | os.O_PATH | os.O_DIRECTORY, dir_fd=parent)
            os.close(parent)
            parent = below
        return os.open(name, flags | os.O_NONBLOCK, dir_fd=parent)
    finally:
        os.close(parent)


def _has_link(path: Path, within: Path | None) -> bool:
    return within is not None and any(
        folder.is_symlink() for folder in path.parents if folder.is_relative_to(within)
    )


def read(path: Path, limit_bytes: int) -> bytes:
    """The content. Raises CorruptCheckpointError, also for more than `limit_bytes`."""
    with opened(path) as descriptor:
        size = os.fstat(descriptor).st_size
        if size > limit_bytes:
            raise CorruptCheckpointError(
                f"{path}: has {size} bytes, more than the {limit_bytes} that are accepted"
            )
        with open(descriptor, "rb", closefd=False) as file:
            return file.read(limit_bytes)


def check_size(path: Path, size_bytes: int, within: Path) -> None:
    """Raises CorruptCheckpointError unless it is a regular file of that size. See `opened`."""
    with opened(path, within) as descriptor:
        size = os.fstat(descriptor).st_size
        if size != size_bytes:
            raise CorruptCheckpointError(f"{path}: has {size} bytes, {size_bytes} were written")


def check_content(path: Path, size_bytes: int, sha256: str, within: Path) -> None:
    """Raises CorruptCheckpointError unless it is a regular file of that content. See `opened`."""
    check_size(path, size_bytes, within)
    with opened(path, within) as descriptor:
        found, _ = digest(descriptor)
    if found != sha256:
        raise CorruptCheckpointError(
            f"{path}: its content has changed since it was written "
            f"(SHA-256 {found[:16]}…, expected {sha256[:16]}…)"
        )


def digest(descriptor: int) -> tuple[str, int]:
    """SHA-256 and size of what is to be read from a descriptor. Raises OSError."""
    found, size, buffer = hashlib.sha256(), 0, bytearray(_READ_BYTES)
    view = memoryview(buffer)
    with open(descriptor, "rb", buffering=0, closefd=False) as file:
        while count := file.readinto(buffer):
            found.update(view[:count])
            size += count
    return found.hexdigest(), size


def write_new(path: Path, data: bytes) -> None:
    """Make a file that does not exist yet, and have it on the disk. Raises OSError."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    with open(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Have the names in a folder on the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rename_new(source: Path, target: Path) -> None:
    """Rename a folder to a name that is free. Raises FileExistsError, OSError."""
    try:
        _renameat2(source, target)
    except OSError as error:
        if error.errno not in _NO_SUCH_CALL:
            raise
        os.mkdir(target)  # whoever makes it owns the name,
        os.rename(source, target)  # and an empty folder is the only thing that this can replace


def _renameat2(source: Path, target: Path) -> None:
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), os.fspath(source))
    old, new = os.fsencode(source), os.fsencode(target)
    if call(_AT_FDCWD, old, _AT_FDCWD, new, ctypes.c_uint(_RENAME_NOREPLACE)) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), os.fspath(source), None, os.fspath(target))


def remove_folder(path: Path) -> None:
    """Delete a folder with all that is in it; another process may be doing the same.

    Raises OSError, the first one, with what cannot be deleted still there.
    """
    problems: list[OSError] = []
    with suppress(FileNotFoundError):
        for name in os.listdir(path):
            try:
                remove(path / name)
            except OSError as error:
                problems.append(error)
        if problems:
            raise problems[0]
        os.rmdir(path)


def remove(path: Path) -> None:
    """Delete a file, a link or a folder, if it is there. Raises OSError."""
    if path.is_dir() and not path.is_symlink():
        remove_folder(path)
    else:
        path.unlink(missing_ok=True)
