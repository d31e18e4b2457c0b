"""ZeroMQ behind the `Link` contract. The only module that imports zmq.

    Router (binds: manager, relay)  ◄── tcp ──►  Dealer (connects: agent, relay upwards,
                                                         worker without agent)

Owns sockets, their limits, and encryption: with a secret both sides derive their CURVE keys from
it, and the router lets in only the client key of that secret (a ZAP handler that is served within
`poll`). Must not know messages.
"""

import errno
import hashlib
import ipaddress
import logging
import math
import re
import time
from collections.abc import Iterable, Sequence
from socket import SOCK_STREAM, gaierror, getaddrinfo

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from taskd.errors import AddressTakenError, TransportError
from taskd.transport.base import MAX_FRAME_BYTES

log = logging.getLogger(__name__)

# Beyond this the socket itself drops the connection. Room above MAX_FRAME_BYTES, so that what is
# merely too long for the protocol is seen, counted and answered for by the wire.
_MAX_MESSAGE_BYTES = 4 * MAX_FRAME_BYTES
_HIGH_WATER_MARK = 1000  # messages per peer; a peer that is that far behind is not listening
_BATCH = 1000  # messages per `receive`, so that a flood cannot keep the loop from its deadlines
_LINGER_MS = 1000  # for the last words on a connection that is up
# a connection that says nothing is dropped: strangers must not use up descriptors
_HANDSHAKE_MS = 5000
_RECONNECT_MS = 100  # a restarted manager is found within this ...
_RECONNECT_MAX_MS = 2000  # ... growing to this while nobody is there
_KEEPALIVE = {
    zmq.TCP_KEEPALIVE: 1,
    zmq.TCP_KEEPALIVE_IDLE: 10,
    zmq.TCP_KEEPALIVE_INTVL: 5,
    zmq.TCP_KEEPALIVE_CNT: 3,
}
_ZAP_ADDRESS = "inproc://zeromq.zap.01"  # fixed by ZeroMQ RFC 27
_ZAP_DOMAIN = b"taskd"
_FAILED_HANDSHAKES = {
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL: "broken off",
    zmq.Event.HANDSHAKE_FAILED_PROTOCOL: "not our protocol, or another secret",
    zmq.Event.HANDSHAKE_FAILED_AUTH: "a wrong secret",
}


def _derive_key(secret: bytes, side: bytes) -> bytes:
    """A CURVE secret key in the text form that ZeroMQ takes."""
    return z85.encode(hashlib.blake2b(secret, digest_size=32, person=b"taskd " + side).digest())


def _endpoint(address: str) -> str:
    return address if "://" in address else f"tcp://{address}"


class _Socket:
    """What router and dealer share."""

    def __init__(self, kind: int, address: str, beside: "_Socket | None") -> None:
        self._owns_context = beside is None
        self._context: zmq.Context[zmq.Socket[bytes]] = (
            zmq.Context() if beside is None else beside._context  # noqa: SLF001
        )
        self._socket = self._context.socket(kind)
        self._linger_ms = _LINGER_MS
        options = {
            zmq.MAXMSGSIZE: _MAX_MESSAGE_BYTES,
            zmq.SNDHWM: _HIGH_WATER_MARK,
            zmq.RCVHWM: _HIGH_WATER_MARK,
            zmq.LINGER: _LINGER_MS,
            zmq.HANDSHAKE_IVL: _HANDSHAKE_MS,
            zmq.IPV6: int(address.startswith("[")),
            **_KEEPALIVE,
        }
        for option, value in options.items():
            self._socket.setsockopt(option, value)

    def poll(self, timeout_s: float | None, fds: Sequence[int] = ()) -> set[int]:
        """See `Link`."""
        return poll([self], timeout_s, fds)

    def close(self) -> None:
        """See `Link`."""
        for socket in (self._socket, *self._inner()):
            socket.close(linger=self._linger_ms)
        if self._owns_context:
            self._context.term()

    def _inner(self) -> Iterable[zmq.Socket[bytes]]:
        """Sockets of our own that must be served while we wait."""
        return ()

    def _serve(self) -> None:
        """Serve them."""

    def _frames(self) -> Iterable[list[bytes]]:
        for _ in range(_BATCH):
            try:
                yield self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return

    def _send(self, frames: list[bytes]) -> bool:
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno == errno.EHOSTUNREACH:
                return False
            raise
        return True


def poll(links: Sequence[_Socket], timeout_s: float | None, fds: Sequence[int] = ()) -> set[int]:
    """`Link.poll` for several links at once."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    while True:
        inner = [(socket, link) for link in links for socket in link._inner()]  # noqa: SLF001
        items: list[zmq.Socket[bytes] | int] = [
            *(link._socket for link in links),  # noqa: SLF001
            *(socket for socket, _ in inner),
            *fds,
        ]
        wait_ms = (
            -1 if deadline is None else math.ceil(max(0.0, deadline - time.monotonic()) * 1000)
        )
        ready: set[zmq.Socket[bytes] | int] = {
            item for item, _ in zmq.zmq_poll([(item, zmq.POLLIN) for item in items], wait_ms)
        }
        to_serve = {link for socket, link in inner if socket in ready}
        for link in to_serve:
            link._serve()  # noqa: SLF001
        is_over = not ready or (deadline is not None and time.monotonic() >= deadline)
        if is_over or len(ready) > sum(socket in ready for socket, _ in inner):
            return {fd for fd in fds if fd in ready}


class Arrivals:
    """Which of thousands of dealers have something to read."""

    def __init__(self, links: Iterable["Dealer"]) -> None:
        self._link_by_socket = {link._socket: link for link in links}  # noqa: SLF001
        self._poller = zmq.Poller()
        for socket in self._link_by_socket:
            self._poller.register(socket, zmq.POLLIN)

    def forget(self, link: "Dealer") -> None:
        """This one will be closed."""
        self._poller.unregister(link._socket)  # noqa: SLF001

    def wait(self, timeout_s: float) -> list["Dealer"]:
        """Wait for any of them, at most so many seconds."""
        ready = self._poller.poll(math.ceil(timeout_s * 1000))
        return [self._link_by_socket[socket] for socket, _ in ready]


class Router(_Socket):
    """Binds `address` and talks to many peers, addressed by their identity.

    `address`: "host:port"; port 0: any free one. A name is resolved first, which ZeroMQ would not.
    """

    def __init__(
        self, address: str, *, secret: bytes | None = None, beside: _Socket | None = None
    ) -> None:
        """`beside`: share its ZeroMQ context (needed for inproc addresses).

        Raises `TransportError`.
        """
        super().__init__(zmq.ROUTER, address, beside)
        self._refused: list[str] = []
        self._peer_by_connection: dict[int, bytes] = {}  # by descriptor: who spoke there last
        self._disconnected: set[bytes] = set()
        # A send to a peer that is gone must say so, and a peer that comes back before TCP has
        # noticed its loss must get in.
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._monitor = self._socket.get_monitor_socket(
            sum(_FAILED_HANDSHAKES) | zmq.Event.DISCONNECTED
        )
        self._zap: zmq.Socket[bytes] | None = None
        self._client_key = b""
        try:
            if secret is not None:
                self._require(secret)
            self._socket.bind(_endpoint(_resolved(address)))
        except gaierror as error:
            self.close()
            raise TransportError(
                f"{address} cannot be bound: this host knows no such name ({error.strerror}); set "
                "POD_IP or TASKD_BIND_ADDR to an IP address of this host, or TASKD_BIND_ADDR to * "
                "for all of them"
            ) from error
        except zmq.ZMQError as error:
            self.close()
            is_taken = error.errno == errno.EADDRINUSE
            kind = AddressTakenError if is_taken else TransportError
            raise kind(_bind_failure(address, error)) from error
        if secret is None and not _is_local(self.address):
            log.warning(
                "%s can be reached by other hosts and no secret is set: whoever reaches it "
                "can stop the job. Set TASKD_SECRET_FILE on every node.",
                self.address,
            )

    @property
    def address(self) -> str:
        """Where it listens, with the real port."""
        return self._socket.getsockopt_string(zmq.LAST_ENDPOINT).removeprefix("tcp://")

    def receive(self) -> list[tuple[bytes, bytes]]:
        """See `Link`.

        What is not one frame is handed on as an empty one, for the reader to refuse.
        """
        found = []
        for _ in range(_BATCH):
            try:
                peer = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            frame = self._socket.recv(copy=False, track=False)
            data = frame.bytes
            self._note_connection(peer, frame)
            while frame.more:
                frame, data = self._socket.recv(copy=False, track=False), b""
            found.append((peer, data))
        return found

    def _note_connection(self, peer: bytes, frame: zmq.Frame) -> None:
        """ZeroMQ says of a connection that ends no more than its descriptor."""
        try:
            connection = int(frame.get(zmq.SRCFD))
        except zmq.ZMQError:
            return  # inproc: it ends with its process
        before = self._peer_by_connection.setdefault(connection, peer)
        if before != peer:  # a new connection with the number of one whose end was not told yet
            self._disconnected.add(before)
            self._peer_by_connection[connection] = peer

    def send(self, peer: bytes | None, data: bytes) -> bool:
        """See `Link`."""
        return peer is not None and self._send([peer, data])

    def take_refused(self) -> list[str]:
        """Why connections were not let in since the last call."""
        refused, self._refused = self._refused, []
        return refused

    def take_disconnected(self) -> set[bytes]:
        """Whose connections ended since the last call.

        What was on its way on them may be lost. Those that never said anything are left out.
        """
        disconnected, self._disconnected = self._disconnected, set()
        return disconnected

    def close(self) -> None:
        """See `Link`."""
        if not self._socket.closed:
            self._socket.disable_monitor()
        super().close()

    def _require(self, secret: bytes) -> None:
        server_key = _derive_key(secret, b"server")
        self._client_key = zmq.curve_public(_derive_key(secret, b"client"))
        self._zap = self._context.socket(zmq.REP)
        self._zap.bind(_ZAP_ADDRESS)
        self._socket.setsockopt(zmq.CURVE_SERVER, 1)
        self._socket.setsockopt(zmq.CURVE_SECRETKEY, server_key)
        self._socket.setsockopt(zmq.ZAP_DOMAIN, _ZAP_DOMAIN)

    def _inner(self) -> Iterable[zmq.Socket[bytes]]:
        return [self._monitor] if self._zap is None else [self._monitor, self._zap]

    def _serve(self) -> None:
        while self._monitor.poll(0):
            told = recv_monitor_message(self._monitor)
            event = zmq.Event(told["event"])
            if event == zmq.Event.DISCONNECTED:
                peer = self._peer_by_connection.pop(int(told["value"]), None)
                self._disconnected.update(() if peer is None else (peer,))
            else:
                self._refused.append(_FAILED_HANDSHAKES[event])
        while self._zap is not None and self._zap.poll(0):
            self._answer_zap(self._zap)

    def _answer_zap(self, zap: zmq.Socket[bytes]) -> None:
        """Let in whoever proved to hold the client key of our secret."""
        version, request_id, _domain, _address, _identity, mechanism, *credentials = (
            zap.recv_multipart()
        )
        is_allowed = mechanism == b"CURVE" and [z85.encode(key) for key in credentials] == [
            self._client_key
        ]
        status, text = (b"200", b"OK") if is_allowed else (b"400", b"not allowed")
        zap.send_multipart([version, request_id, status, text, b"", b""])


class Dealer(_Socket):
    """Connects to a router at `address`, whenever one is there, and again after a loss."""

    def __init__(
        self,
        address: str,
        identity: str | bytes,
        *,
        secret: bytes | None = None,
        beside: _Socket | None = None,
    ) -> None:
        """`identity`: at most 255 bytes, unique among the router's peers.

        Raises `TransportError`.
        """
        super().__init__(zmq.DEALER, address, beside)
        self._linger_ms = 0
        self._socket.setsockopt(
            zmq.ROUTING_ID, identity.encode() if isinstance(identity, str) else identity
        )
        self._socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)
        if secret is not None:
            client_key = _derive_key(secret, b"client")
            self._socket.setsockopt(
                zmq.CURVE_SERVERKEY, zmq.curve_public(_derive_key(secret, b"server"))
            )
            self._socket.setsockopt(zmq.CURVE_PUBLICKEY, zmq.curve_public(client_key))
            self._socket.setsockopt(zmq.CURVE_SECRETKEY, client_key)
        try:
            self._socket.connect(_endpoint(address))
        except zmq.ZMQError as error:
            self.close()
            raise TransportError(
                f"{address} is no address to connect to: {error}; expected host:port"
            ) from error

    def receive(self) -> list[tuple[bytes, bytes]]:
        """See `Link`; the peer is always b""."""
        received = [(b"", frames[0] if len(frames) == 1 else b"") for frames in self._frames()]
        if received:
            self._linger_ms = _LINGER_MS  # somebody is there: last words are worth a moment
        return received

    def send(self, peer: bytes | None, data: bytes) -> bool:
        """See `Link`. `peer` is None. Without a connection messages wait, up to a bound."""
        if peer is not None:
            raise ValueError("a dealer has one peer only")
        return self._send([data])


def _is_local(address: str) -> bool:
    """Whether only this host can reach it."""
    if "://" in address:
        return True  # inproc, ipc
    host = address.rpartition(":")[0].strip("[]")
    return ipaddress.ip_address(host.partition("%")[0]).is_loopback


def _resolved(address: str) -> str:
    """`address` with the IP address, IPv4 if there is one, of the name in it."""
    host, _, port = address.rpartition(":")
    if "://" in address or not re.search(r"[^\d.]", host) or ":" in host:
        return address
    found = getaddrinfo(host, None, type=SOCK_STREAM)
    host = str(min(found)[4][0])  # AF_INET comes before AF_INET6
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _bind_failure(address: str, error: zmq.ZMQError) -> str:
    """What to do when an address cannot be bound."""
    port = address.rpartition(":")[2]
    if error.errno == errno.EADDRINUSE:
        return (
            f"{address} is taken, perhaps by another manager: look for the process with  "
            f"ss -ltnp 'sport = :{port}'  and stop it, or set TASKD_PORT to another port for the "
            "manager and all agents"
        )
    if error.errno in (errno.EADDRNOTAVAIL, errno.ENODEV):
        return (
            f"{address} cannot be bound: this host has no such address; look at  ip addr  and "
            "set TASKD_BIND_ADDR"
        )
    if error.errno == errno.EACCES:
        return (
            f"{address} cannot be bound: ports below 1024 need privileges; set TASKD_PORT to a "
            "higher one"
        )
    return f"{address} cannot be bound: {error}; expected host:port"
