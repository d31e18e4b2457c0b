"""The link between an agent and one of its workers: a SOCK_SEQPACKET socketpair, one message per packet.

It has no name in the file system, so nobody else can reach it and nothing is left behind. Knows no message, only bytes.
"""

from __future__ import annotations

import logging
import socket

log = logging.getLogger(__name__)

MAX_PACKET_BYTES = 256 * 1024
# Room for two of the largest messages on the way; the default (about 200 KB) holds not even one.
_BUFFER_BYTES = 2 * MAX_PACKET_BYTES


def pair() -> tuple[socket.socket, socket.socket]:
    """Both ends of a new link."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


class Channel:
    """One end. Sending may be done from any thread, receiving from one. Never blocks."""

    def __init__(self, descriptor: int) -> None:
        """`descriptor`: a SOCK_SEQPACKET socket, owned from now on."""
        self._socket = socket.socket(fileno=descriptor)
        self._socket.setblocking(False)
        for option in (getattr(socket, "SO_SNDBUFFORCE", 32), socket.SO_SNDBUF):
            try:
                self._socket.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)
                break
            except PermissionError:          # the forced one needs CAP_NET_ADMIN; the other is capped by net.core.wmem_max
                continue
        self.closed = False

    @property
    def fd(self) -> int:
        """Readable when `receive` has something, the end of the link included. -1 when closed."""
        return self._socket.fileno()

    def send(self, data: bytes) -> bool:
        """Send one message whole. False: the other end is gone, or has not read for so long that there is no room."""
        if self.closed:
            return False
        try:
            self._socket.send(data)
        except BlockingIOError:
            log.warning("a peer on this machine reads nothing: a message of %d bytes was dropped", len(data))
            return False
        except (BrokenPipeError, ConnectionResetError):
            return False
        return True

    def receive(self) -> list[bytes]:
        """What has arrived. Sets `closed` at the end of the link."""
        found: list[bytes] = []
        while not self.closed:
            try:
                data = self._socket.recv(MAX_PACKET_BYTES)
            except BlockingIOError:
                break
            except ConnectionResetError:
                data = b""
            if not data:
                self.closed = True
                break
            found.append(data)
        return found

    def close(self) -> None:
        """Close this end."""
        self.closed = True
        self._socket.close()
