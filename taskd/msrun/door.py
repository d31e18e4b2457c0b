"""Where a worker fetches what is its own: black box, channel, life pipe, snapshots.

    worker ── connect, {"rank": 3} ──►  Door        an abstract UNIX socket, named at random
           ◄── its bootstrap, descriptors ──

msrun starts its workers itself and hands them nothing but an environment; so they come and ask.
Who asks is told by the kernel (SO_PEERCRED): only the process of that rank, or one that it has
started, gets anything, and once in each life. Owns the socket; must not know what it hands out.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import struct
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

log = logging.getLogger(__name__)

_CREDENTIALS = struct.Struct("3i")  # of the peer: pid, uid, gid (unix(7))
_BACKLOG = 128
_REQUEST_BYTES = 4096
_ANCESTORS = 16  # taskset, numactl, a shell, another one: nobody has so many


class Parcel(NamedTuple):
    """What a worker gets: plain values, and descriptors by name."""

    values: Mapping[str, object]
    descriptors: Mapping[str, int]


class Door:
    """See the module. `find(rank, pids)`: what that rank gets if one of these is its process."""

    def __init__(self, find: Callable[[int, list[int]], Parcel | str]) -> None:
        """`find` gives a text where there is nothing for them: why."""
        self._find = find
        self.name = f"taskd-{secrets.token_hex(16)}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(f"\0{self.name}")
        self._listener.listen(_BACKLOG)
        self._listener.setblocking(False)
        self._visitors: list[socket.socket] = []

    @property
    def fds(self) -> list[int]:
        """Readable when `serve` has something to do."""
        return [self._listener.fileno(), *(visitor.fileno() for visitor in self._visitors)]

    def serve(self) -> None:
        """Answer everybody who has asked; never blocks."""
        while True:
            try:
                visitor, _ = self._listener.accept()
            except BlockingIOError:
                break
            visitor.setblocking(False)
            self._visitors.append(visitor)
        self._visitors = [visitor for visitor in self._visitors if not self._is_served(visitor)]

    def _is_served(self, visitor: socket.socket) -> bool:
        try:
            data = visitor.recv(_REQUEST_BYTES)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if data:
            try:
                self._answer(visitor, data)
            except OSError as error:
                log.warning("a worker asked for its black box and did not wait: %s", error)
        visitor.close()
        return True

    def _answer(self, visitor: socket.socket, data: bytes) -> None:
        size = _CREDENTIALS.size
        pid, uid, _ = _CREDENTIALS.unpack(
            visitor.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
        )
        found: Parcel | str
        try:
            rank = json.loads(data)["rank"]
            is_right = isinstance(rank, int) and uid == os.geteuid()
            found = self._find(rank, _line_of(pid)) if is_right else "it is no worker's process"
        except (ValueError, TypeError, LookupError):
            found = "it asks in a way that is not understood: use one version of taskd on a node"
        if isinstance(found, str):
            log.warning("process %d gets no black box: %s", pid, found)
            visitor.send(json.dumps({"refused": found}).encode())
            return
        names, numbers = list(found.descriptors), list(found.descriptors.values())
        answer = {**found.values, "names": names}
        socket.send_fds(visitor, [json.dumps(answer).encode()], numbers)

    def close(self) -> None:
        """Nobody gets anything any more."""
        for end in (self._listener, *self._visitors):
            end.close()
        self._visitors = []


def _line_of(pid: int) -> list[int]:
    """A process and those that it descends from, itself first."""
    found: list[int] = []
    while pid > 1 and len(found) < _ANCESTORS:
        found.append(pid)
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                pid = int(file.read().rpartition(b")")[2].split()[1])
        except (OSError, LookupError, ValueError):
            break
    return found
