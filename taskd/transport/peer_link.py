"""A connection to one rank and one from another, beside the process groups: a ring of ranks.

Owns the sockets and the frames. Frames are small and many: sending never waits, and what cannot be
sent at once is kept, the newest of it. The ranks find each other through the store of the default
group; a number that is drawn for each connection keeps strangers out.
"""

from __future__ import annotations

import contextlib
import secrets
import select
import socket
import struct
import time
from typing import TYPE_CHECKING, Any

from taskd.clock import MonotonicClock

if TYPE_CHECKING:
    from collections.abc import Iterator

_CLOCK = MonotonicClock()
_HEADER = struct.Struct("!I")
_TOKEN_BYTES = 16
_LOOK_S = 0.005
_CHUNK_BYTES = 1 << 16
_MOST_UNHEARD = 16  # connections on which nobody has spoken; one is awaited
MAX_FRAME_BYTES = 1 << 24


class PeerLink:
    """To one rank, and from another. Made by `connect`."""

    def __init__(self, outgoing: socket.socket, incoming: socket.socket) -> None:
        self._outgoing, self._incoming = outgoing, incoming
        self._unsent = b""  # of a frame that is on its way
        self._next = b""  # the newest that has to wait for it
        self._received = bytearray()

    @classmethod
    def connect(
        cls, store: Any, prefix: str, *, rank: int, target: int, towards: str, until: float
    ) -> PeerLink:
        """All ranks of the ring are at this place. Interrupts may be raised meanwhile.

        Args:
            store: of the default group.
            prefix: of the keys there, of this generation.
            target: the rank to send to.
            towards: a host of the job: the others reach this one by the address used to go there.
            until: monotonic seconds.

        Raises OSError: no connection by then.
        """
        token = secrets.token_bytes(_TOKEN_BYTES)
        with contextlib.ExitStack() as undo:
            listener = undo.enter_context(_listener(towards))
            address = listener.getsockname()[:2]
            store.set(f"{prefix}/{rank}", f"{address[0]} {address[1]} {token.hex()}")
            outgoing = undo.enter_context(_towards(store, f"{prefix}/{target}", until))
            incoming = _accept(listener, token, until)
            for connection in (outgoing, incoming):
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connection.setblocking(False)
            undo.pop_all()
        listener.close()
        return cls(outgoing, incoming)

    def send(self, frame: bytes) -> None:
        """Hand over a frame. Raises OSError: the other one is gone."""
        self._next = _HEADER.pack(len(frame)) + frame
        self.flush()

    def flush(self) -> None:
        """Send what had to wait. Raises OSError."""
        while self._unsent or self._next:
            if not self._unsent:
                self._unsent, self._next = self._next, b""
            try:
                sent = self._outgoing.send(self._unsent)
            except BlockingIOError:
                return
            self._unsent = self._unsent[sent:]

    def receive(self) -> Iterator[bytes]:
        """The frames that have come.

        Raises OSError behind the last one: the other one is gone, or sends nonsense.
        """
        ended: OSError | None = None
        while ended is None:
            try:
                data = self._incoming.recv(_CHUNK_BYTES)
            except BlockingIOError:
                break
            except OSError as error:
                ended = error
            else:
                self._received += data
                ended = None if data else ConnectionResetError("the connection was closed")
        yield from self._frames()
        if ended is not None:
            raise ended

    def _frames(self) -> Iterator[bytes]:
        while len(self._received) >= _HEADER.size:
            (size,) = _HEADER.unpack_from(self._received)
            if size > MAX_FRAME_BYTES:
                raise ConnectionResetError(f"a frame of {size} bytes")
            end = _HEADER.size + size
            if len(self._received) < end:
                return
            frame = bytes(self._received[_HEADER.size : end])
            del self._received[:end]
            yield frame

    def wait(self, timeout_s: float) -> None:
        """Until something has come, or what waits can be sent."""
        wanted = {self._incoming: select.POLLIN}
        if self._unsent:
            wanted[self._outgoing] = select.POLLOUT
        _wait(wanted, timeout_s)

    def close(self) -> None:
        """Both ends."""
        self._outgoing.close()
        self._incoming.close()


def _listener(towards: str) -> socket.socket:
    family, *_, address = socket.getaddrinfo(towards, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        own = probe.getsockname()[0]
    return socket.create_server((own, 0), family=family, backlog=4)


def _wait(wanted: dict[socket.socket, int], timeout_s: float) -> bool:
    """Whether one of them is ready. `select` knows no descriptor above 1,023; scripts have more."""
    poller = select.poll()
    for connection, events in wanted.items():
        poller.register(connection, events)
    return bool(poller.poll(max(0.0, timeout_s) * 1000))


def _towards(store: Any, key: str, until: float) -> socket.socket:
    while not store.check([key]):
        if _CLOCK.now() >= until:
            raise TimeoutError(f"{key}: it has not said where it is")
        time.sleep(_LOOK_S)
    host, port, token = store.get(key).decode().split()
    connection = socket.create_connection((host, int(port)), max(_LOOK_S, until - _CLOCK.now()))
    try:
        connection.sendall(bytes.fromhex(token))
    except BaseException:
        connection.close()
        raise
    return connection


def _accept(listener: socket.socket, token: bytes, until: float) -> socket.socket:
    """The connection of who knows the token. Strangers are turned away, also silent ones."""
    listener.setblocking(False)
    unheard: dict[socket.socket, bytes] = {}  # what has come on each, the oldest first
    try:
        while (left_s := until - _CLOCK.now()) > 0:
            _wait(dict.fromkeys([listener, *unheard], select.POLLIN), min(_LOOK_S, left_s))
            with contextlib.suppress(BlockingIOError):
                unheard[listener.accept()[0]] = b""
            for connection, former in list(unheard.items()):
                more = _said(connection, len(token) - len(former))
                if more is None:
                    continue
                unheard[connection] = former + more
                if more and len(unheard[connection]) < len(token):
                    continue
                if secrets.compare_digest(unheard.pop(connection), token):
                    return connection
                connection.close()
            if len(unheard) > _MOST_UNHEARD:
                oldest = next(iter(unheard))
                del unheard[oldest]
                oldest.close()
        raise TimeoutError("nobody has connected")
    finally:
        for connection in unheard:
            connection.close()


def _said(connection: socket.socket, size: int) -> bytes | None:
    """What has come on a connection, b"" if it has ended; None: nothing yet."""
    connection.setblocking(False)
    try:
        return connection.recv(size)
    except BlockingIOError:
        return None
    except OSError:
        return b""
