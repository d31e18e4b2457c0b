"""What makes two exceptions the same: their type, and where they were raised.

Never their text, which may hold a time, an address, a pid.
"""

import os
import sysconfig
from collections import deque
from pathlib import Path
from types import TracebackType
from typing import Any

# the innermost ones: who called whom further out says little, and differs where a function calls
# itself
_USER_FRAMES = 4
_CAUSES = 3  # `raise ... from ...`: two causes are two failures
_MAX_FRAMES = 100  # of a traceback, the innermost: recursion leaves thousands
_MAX_CHARS = 1000  # of the whole: it travels in a message and is kept for each fault
_MAX_NAME_CHARS = 120

# The frames of libraries say little beside the one that raised; the script's own say where it was.
_PACKAGE = os.fspath(Path(__file__).parents[2])
_PATHS = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
_LIBRARIES = (*sorted(os.path.join(path, "") for path in {*_PATHS, _PACKAGE} if path), "<frozen ")


def signature(error: BaseException) -> str:
    """Type and innermost frames of an exception and of what it was raised from.

    Calls nothing that its class defines.
    """
    parts: list[str] = []
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen and len(parts) <= _CAUSES:
        seen.add(id(cause))
        parts.append(f"{_type_name(type(cause))}{_where(_slot(cause, '__traceback__'))}")
        cause = _slot(cause, "__cause__")
    return " from ".join(parts)[:_MAX_CHARS]


def is_of_library(file: str) -> bool:
    """Whether this file is of Python, of a package, or of taskd: not the script's own."""
    return file.startswith(_LIBRARIES)


def _slot(error: BaseException, name: str) -> Any:
    """What the interpreter keeps there, whatever the class of the exception makes of that name."""
    return BaseException.__dict__[name].__get__(error)


def _type_name(kind: type) -> str:
    module = type.__dict__["__dict__"].__get__(kind).get("__module__")
    name = str(type.__dict__["__qualname__"].__get__(kind))[:_MAX_NAME_CHARS]
    return (
        f"{module[:_MAX_NAME_CHARS]}.{name}"
        if isinstance(module, str) and module != "builtins"
        else name
    )


def _where(trace: TracebackType | None) -> str:
    frames = _frames(trace)
    own = [frame for frame in frames if not is_of_library(frame[0])] or frames
    shown = own[-_USER_FRAMES:]
    if frames and shown[-1] != frames[-1]:
        shown.append(frames[-1])
    where = " > ".join(
        f"{os.path.basename(file)}:{line} {name[:_MAX_NAME_CHARS]}" for file, line, name in shown
    )
    return f" at {where}" if where else ""


def _frames(trace: TracebackType | None) -> list[tuple[str, int, str]]:
    """File, line, function; the outermost first."""
    found: deque[tuple[str, int, str]] = deque(maxlen=_MAX_FRAMES)
    while trace is not None:
        code = trace.tb_frame.f_code
        found.append((code.co_filename, trace.tb_lineno, code.co_name))
        trace = trace.tb_next
    return list(found)
