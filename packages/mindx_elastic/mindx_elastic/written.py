"""Which files a function writes that belongs to somebody else.

`torch.save` opens its files below Python, and is watched by name; all else by Python's audit events
(https://docs.python.org/3/library/audit_events.html). A hook for these cannot be taken away again,
so this is for processes that are about to end.
"""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

_WRITES = os.O_WRONLY | os.O_RDWR
_current: list[Written] = []  # one at most
_is_hooked: list[bool] = []


class Written:
    """Paths in the order in which they were first opened."""

    def __init__(self) -> None:
        self._opened: dict[str, None] = {}
        self._saved: dict[str, None] = {}
        self._renamed: dict[str, str] = {}

    def paths(self) -> list[str]:
        """What was saved and is there now. Without `torch.save`: every file that was written."""
        chosen = self._saved or self._opened
        found = dict.fromkeys(self._renamed.get(path, path) for path in chosen)
        return [path for path in found if os.path.isfile(path)]

    def note(self, event: str, arguments: tuple[Any, ...]) -> None:
        """An audit event."""
        if event == "open":
            path, mode, flags = arguments
            is_new = isinstance(flags, int) and flags & _WRITES and flags & (os.O_TRUNC | os.O_EXCL)
            if is_new or (isinstance(mode, str) and mode[:1] in ("w", "x")):
                self._keep(self._opened, path)
        elif event == "os.rename":
            old, new = (_absolute(one) for one in arguments[:2])
            if old is not None and new is not None:
                self._renamed[old] = new

    def note_saved(self, target: object) -> None:
        """The second argument of `torch.save`: a path, or a file."""
        self._keep(self._saved, getattr(target, "name", target))

    @staticmethod
    def _keep(paths: dict[str, None], path: object) -> None:
        found = _absolute(path)
        if found is not None:
            paths[found] = None


def _absolute(path: object) -> str | None:
    if not isinstance(path, (str, bytes, os.PathLike)):
        return None  # a descriptor
    return os.path.abspath(os.fsdecode(path))


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if _current and event in ("open", "os.rename"):
        _current[0].note(event, arguments)


@contextmanager
def watched() -> Iterator[Written]:
    """See what is written while the block runs."""
    if not _is_hooked:
        _is_hooked.append(True)
        sys.addaudithook(_hook)
    found = Written()
    torch: Any = sys.modules.get("torch")
    original: Any = getattr(torch, "save", None)

    def save(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        found.note_saved(args[1] if len(args) > 1 else kwargs.get("f"))
        return result

    _current.append(found)
    if original is not None:
        torch.save = save
    try:
        yield found
    finally:
        _current.clear()
        if original is not None:
            torch.save = original
