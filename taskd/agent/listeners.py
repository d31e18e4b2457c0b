"""A port of a torchrun that others reach, and bounds for what strangers do there.

As at the manager's port: a connection on which nobody speaks is closed, and all of them are if what
has come there fills the memory. Only so many are let in at once, as the same process needs
descriptors to start workers.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from taskd.errors import TransportError
from taskd.transport import zeromq
from taskd.transport.memory_watch import MemoryWatch

if TYPE_CHECKING:
    from taskd.clock import Clock

log = logging.getLogger(__name__)

SILENT_S = 10.0  # as at the manager's port
# At the door of an agent all others may be that vote, 98, and at its mirrors a few: the rest is
# room for those that come again before the end of their former connection is known.
MOST = 128
ROOM_BYTES = 256 << 20  # beside what the process had before somebody connected


class BoundedListener:
    """See the module. Owns `router`; who has links beside it closes them before `drop`."""

    def __init__(
        self, address: str, secret: bytes | None, clock: Clock, silent_s: float | None = None
    ) -> None:
        """`silent_s`: until the first word on a connection; None: SILENT_S.

        Raises `TransportError`.
        """
        self._clock = clock
        self.router = zeromq.Router(
            address, secret=secret, silent_s=silent_s or SILENT_S, most=MOST
        )
        self.address = self.router.address
        try:
            self._memory = MemoryWatch(clock.now(), ROOM_BYTES)
        except OSError as error:
            self.router.close()
            raise TransportError(f"{self.address}: {error}") from error

    @property
    def next_deadline(self) -> float:
        """When `flood` is to look again."""
        return self._memory.next_deadline

    def flood(self) -> str:
        """Why all connections are to be dropped; "": there is no reason."""
        now = self._clock.now()
        if self.router.is_abused:
            return "a message to this process had too many parts"
        if self.router.is_quiet:
            self._memory.rest(now)
            return ""
        used_bytes = self._memory.excess(now)
        return "" if used_bytes is None else f"this process used {used_bytes >> 20} MiB"

    def drop(self, why: str) -> None:
        """Close all connections, and free what has come on them. `why`: see `flood`.

        Raises `TransportError`: the port is lost.
        """
        self.router.drop_connections()
        left_bytes = self._memory.freed()
        log.warning(
            "somebody floods %s: its connections were dropped, %s; now it has %d MiB. Set "
            "TASKD_SECRET_FILE on every node, or close the port to him",
            self.address,
            why,
            left_bytes >> 20,
        )

    def close(self) -> None:
        """No more."""
        self.router.close()
