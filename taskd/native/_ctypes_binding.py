"""The same functions as the compiled `_binding`, through ctypes.

For machines with a C compiler but without Python's headers.

Debian installs Python without them, and nothing here is called often enough to need compiled code.
"""

from __future__ import annotations

import ctypes
import os

from taskd.errors import NativeLibraryError
from taskd.native.library import LIBRARY_PATH

BUILT_FOR_ABI = 2  # TASKD_ABI_VERSION in csrc/include/taskd.h; a test compares


def _open() -> ctypes.CDLL:
    """Raises ImportError, as the compiled binding does when its library is not there."""
    try:
        library = ctypes.CDLL(str(LIBRARY_PATH))
        library.taskd_layout_value.argtypes = [ctypes.c_char_p]
        library.taskd_layout_value.restype = ctypes.c_int64
        library.taskd_guard_start.argtypes = [ctypes.c_int, ctypes.c_int]
        library.taskd_watch.argtypes = [ctypes.c_int, ctypes.c_uint64, ctypes.c_int]
        library.taskd_unwatch.argtypes = [ctypes.c_int]
        library.taskd_prefer_soon.argtypes = []
        library.taskd_waits_hook.argtypes = [ctypes.c_char_p]
        for function in (library.taskd_waits_expire, library.taskd_waits_forgive):
            function.argtypes = [ctypes.POINTER(ctypes.c_int32), ctypes.c_int]
        library.taskd_is_preloaded.argtypes = []
        library.taskd_last_words_start.argtypes = [ctypes.c_int, ctypes.c_int]
        library.taskd_collectives_start.argtypes = [ctypes.c_int]
        library.taskd_collectives_see.argtypes = [
            ctypes.c_uint64,
            ctypes.c_char_p,
            ctypes.c_int64,
            ctypes.c_int64,
        ]
        library.taskd_collectives_add.argtypes = [
            ctypes.c_uint64,
            ctypes.c_char_p,
            *[ctypes.c_int64] * 4,
        ]
        library.taskd_names_numeric.argtypes = [ctypes.c_char_p]
        library.taskd_copy_checksummed.argtypes = [
            ctypes.c_void_p,
            ctypes.c_void_p,
            ctypes.c_size_t,
        ]
        library.taskd_checksum.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        for function in (library.taskd_copy_checksummed, library.taskd_checksum):
            function.restype = ctypes.c_uint64
    except (OSError, AttributeError) as error:
        raise ImportError(str(error)) from error
    return library


_library = _open()


def _check(function: str, result: int) -> None:
    if result < 0:
        raise NativeLibraryError(f"{function} failed: {os.strerror(-result)} (errno {-result})")


def abi_version() -> int:
    """TASKD_ABI_VERSION of the library."""
    return int(_library.taskd_abi_version())


def layout_value(name: str) -> int:
    """A constant of the black box's layout, -1 if unknown."""
    return int(_library.taskd_layout_value(name.encode()))


def guard_start(box_fd: int, life_fd: int) -> None:
    """See taskd.h."""
    _check("taskd_guard_start", _library.taskd_guard_start(box_fd, life_fd))


def watch(box_fd: int, token: int, pipe_fd: int) -> None:
    """See taskd.h."""
    _check("taskd_watch", _library.taskd_watch(box_fd, token, pipe_fd))


def unwatch(box_fd: int) -> None:
    """See taskd.h."""
    _check("taskd_unwatch", _library.taskd_unwatch(box_fd))


def prefer_soon() -> None:
    """See taskd.h."""
    _check("taskd_prefer_soon", _library.taskd_prefer_soon())


def waits_hook(library: str) -> None:
    """See taskd.h."""
    _check("taskd_waits_hook", _library.taskd_waits_hook(library.encode()))


def waits_expire(tids: list[int]) -> int:
    """See taskd.h."""
    return int(_library.taskd_waits_expire((ctypes.c_int32 * len(tids))(*tids), len(tids)))


def waits_forgive(tids: list[int]) -> None:
    """See taskd.h."""
    _library.taskd_waits_forgive((ctypes.c_int32 * len(tids))(*tids), len(tids))


def is_preloaded() -> bool:
    """See taskd.h."""
    return bool(_library.taskd_is_preloaded() == 1)


def last_words_start(box_fd: int, stacks_signal: int) -> None:
    """See taskd.h."""
    _check("taskd_last_words_start", _library.taskd_last_words_start(box_fd, stacks_signal))


def collectives_start(box_fd: int) -> None:
    """See taskd.h."""
    _check("taskd_collectives_start", _library.taskd_collectives_start(box_fd))


def collectives_reset() -> None:
    """See taskd.h."""
    _check("taskd_collectives_reset", _library.taskd_collectives_reset())


def collectives_see(communicator: int, name: str, entered: int, left: int) -> None:
    """See taskd.h."""
    _check(
        "taskd_collectives_see",
        _library.taskd_collectives_see(communicator, name.encode(), entered, left),
    )


def collectives_add(
    communicator: int, name: str, number: int, size: int, enter_ns: int, leave_ns: int
) -> None:
    """See taskd.h."""
    result = _library.taskd_collectives_add(
        communicator, name.encode(), number, size, enter_ns, leave_ns
    )
    _check("taskd_collectives_add", result)


def names_numeric(library: str) -> None:
    """See taskd.h."""
    _check("taskd_names_numeric", _library.taskd_names_numeric(library.encode()))


def copy_checksummed(destination: int, source: int, count: int) -> int:
    """See taskd.h. Both are addresses; the caller answers for them."""
    return int(_library.taskd_copy_checksummed(destination, source, count))


def checksum(source: int, count: int) -> int:
    """See taskd.h."""
    return int(_library.taskd_checksum(source, count))
