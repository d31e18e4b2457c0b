"""ZeroMQ behind the `Link` contract.

    Router (binds: manager, relay)  ◄── tcp ──►  Dealer (connects: agent, relay upwards,
                                                         worker without agent)

Owns sockets and their limits. With a secret links are encrypted, and a peer of a router is known by
its name and its own key (`curve`), whichever connection it has; without, by the name alone, which
is its routing id. Must not know messages.
"""

import errno
import logging
import math
import time
from collections.abc import Iterable, Sequence
from socket import gaierror

import zmq

from taskd.errors import AddressTakenError, TransportError
from taskd.transport import binding, curve, settings
from taskd.transport.monitor import FAILED_HANDSHAKES, Attempts, Monitor
from taskd.transport.silence import Silence, is_open, shut_down

log = logging.getLogger(__name__)

# plain numbers: to join two of ZeroMQ's flags takes longer than to send a frame
_NOBLOCK, _MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)
_LINGER_MS = 1000  # for the last words on a connection that is up
DEFAULT_UNACKNOWLEDGED_S = 5.0  # see `Dealer`
_KEEPALIVE = {
    zmq.TCP_KEEPALIVE: 1,
    zmq.TCP_KEEPALIVE_IDLE: 10,
    zmq.TCP_KEEPALIVE_INTVL: 5,
    zmq.TCP_KEEPALIVE_CNT: 3,
}
_DESCRIPTORS_BESIDE = 4  # that one takes in the context of another
_NOBODY_VOUCHES = "a key for which nobody with the secret vouches"
_IS_SILENT = "nobody has said anything there"
_IS_ONE_TOO_MANY = "nobody had said anything there, and more have come than are let in at once"


class _Socket:
    """What router and dealer share."""

    _IO_THREADS = 1
    _DESCRIPTORS = 8  # that it takes with its context

    def __init__(
        self, kind: int, address: str, unacknowledged_s: float, beside: "_Socket | None"
    ) -> None:
        needed = self._DESCRIPTORS if beside is None else _DESCRIPTORS_BESIDE
        binding.require_descriptors(address, needed)
        self._owns_context = beside is None
        self._context: zmq.Context[zmq.Socket[bytes]] = (
            self._new_context() if beside is None else beside._context  # noqa: SLF001
        )
        self._linger_ms, self._unacknowledged_s = _LINGER_MS, unacknowledged_s
        self._open(kind, address)

    @classmethod
    def _new_context(cls) -> zmq.Context[zmq.Socket[bytes]]:
        return zmq.Context(cls._IO_THREADS)

    def _open(self, kind: int, address: str) -> None:
        self._socket = self._context.socket(kind)
        options = {
            zmq.MAXMSGSIZE: settings.MAX_MESSAGE_BYTES,
            zmq.SNDHWM: settings.HIGH_WATER_MARK,
            zmq.RCVHWM: settings.HIGH_WATER_MARK,
            zmq.LINGER: _LINGER_MS,
            zmq.HANDSHAKE_IVL: settings.HANDSHAKE_MS,
            zmq.TCP_MAXRT: int(self._unacknowledged_s * 1000),
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

    def _serve(self) -> bool:
        """Serve them. Whether the caller of `poll` is to know, as a connection is there."""
        return False

    def _due_at(self) -> float | None:
        """When `receive` has something to do even if nothing has come; monotonic seconds."""
        return None

    def _frames(self) -> Iterable[list[bytes]]:
        for _ in range(settings.BATCH):
            try:
                yield self._socket.recv_multipart(_NOBLOCK)
            except zmq.Again:
                return

    def _send(self, frames: list[bytes]) -> bool:
        *first, last = frames
        try:
            for frame in first:
                self._socket.send(frame, _MORE)
            self._socket.send(last, _NOBLOCK)
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
        due = [deadline, *(link._due_at() for link in links)]  # noqa: SLF001
        due_at = min((at for at in due if at is not None), default=None)
        wait_ms = -1 if due_at is None else math.ceil(max(0.0, due_at - time.monotonic()) * 1000)
        ready: set[zmq.Socket[bytes] | int] = {
            item for item, _ in zmq.zmq_poll([(item, zmq.POLLIN) for item in items], wait_ms)
        }
        to_serve = {link for socket, link in inner if socket in ready}
        came = [link for link in to_serve if link._serve()]  # noqa: SLF001
        is_over = not ready or (deadline is not None and time.monotonic() >= deadline)
        if came or is_over or len(ready) > sum(socket in ready for socket, _ in inner):
            return {fd for fd in fds if fd in ready}


class Router(_Socket):
    """Binds `address` and talks to many peers, addressed by their identity.

    `address`: "host:port"; port 0: any free one. A name is resolved first, which ZeroMQ would not.
    """

    _DESCRIPTORS = 13
    _IO_THREADS = 2  # an order to thousands of agents costs each of them 13 us per agent

    def __init__(
        self,
        address: str,
        *,
        secret: bytes | None = None,
        unacknowledged_s: float = DEFAULT_UNACKNOWLEDGED_S,
        silent_s: float | None = None,
        most: int | None = None,
        beside: _Socket | None = None,
    ) -> None:
        """`unacknowledged_s`: see `Dealer`. `beside`: share its ZeroMQ context (needed for inproc).

        `silent_s`: a new connection on which nobody speaks for so long is closed; None: it is not.
        `most`: with `silent_s`, connections at once. Of more, the oldest silent one is closed.

        Raises `TransportError`.
        """
        super().__init__(zmq.ROUTER, address, unacknowledged_s, beside)
        self._refused: list[str] = []
        self._peer_by_connection: dict[int, bytes] = {}  # by descriptor: who speaks there
        self._connection_by_peer: dict[bytes, int] = {}  # the same, the other way round
        self._route_by_peer: dict[bytes, bytes] = {}  # with a secret: ZeroMQ's name for it
        self._disconnected: set[bytes] = set()
        self._secret = secret
        self._silence, self._most = None if silent_s is None else Silence(silent_s), most
        self.is_abused = False
        self._listen(address)
        if secret is None and not binding.is_local(self.address):
            log.warning(
                "%s can be reached by other hosts and no secret is set: whoever reaches it "
                "can stop the job. Set TASKD_SECRET_FILE on every node.",
                self.address,
            )

    def _listen(self, address: str) -> None:
        self._socket.setsockopt(zmq.RCVHWM, settings.RECEIVED_HIGH_WATER_MARK)
        self._socket.setsockopt(zmq.SNDHWM, settings.SENT_HIGH_WATER_MARK)
        self._socket.setsockopt(zmq.BACKLOG, settings.BACKLOG)
        # A send to a peer that is gone must say so, and a peer that comes back before TCP has
        # noticed its loss must get in.
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        beginnings = 0 if self._silence is None else zmq.Event.ACCEPTED
        told = sum(FAILED_HANDSHAKES) | zmq.Event.DISCONNECTED | beginnings
        self._monitor = Monitor(self._context, self._socket, told)
        self._admission: curve.Admission | None = None
        try:
            if self._secret is not None:
                self._admission = curve.Admission(self._secret, self._socket)
            self._socket.bind(binding.endpoint(binding.resolved(address)))
        except gaierror as error:
            self.close()
            raise TransportError(binding.unknown_name(address, str(error.strerror))) from error
        except zmq.ZMQError as error:
            self.close()
            is_taken = error.errno == errno.EADDRINUSE
            kind = AddressTakenError if is_taken else TransportError
            raise kind(binding.failure(address, error.errno, str(error))) from error

    def drop_connections(self) -> None:
        """Close all connections, free what has arrived on them and was not read, and listen again.

        Not for one that shares a context. Raises `TransportError`.
        """
        address = self.address
        self._disconnected.update(self._peer_by_connection.values())
        self._peer_by_connection.clear()
        self._connection_by_peer.clear()
        self._route_by_peer.clear()
        if self._silence is not None:
            self._silence.all_over()
        self._linger_ms, self.is_abused = 0, False
        self.close()  # waits for the end of the context, so that the port is free
        binding.require_descriptors(address, self._DESCRIPTORS)
        self._linger_ms, self._context = _LINGER_MS, self._new_context()
        self._open(zmq.ROUTER, address)
        self._listen(address)

    @property
    def address(self) -> str:
        """Where it listens, with the real port."""
        return self._socket.getsockopt_string(zmq.LAST_ENDPOINT).removeprefix("tcp://")

    @property
    def is_quiet(self) -> bool:
        """Whether there is no connection; with `silent_s`."""
        return not self._peer_by_connection and not self._silence

    @property
    def _port(self) -> int:
        return int(self.address.rpartition(":")[2])

    def receive(self) -> list[tuple[bytes, bytes]]:
        """See `Link`.

        What is not one frame is handed on as an empty one, for the reader to refuse.
        """
        found: list[tuple[bytes, bytes]] = []
        byte_count = 0
        for _ in range(settings.BATCH):
            if byte_count >= settings.BATCH_BYTES or self.is_abused:
                break
            try:
                route = self._socket.recv(_NOBLOCK)
            except zmq.Again:
                self._hang_up()
                break
            frame = self._socket.recv(copy=False, track=False)
            peer = self._peer_of(route, frame)
            if self._admission is not None and peer is not None and frame.more:
                byte_count += len(frame)
                frame = self._socket.recv(copy=False, track=False)
            data = frame.bytes
            byte_count += len(data)
            if frame.more:
                data = b""
                self._skip_parts()
            if peer is not None:
                found.append((peer, data))
        return found

    def _peer_of(self, route: bytes, first: zmq.Frame) -> bytes | None:
        """Who has sent the message of this first frame; None: with a secret, nobody who may."""
        peer = route if self._admission is None else self._admission.speaker(first)
        if peer is None:
            self._refused.append(_NOBODY_VOUCHES)
        else:
            self._note_connection(peer, first)
            if self._admission is not None:
                self._route_by_peer[peer] = route
        return peer

    def _hang_up(self) -> None:
        """All that has come was read: who has not spoken by now is a stranger."""
        if self._silence is not None:
            silent = self._silence.hang_up(time.monotonic(), self._port)
            self._refused += [_IS_SILENT] * silent

    def _let_in(self, connection: int, silence: Silence) -> None:
        silence.opened(connection, time.monotonic())
        count = len(self._peer_by_connection) + len(silence)
        if self._most is not None and count > self._most:
            silence.hang_up_oldest(self._port)
            self._refused.append(_IS_ONE_TOO_MANY)

    def _skip_parts(self) -> None:
        """Of a message that is too long to be read to its end nothing more will be read."""
        for _ in range(settings.MAX_PARTS):
            if not self._socket.recv(copy=False, track=False).more:
                return
        self.is_abused = True

    def _note_connection(self, peer: bytes, frame: zmq.Frame) -> None:
        """ZeroMQ says of a connection that ends no more than its descriptor."""
        try:
            connection = int(frame.get(zmq.SRCFD))
        except zmq.ZMQError:
            return  # inproc: it ends with its process
        if self._silence is not None:
            self._silence.over(connection)
        if self._peer_by_connection.get(connection) == peer:
            return
        if not is_open(connection):  # its end may have been told before what was said there
            self._disconnected.add(peer)
            return
        self._ended(connection)  # its number is that of a new one, and its end was not told yet
        former = self._connection_by_peer.get(peer)
        if former is not None:  # it hangs in the network: its end will be told too late, or never
            self._ended(former)
        self._peer_by_connection[connection] = peer
        self._connection_by_peer[peer] = connection

    def _ended(self, connection: int) -> None:
        """What was on its way there may be lost; nobody may have spoken on it."""
        peer = self._peer_by_connection.pop(connection, None)
        if peer is not None:
            self._disconnected.add(peer)
            del self._connection_by_peer[peer]
            self._route_by_peer.pop(peer, None)

    def send(self, peer: bytes | None, data: bytes) -> bool:
        """See `Link`."""
        route = peer
        if self._admission is not None and peer is not None:
            route = self._route_by_peer.get(peer)
        return route is not None and self._send([route, data])

    def hang_up(self, peer: bytes) -> None:
        """See `Listener`."""
        connection = self._connection_by_peer.get(peer)
        if connection is not None:
            shut_down(connection, self._port)

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
        self._monitor.close()
        super().close()

    def _inner(self) -> Iterable[zmq.Socket[bytes]]:
        zap = [] if self._admission is None else [self._admission.socket]
        return [self._monitor.socket, *zap]

    def _due_at(self) -> float | None:
        return None if self._silence is None else self._silence.due_at

    def _serve(self) -> bool:
        for event, value in self._monitor.read():
            if event == zmq.Event.ACCEPTED:
                # Who has spoken came first: another thread of ZeroMQ reads.
                if self._silence is not None and value not in self._peer_by_connection:
                    self._let_in(value, self._silence)
            elif event == zmq.Event.DISCONNECTED:
                if self._silence is not None:
                    self._silence.over(value)
                self._ended(value)
            else:
                self._refused.append(FAILED_HANDSHAKES[event])
        if self._admission is not None:
            self._admission.serve()
        return False


class Dealer(_Socket):
    """Connects to a router at `address`, whenever one is there, and again after a loss."""

    _attempts: Attempts | None = None

    def __init__(
        self,
        address: str,
        identity: str | bytes,
        *,
        secret: bytes | None = None,
        key: curve.KeyPair | None = None,
        unacknowledged_s: float = DEFAULT_UNACKNOWLEDGED_S,
        beside: _Socket | None = None,
        watches: bool = False,
    ) -> None:
        """`identity`: at most 255 bytes, unique among the router's peers.

        `key`: with a secret, that of this speaker; None: one that is drawn for this link.

        `watches`: for `attempts`; a connection that comes ends a `poll`.

        `unacknowledged_s`: a connection on which the other host has not acknowledged what was sent
        for so long is given up, and made anew. TCP itself waits twice as long before each
        repetition, so that a network that was away would be silent for as long again.

        Raises `TransportError`.
        """
        super().__init__(zmq.DEALER, address, unacknowledged_s, beside)
        self._linger_ms = 0
        name = identity.encode() if isinstance(identity, str) else identity
        self._header: list[bytes] = []  # what stands before each message
        if secret is None:
            self._socket.setsockopt(zmq.ROUTING_ID, name)
        else:
            self._header.append(curve.speak(self._socket, secret, name, key or curve.draw()))
        bound_ms = int(unacknowledged_s * 1000)
        pause_ms = min(settings.RECONNECT_MAX_MS, bound_ms // 4)
        self._socket.setsockopt(zmq.RECONNECT_IVL, settings.RECONNECT_MS)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, max(settings.RECONNECT_MS, pause_ms))
        self._socket.setsockopt(zmq.CONNECT_TIMEOUT, min(settings.CONNECT_MS, bound_ms))
        if watches:
            self._attempts = Attempts(self._context, self._socket)
        try:
            self._socket.connect(binding.endpoint(address))
        except zmq.ZMQError as error:
            self.close()
            raise TransportError(
                f"{address} is no address to connect to: {error}; expected host:port"
            ) from error

    @property
    def attempts(self) -> Attempts:
        """Of one that `watches` and is open."""
        assert self._attempts is not None
        return self._attempts

    @property
    def connection(self) -> int:
        """See `Attempts`. What has happened since the last `poll` is not known yet."""
        return 0 if self._attempts is None else self._attempts.connection

    @property
    def is_connected(self) -> bool:
        """See `Attempts`."""
        return self._attempts is not None and self._attempts.is_connected

    def _inner(self) -> Iterable[zmq.Socket[bytes]]:
        return () if self._attempts is None else (self._attempts.socket,)

    def _serve(self) -> bool:
        return self._attempts is not None and self._attempts.serve()

    def close(self) -> None:
        """See `Link`."""
        if self._attempts is not None:
            self._attempts.close()
            self._attempts = None
        super().close()

    def part(self) -> None:
        """Close it; what was said on a connection that is there gets a moment to leave."""
        self._linger_ms = _LINGER_MS if self.is_connected else 0
        self.close()

    def abandon(self) -> None:
        """Close it, and drop what was not sent yet."""
        self._linger_ms = 0
        self.close()

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
        return self._send([*self._header, data])
