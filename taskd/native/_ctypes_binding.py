"""The same functions as the compiled `_binding`, through ctypes; see csrc/include/taskd.h.

For machines with a C compiler but without Python's headers: Debian installs Python without them,
and nothing here is called often enough to need compiled code.
"""

import ctypes
import os
from collections.abc import Callable
from typing import Any

from taskd.errors import NativeLibraryError
from taskd.native.library import LIBRARY_PATH

BUILT_FOR_ABI = 4  # TASKD_ABI_VERSION in csrc/include/taskd.h; a test compares

_INT, _LONG, _WORD = ctypes.c_int, ctypes.c_int64, ctypes.c_uint64
_TEXT, _ADDRESS, _SIZE = ctypes.c_char_p, ctypes.c_void_p, ctypes.c_size_t
_TIDS = ctypes.POINTER(ctypes.c_int32)

try:
    _library = ctypes.CDLL(str(LIBRARY_PATH))
except OSError as error:  # as the compiled binding does when its library is not there
    raise ImportError(str(error)) from error


def _function(name: str, *types: Any, returns: Any = _INT) -> Any:
    try:
        function = getattr(_library, f"taskd_{name}")
    except AttributeError as error:
        raise ImportError(str(error)) from error
    function.argtypes, function.restype = types, returns
    return function


def _checked(name: str, *types: Any) -> Callable[..., int]:
    """One that may return a negative errno, which the result raises as NativeLibraryError."""
    function = _function(name, *types)

    def call(*arguments: int | str) -> int:
        result = function(*(word.encode() if isinstance(word, str) else word for word in arguments))
        if result < 0:
            why = f"{os.strerror(-result)} (errno {-result})"
            raise NativeLibraryError(f"taskd_{name} failed: {why}")
        return int(result)

    return call


abi_version = _function("abi_version")
guard_start = _checked("guard_start", _INT, _INT)
watch = _checked("watch", _INT, _WORD, _INT)
unwatch = _checked("unwatch", _INT)
prefer_soon = _checked("prefer_soon")
waits_hook = _checked("waits_hook", _TEXT)
last_words_start = _checked("last_words_start", _INT, _INT)
last_words_python = _checked("last_words_python", _INT, _INT)
collectives_start = _checked("collectives_start", _INT)
collectives_reset = _checked("collectives_reset")
collectives_see = _checked("collectives_see", _WORD, _TEXT, _LONG, _LONG)
collectives_add = _checked("collectives_add", _WORD, _TEXT, _LONG, _LONG, _LONG, _LONG)
collectives_forget = _checked("collectives_forget", _WORD)
names_numeric = _checked("names_numeric", _TEXT)
# The caller answers for the addresses.
copy_checksummed = _function("copy_checksummed", _ADDRESS, _ADDRESS, _SIZE, returns=_WORD)
checksum = _function("checksum", _ADDRESS, _SIZE, returns=_WORD)
_layout_value = _function("layout_value", _TEXT, returns=_LONG)
_waits_expire = _function("waits_expire", _TIDS, _INT)
_waits_forgive = _function("waits_forgive", _TIDS, _INT)
_is_preloaded = _function("is_preloaded")


def layout_value(name: str) -> int:
    """A constant of the black box's layout, -1 if unknown."""
    return int(_layout_value(name.encode()))


def waits_expire(tids: list[int]) -> int:
    """See taskd.h."""
    return int(_waits_expire((ctypes.c_int32 * len(tids))(*tids), len(tids)))


def waits_forgive(tids: list[int]) -> None:
    """See taskd.h."""
    _waits_forgive((ctypes.c_int32 * len(tids))(*tids), len(tids))


def is_preloaded() -> bool:
    """See taskd.h."""
    return bool(_is_preloaded() == 1)
