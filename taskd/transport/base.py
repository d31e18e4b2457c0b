"""What a transport between identities can do. Bytes only: knows neither messages nor decisions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence


class Transport(Protocol):
    """A socket that one thread waits on. A manager's has many peers, an agent's has one."""

    def poll(self, timeout_s: float | None, fds: Sequence[int] = ()) -> set[int]:
        """Wait until something can be received, one of `fds` is readable, or the time is over; the readable ones of `fds`."""

    def receive(self) -> list[tuple[bytes, bytes]]:
        """(peer, data) of everything that has arrived; never blocks. The peer of an agent's transport is b""."""

    def send(self, peer: bytes | None, data: bytes) -> bool:
        """Send to a peer (None: the only one). False: it cannot be reached now, and the data is not kept."""

    def close(self) -> None:
        """Deliver what was sent for a short while, then close."""
