"""Files that are whole or absent, and fingerprints of large ones. Knows nothing of what they hold.

A fingerprint is the SHA-256 of a file's size and of blocks that are spread over it evenly: all of a
file of up to 16 MiB, 16 MiB of a larger one. Every rank looks at the files of all, and so each
comes to the same answer, without reading terabytes. What it finds: another file under the name, one
that was cut off, extended or zeroed. What it may miss: single bits that have changed on the disk.
"""

import hashlib
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from mindx_elastic.errors import DamagedFileError

_BLOCK_BYTES = 64 << 10
_BLOCKS = 256


@contextmanager
def opened(path: str) -> Iterator[int]:
    """Descriptor of a regular file. Raises DamagedFileError; a pipe is not waited for."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise DamagedFileError(f"{path}: is missing") from None
    except (OSError, ValueError) as error:
        raise DamagedFileError(f"{path}: cannot be opened: {error}") from error
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise DamagedFileError(f"{path}: is no regular file")
        yield descriptor
    except OSError as error:
        raise DamagedFileError(f"{path}: cannot be read: {error}") from error
    finally:
        os.close(descriptor)


def read(path: str, limit_bytes: int) -> bytes:
    """The content. Raises DamagedFileError, also if it has more than `limit_bytes`."""
    with opened(path) as descriptor:
        size = os.fstat(descriptor).st_size
        if size > limit_bytes:
            raise DamagedFileError(
                f"{path}: has {size} bytes, more than the {limit_bytes} that are accepted"
            )
        with open(descriptor, "rb", closefd=False) as file:
            return file.read(limit_bytes)


def write(path: str, data: bytes) -> None:
    """Replace a file at once: whoever looks sees the old content or the new one. Raises OSError."""
    folder = os.path.dirname(path)
    os.makedirs(folder, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=folder, prefix=".mindx-")
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fchmod(file.fileno(), 0o644)
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise
    sync_folder(folder)


def publish(source: str, target: str) -> None:
    """Have a written file on the disk, then give it its name, at once. Raises OSError."""
    sync(source)
    os.replace(source, target)
    sync_folder(os.path.dirname(target))


def sync(path: str) -> None:
    """Have a file that somebody has written on the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(path: str) -> None:
    """Have the names in a folder on the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fingerprint(path: str) -> tuple[int, str]:
    """Size in bytes, and the fingerprint. Raises DamagedFileError."""
    with opened(path) as descriptor:
        size = os.fstat(descriptor).st_size
        found = hashlib.sha256(size.to_bytes(8, "big"))
        for offset in _offsets(size):
            block = os.pread(descriptor, _BLOCK_BYTES, offset)
            if len(block) != min(_BLOCK_BYTES, size - offset):
                raise DamagedFileError(f"{path}: has become shorter while it was read")
            found.update(block)
        return size, found.hexdigest()


def _offsets(size: int) -> Iterator[int]:
    if size <= _BLOCK_BYTES * _BLOCKS:
        yield from range(0, size, _BLOCK_BYTES)
        return
    last = size - _BLOCK_BYTES
    for index in range(_BLOCKS):
        yield last * index // (_BLOCKS - 1)
