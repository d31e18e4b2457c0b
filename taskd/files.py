"""Files that taskd writes where others may write, too: no link is followed, nothing is waited for.

A folder for logs may be shared. Whoever can make names in it must not be able to have another file
overwritten by putting a link there, nor to stop a process by a pipe.
"""

import os
import secrets
import stat
from collections.abc import Iterable
from contextlib import suppress

SHARED_MODE = 0o640  # logs and records: the group reads them
SECRET_MODE = 0o600
_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def open_to_append(path: str | os.PathLike[str]) -> int:
    """A descriptor of a regular file, which is made if it is not there. Raises OSError."""
    descriptor = os.open(path, _FLAGS | os.O_APPEND, SHARED_MODE)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(0, "is no regular file", os.fspath(path))
    return descriptor


def append(path: str | os.PathLike[str], lines: Iterable[str]) -> None:
    """Add lines at the end. Raises OSError."""
    with open(open_to_append(path), "w", encoding="utf-8", errors="backslashreplace") as file:
        file.writelines(line + "\n" for line in lines)


def read_lines(path: str | os.PathLike[str], most_bytes: int) -> list[str]:
    """The lines of a regular file. Raises OSError, also if it has more than `most_bytes`."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    status = os.fstat(descriptor)
    is_regular = stat.S_ISREG(status.st_mode)
    if not is_regular or status.st_size > most_bytes:
        os.close(descriptor)
        problem = f"has {status.st_size} bytes" if is_regular else "is no regular file"
        raise OSError(0, problem, os.fspath(path))
    with open(descriptor, encoding="utf-8", errors="backslashreplace") as file:
        return file.read().splitlines()


def write_new(path: str | os.PathLike[str], lines: Iterable[str], mode: int) -> None:
    """Make a file that does not exist yet, not even as a link. Raises OSError."""
    descriptor = os.open(path, _FLAGS | os.O_EXCL, mode)
    with open(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
        file.writelines(line + "\n" for line in lines)


def replace(path: str | os.PathLike[str], lines: Iterable[str]) -> None:
    """Write a file that is there as a whole or not at all, in place of what has its name.

    Raises OSError.
    """
    draft = f"{os.fspath(path)}.{secrets.token_hex(8)}"
    try:
        write_new(draft, lines, SHARED_MODE)
        os.replace(draft, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(draft)
        raise
