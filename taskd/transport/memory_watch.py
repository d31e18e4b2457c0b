"""How much memory a process uses, and when that is more than its peers can be the reason of.

ZeroMQ keeps whatever a stranger sends until the message is whole, and a message need not end: no
option of its sockets bounds that. So the memory is looked at, and connections are dropped.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from contextlib import suppress

_LOOK_S = 0.25  # what a link of 10 Gbit/s brings meanwhile is half of the room
ROOM_BYTES = 512 << 20  # a manager that nobody has joined has 30 MB
_ROOM_BYTES_PER_PEER = 512 << 10  # of 1,024 agents with 8 ranks each a manager uses 0.2 MB for each
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_STATM_BYTES = 256  # seven numbers


class MemoryWatch:
    """See the module."""

    def __init__(self, now: float, room_bytes: int | None = None) -> None:
        """`room_bytes`: for what comes beside the process's own; None: ROOM_BYTES."""
        self.next_deadline = now
        self._room_bytes = ROOM_BYTES if room_bytes is None else room_bytes
        # open from now on: strangers may use up all descriptors
        self._statm = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._statm)
        self._own_bytes = self._used_bytes()  # of the process itself

    def _used_bytes(self) -> int:
        """The physical memory of this process that it shares with nobody, as it does snapshots."""
        _, resident, shared, *_ = os.pread(self._statm, _STATM_BYTES, 0).split()
        return (int(resident) - int(shared)) * _PAGE_BYTES

    def excess(self, now: float, peer_count: int = 0) -> int | None:
        """How many bytes it has, if that is too many; None: all is well, or it is not time yet."""
        if now < self.next_deadline:
            return None
        self.next_deadline = now + _LOOK_S
        used_bytes = self._used_bytes()
        room = self._room_bytes + peer_count * _ROOM_BYTES_PER_PEER
        return used_bytes if used_bytes > self._own_bytes + room else None

    def rest(self, now: float) -> None:
        """Nobody is connected: what is used is the process's own."""
        if now >= self.next_deadline:
            self.next_deadline = now + _LOOK_S
            self._own_bytes = self._used_bytes()

    def freed(self) -> int:
        """Connections were dropped: give their memory back. Returns what is left."""
        with suppress(AttributeError):  # not of glibc
            ctypes.CDLL(None).malloc_trim(0)
        left_bytes = self._used_bytes()
        # it may have grown itself: it is not to drop all connections again for that
        self._own_bytes = max(self._own_bytes, left_bytes - self._room_bytes // 2)
        return left_bytes
