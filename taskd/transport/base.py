"""What every transport offers: frames between identities.

The contract suite in tests/contract runs over each.

- Delivery is in order between two ends as long as the connection lasts; a message may be lost,
  never changed or joined.
- Nothing blocks but `poll`.
- A peer is known by the identity it connected with; the receiving side cannot be talked into
  another one's messages.
"""

from collections.abc import Sequence
from typing import Protocol

MAX_FRAME_BYTES = 256 * 1024  # as MAX_MESSAGE_BYTES of the wire, which refuses what is longer
# How an identity begins that is made up by the listener: of a connection whose own one is now that
# of another, as its peer has connected anew, and of one that has presented none.
NAMELESS = b"\0"


class Link(Protocol):
    """A router (many peers, addressed by identity) or a dealer (one peer, addressed as None)."""

    def poll(self, timeout_s: float | None, fds: Sequence[int] = ()) -> set[int]:
        """Wait until a message is there, one of `fds` is readable or hung up, or time is up.

        None: for ever.

        Returns the ready ones of `fds`. A message may be there in any case: call `receive`.
        """

    def receive(self) -> list[tuple[bytes, bytes]]:
        """(peer, data) of messages that are there, up to a bound.

        Call again after the next `poll`.
        """

    def send(self, peer: bytes | None, data: bytes) -> bool:
        """Hand over one message.

        False: it cannot be sent (nobody there, or too much waits already).
        """

    def close(self) -> None:
        """Release everything. Messages handed over get a short time to leave."""


class Listener(Link, Protocol):
    """The router's side also knows what happened below messages."""

    @property
    def address(self) -> str:
        """Where it listens."""

    is_abused: bool
    """Nothing can be read before `drop_connections`."""

    def drop_connections(self) -> None:
        """Close all connections, and free what has arrived on them and was not read.

        ZeroMQ bounds whole messages only, and closes no single connection on request.
        """

    def hang_up(self, peer: bytes) -> None:
        """Close the connection of this peer; what it has sent may still be received."""

    def take_refused(self) -> list[str]:
        """Why connections were not let in since the last call."""

    def take_disconnected(self) -> set[bytes]:
        """Whose connections ended since the last call.

        What was on its way on them may be lost. Those that never said anything are left out.
        """
