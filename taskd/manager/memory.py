"""How much memory the manager uses, and when that is more than its job can be the reason of.

ZeroMQ keeps whatever a stranger sends until the message is whole, and a message need not end: no
option of its sockets bounds that. So the memory is looked at, and connections are dropped. Decides
nothing about recovery.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from contextlib import suppress

_LOOK_S = 0.25  # what a link of 10 Gbit/s brings meanwhile is half of the room
_ROOM_BYTES = 512 << 20  # a manager that nobody has joined has 30 MB
_ROOM_BYTES_PER_AGENT = 512 << 10  # of 1,024 agents with 8 ranks each it uses 0.2 MB for each
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_STATM_BYTES = 256  # seven numbers


class MemoryWatch:
    """See the module."""

    def __init__(self, now: float) -> None:
        self.next_deadline = now
        # open from now on: strangers may use up all descriptors
        self._statm = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._statm)
        self._own_bytes = self._resident_bytes()  # of the manager itself

    def _resident_bytes(self) -> int:
        """The physical memory that this process uses."""
        return int(os.pread(self._statm, _STATM_BYTES, 0).split()[1]) * _PAGE_BYTES

    def excess(self, now: float, agent_count: int) -> int | None:
        """How many bytes it has, if that is too many; None: all is well, or it is not time yet."""
        if now < self.next_deadline:
            return None
        self.next_deadline = now + _LOOK_S
        used_bytes = self._resident_bytes()
        room = _ROOM_BYTES + agent_count * _ROOM_BYTES_PER_AGENT
        return used_bytes if used_bytes > self._own_bytes + room else None

    def freed(self) -> int:
        """Connections were dropped: give their memory back. Returns what is left."""
        with suppress(AttributeError):  # not of glibc
            ctypes.CDLL(None).malloc_trim(0)
        left_bytes = self._resident_bytes()
        # it may have grown itself: it is not to drop all connections again for that
        self._own_bytes = max(self._own_bytes, left_bytes - _ROOM_BYTES // 2)
        return left_bytes
