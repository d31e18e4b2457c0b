"""Tells the forkserver, once, which modules this process has imported by its first optimizer step.

By then a script has imported what its training needs, lazily imported parts included. What is done
with it, and what of it is right for other processes, the forkserver finds out
(`taskd.agent.spawning.preloading`).
"""

from __future__ import annotations

import json
import logging
import os
import struct
import sys
import zlib
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from taskd.imported import namespace

if TYPE_CHECKING:
    from types import ModuleType

log = logging.getLogger(__name__)

_LENGTH = struct.Struct(">I")


class Imports:
    """One per runtime. Owns the descriptor, a pipe with room for the whole report."""

    def __init__(self, descriptor: int) -> None:
        """`descriptor`: where to write to, without waiting."""
        self._descriptor = descriptor
        self._is_due = False

    def note_step(self) -> None:
        """The first step of any optimizer is done: the report is due. Main thread."""
        self._is_due = True

    def report_if_due(self) -> None:
        """Write the report after the first step. The runtime's thread."""
        if not self._is_due or self._descriptor < 0:
            return
        descriptor, self._descriptor = self._descriptor, -1
        try:
            data = zlib.compress(json.dumps(_report()).encode(), 1)
            os.write(descriptor, _LENGTH.pack(len(data)) + data)
        # Nobody reads it, or the script changes it meanwhile: this thread has more important things
        # to do, and replacements start as they would without.
        except Exception as error:  # noqa: BLE001
            log.debug("what is imported could not be reported: %s", error)
        os.close(descriptor)


def _report() -> dict[str, Any]:
    return {
        "modules": [(name, _place(module)) for name, module in list(sys.modules.items())],
        "path": [entry for entry in sys.path if isinstance(entry, str)],
        "environment": dict(os.environ),
    }


def _place(module: ModuleType) -> str | None:
    """The file of a module, or the folder of a package that has none. Runs no code of it."""
    found = namespace(module)
    if isinstance(found.get("__file__"), str):
        return str(found["__file__"])
    with suppress(TypeError):
        return next((str(path) for path in found.get("__path__", ())), None)
    return None
