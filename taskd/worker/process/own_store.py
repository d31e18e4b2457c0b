"""A store that the script gives to `init_process_group`, made within its recoverable function.

The next entry makes it again, and cannot: the groups of this one are kept, with their store, whose
port is taken. Owns the warning of that, once in each process. It is known by its listening socket,
so that the process alone says it that serves the store.
"""

from __future__ import annotations

import logging
import os
import socket
from typing import Any

from taskd.worker.process.aborting import open_sockets

log = logging.getLogger(__name__)


class OwnStore:
    """One per process. Main thread only."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._before: frozenset[str] | None = None  # None: the function has not been entered
        self._is_said = False

    def note_entry(self) -> None:
        """The function is entered for the first time: what is served by now is served on."""
        self._before = frozenset(_served())

    def look_at(self, store: Any) -> None:
        """Warn if it is one that is made anew in each entry. None: torch makes its own."""
        if store is None or self._before is None or self._is_said:
            return
        from torch.distributed import PrefixStore, TCPStore  # noqa: PLC0415

        while isinstance(store, PrefixStore):
            store = store.underlying_store
        if not isinstance(store, TCPStore):
            return
        own = {name for name, port in _served().items() if port == store.port}
        if own - self._before:
            self._is_said = True
            log.warning(
                "rank %d: init_process_group was given a TCPStore that was made within the "
                "recoverable function: after a fault its port %d is still taken, and it cannot be "
                "made again. Give none, so that torch makes the store (env://)",
                self._rank,
                store.port,
            )


def _served() -> dict[str, int]:
    """The TCP sockets that listen in this process: kernel name -> port."""
    found = {}
    for fd, name in open_sockets().items():
        try:
            with socket.socket(fileno=os.dup(fd)) as duplicate:
                if duplicate.family in (
                    socket.AF_INET,
                    socket.AF_INET6,
                ) and duplicate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    found[name] = duplicate.getsockname()[1]
        except OSError:  # closed meanwhile
            continue
    return found
