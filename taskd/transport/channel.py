"""One end of the link between an agent and one worker: an AF_UNIX socket of a connected pair.

It keeps message bounds. Owns the descriptor it is given. Nothing is named in the file system, so
there is nothing to clean up and nobody else can connect. Must not know what the bytes mean.
"""

import select
import socket
from contextlib import suppress

from taskd.errors import TransportError
from taskd.transport.base import MAX_FRAME_BYTES

# the kernel doubles it and limits it by net.core.wmem_max (208 KiB, so 416 KiB)
_SEND_BUFFER_BYTES = MAX_FRAME_BYTES
# The buffer holds hundreds of messages. A peer that has left it full for that long is stopped or
# stuck; waiting longer would make the agent deaf to all other workers.
_SEND_TIMEOUT_S = 5.0


class Channel:
    """See the module.

    `closed` turns True when the other end is gone and everything it said has been read.
    """

    def __init__(self, fd: int) -> None:
        """Take over `fd`, one end of a `socketpair(AF_UNIX, SOCK_SEQPACKET)`."""
        self._socket = socket.socket(fileno=fd)
        if self._socket.type != socket.SOCK_SEQPACKET:
            kind = self._socket.type
            self._socket.close()
            raise TransportError(f"descriptor {fd} is no SOCK_SEQPACKET socket but {kind!r}")
        self._socket.setblocking(False)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)

    @property
    def fd(self) -> int:
        """The descriptor to poll for reading; -1 when closed."""
        return self._socket.fileno()

    @property
    def closed(self) -> bool:
        """Whether nothing can be read any more."""
        return self._socket.fileno() < 0

    def send(self, data: bytes) -> bool:
        """Hand over one message. False: the other end is gone, or has not read for a long time."""
        if not data:
            raise ValueError("an empty message reads as the end of the channel")
        try:
            try:
                self._socket.send(data)
            except BlockingIOError:
                poll = select.poll()
                poll.register(self._socket, select.POLLOUT)
                poll.poll(_SEND_TIMEOUT_S * 1000)
                self._socket.send(data)
        except OSError:
            return False  # closed by us, by the peer (EPIPE, ECONNRESET), or still full
        return True

    def receive(self) -> list[bytes]:
        """All messages that are there. Does not block."""
        messages = []
        while not self.closed:
            try:
                # a longer message arrives cut, and the wire refuses its size
                data = self._socket.recv(MAX_FRAME_BYTES + 1)
            except BlockingIOError:
                break
            except ConnectionResetError:
                # reported once if the peer left something unread; what it said itself is still to
                # come
                continue
            if not data:
                self.close()
                break
            messages.append(data)
        return messages

    def hang_up(self) -> None:
        """Say nothing more. The peer sees the end of the channel, and can still be heard."""
        with suppress(OSError):  # closed by us, or by the peer
            self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close the descriptor. The peer sees the end of the channel."""
        self._socket.close()
