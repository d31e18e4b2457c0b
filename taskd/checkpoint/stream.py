"""Files that are hashed while they are written, and are on the disk when they are closed.

And who says how far the writing is.
"""

import ctypes
import hashlib
import io
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystem

from taskd.checkpoint.manifest import FileEntry

log = logging.getLogger(__name__)

_PROGRESS_S = 5.0
# The disk is kept busy while the next bytes are hashed, instead of beginning at the end.
_FLUSH_BYTES = 8 << 20
# As much is in memory only, at most: what is told as written is then true, and the sync at the end
# short.
_SYNC_BYTES = 256 << 20
_SYNC_FILE_RANGE_WRITE = 2
_BUFFER_BYTES = 1 << 20  # DCP writes small tensors in dozens of smaller writes


class Progress:
    """Bytes written of `total_bytes`; a line in the log every few seconds."""

    def __init__(self, subject: str, total_bytes: int) -> None:
        self._subject, self._total_bytes = subject, total_bytes
        self._bytes = 0
        self._began = self._said = time.monotonic()

    def add(self, count: int) -> None:
        """So many bytes more."""
        self._bytes += count
        now = time.monotonic()
        if now - self._said >= _PROGRESS_S:
            self._said = now
            rate = self._bytes / (now - self._began) / 1e9
            log.info(
                "%s: %.2f of %.2f GB written, %.2f GB/s",
                self._subject,
                self._bytes / 1e9,
                self._total_bytes / 1e9,
                rate,
            )


class HashedFile(io.RawIOBase):
    """A new file, on the disk once it is closed."""

    def __init__(self, path: str | os.PathLike, progress: Progress) -> None:
        super().__init__()
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        self._progress, self._digest = progress, hashlib.sha256()
        self._name = os.path.basename(path)
        self._size = self._flushed = self._synced = 0
        # what kept it from being written: DCP turns it into errors of its own
        self.error: OSError | None = None

    def writable(self) -> bool:
        """Nothing else."""
        return True

    def tell(self) -> int:
        """Bytes written."""
        return self._size

    def write(self, data: Any) -> int:
        """Write some of `data`. Raises OSError."""
        try:
            count = os.write(self._fd, data)
            self._digest.update(memoryview(data)[:count])
            self._size += count
            if self._size - self._flushed >= _FLUSH_BYTES:
                _begin_flush(self._fd, self._flushed, self._size - self._flushed)
                self._flushed = self._size
            if self._size - self._synced >= _SYNC_BYTES:
                os.fdatasync(self._fd)
                self._synced = self._size
        except OSError as error:
            self.error = self.error or error
            raise
        self._progress.add(count)
        return count

    def close(self) -> None:
        """Have it on the disk. Raises OSError."""
        if self.closed:
            return
        try:
            if self.error is None:
                os.fsync(self._fd)
        except OSError as error:
            self.error = error
            raise
        finally:
            os.close(self._fd)
            super().close()

    @property
    def entry(self) -> FileEntry:
        """For the manifest."""
        return FileEntry(self._name, self._size, self._digest.hexdigest())


def _begin_flush(fd: int, offset_bytes: int, count: int) -> None:
    """Have the kernel begin to write these bytes to the disk.

    A hint: whether it did is told by the sync at the end.
    """
    call = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if call is not None:
        call(
            ctypes.c_int(fd),
            ctypes.c_int64(offset_bytes),
            ctypes.c_int64(count),
            ctypes.c_uint(_SYNC_FILE_RANGE_WRITE),
        )


class HashedFiles(FileSystem):
    """What DCP's writer writes to."""

    def __init__(self, progress: Progress) -> None:
        super().__init__()
        self._progress = progress
        self.files: list[HashedFile] = []

    @contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Iterator[io.IOBase]:
        """A new file for writing; DCP asks for nothing else."""
        assert mode == "wb", mode
        file = HashedFile(path, self._progress)
        self.files.append(file)
        with io.BufferedWriter(file, _BUFFER_BYTES) as stream:
            yield stream

    @property
    def error(self) -> OSError | None:
        """The first that any of the files met."""
        return next((file.error for file in self.files if file.error is not None), None)
