"""ZeroMQ over TCP: a `Router` for the manager, a `Dealer` for each agent. The only module that imports zmq.

With a secret, connections are encrypted and both sides prove that they know it (CURVE; the key pairs are derived from the
secret, and an allow-list in the manager's own loop answers ZAP requests). Without one, anybody who reaches the port is heard, and
what they say is checked by `wire.codec` and the manager.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import time
from typing import TYPE_CHECKING

import zmq

from taskd.errors import TransportError

if TYPE_CHECKING:
    from collections.abc import Sequence

log = logging.getLogger(__name__)

MAX_FRAME_BYTES = 300 * 1024        # somewhat above the protocol's own limit, whose error says more
_LINGER_MS = 1000                   # a farewell has this long to leave the machine
_HIGH_WATER_MARK = 10_000           # messages per peer; a heartbeat a second and a few dozen per recovery are usual
_RECONNECT_MS, _RECONNECT_MAX_MS = 100, 2000
_KEEPALIVE_IDLE_S, _KEEPALIVE_INTERVAL_S, _KEEPALIVE_COUNT = 10, 5, 3
_HANDSHAKE_MS = 5000                # a connection that says nothing is dropped
_ZAP_ENDPOINT = "inproc://zeromq.zap.01"


def _z85(data: bytes) -> bytes:
    from zmq.utils import z85  # noqa: PLC0415 - only with a secret

    return bytes(z85.encode(data))


def _key_pair(secret: bytes, who: str) -> tuple[bytes, bytes]:
    """(public, secret) in Z85, derived from the job's secret, for "manager" or "agent"."""
    private = _z85(hashlib.sha256(b"taskd:" + who.encode() + b":" + secret).digest())
    return zmq.curve_public(private), private


class _Socket:
    """What both kinds have in common."""

    def __init__(self, kind: int) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(kind)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._registered: set[int] = set()
        for option, value in (
            (zmq.LINGER, _LINGER_MS), (zmq.SNDHWM, _HIGH_WATER_MARK), (zmq.RCVHWM, _HIGH_WATER_MARK),
            (zmq.MAXMSGSIZE, MAX_FRAME_BYTES), (zmq.TCP_KEEPALIVE, 1), (zmq.TCP_KEEPALIVE_IDLE, _KEEPALIVE_IDLE_S),
            (zmq.TCP_KEEPALIVE_INTVL, _KEEPALIVE_INTERVAL_S), (zmq.TCP_KEEPALIVE_CNT, _KEEPALIVE_COUNT),
            (zmq.HANDSHAKE_IVL, _HANDSHAKE_MS), (zmq.RECONNECT_IVL, _RECONNECT_MS),
            (zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS), (zmq.IPV6, 1),
        ):
            self._socket.setsockopt(option, value)

    def poll(self, timeout_s: float | None, fds: Sequence[int] = ()) -> set[int]:
        """See `taskd.transport.base.Transport`."""
        wanted = set(fds)
        for fd in self._registered - wanted:
            self._poller.unregister(fd)
        for fd in wanted - self._registered:
            self._poller.register(fd, zmq.POLLIN)
        self._registered = wanted
        # Rounded up: a wait that ends a moment before its deadline would only be repeated.
        ready = self._poller.poll(None if timeout_s is None else int(timeout_s * 1000) + 1)
        return {fd for fd, _ in ready if fd in wanted}

    def close(self) -> None:
        """See `taskd.transport.base.Transport`."""
        self._socket.close()
        self._context.term()


class Dealer(_Socket):
    """An agent's side. Connects when there is somebody, and again for ever."""

    def __init__(self, address: str, identity: str, secret: bytes | None = None) -> None:
        """`address`: host:port. Raises TransportError if that is no address."""
        super().__init__(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, identity.encode())
        # Without a connection nothing is queued: what was said to a manager that has gone would reach the next one.
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        if secret is not None:
            self._socket.curve_serverkey = _key_pair(secret, "manager")[0]
            self._socket.curve_publickey, self._socket.curve_secretkey = _key_pair(secret, "agent")
        try:
            self._socket.connect(f"tcp://{address}")
        except zmq.ZMQError as error:
            self.close()
            raise TransportError(f"{address!r} is no address of a manager (host:port): {error}") from error

    def send(self, peer: bytes | None, data: bytes) -> bool:
        """See `taskd.transport.base.Transport`; `peer` is None."""
        try:
            self._socket.send(data, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def receive(self) -> list[tuple[bytes, bytes]]:
        """See `taskd.transport.base.Transport`."""
        found = []
        with contextlib.suppress(zmq.Again):
            while True:
                found.append((b"", self._socket.recv_multipart(zmq.NOBLOCK)[-1]))
        return found


class Router(_Socket):
    """The manager's side."""

    def __init__(self, host: str, port: int, secret: bytes | None = None) -> None:
        """Listen on host:port ("*" for all addresses; port 0 chooses a free one, see `port`).

        Raises:
            TransportError: the address cannot be bound; the text says how to find who has it.
        """
        super().__init__(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)      # else sending to a peer that left succeeds silently
        self._zap: zmq.Socket[bytes] | None = None
        if secret is not None:
            self._authenticate(secret)
        elif host not in ("127.0.0.1", "localhost", "::1"):
            log.warning("the manager listens on %s without a secret: whoever reaches port %d is heard. Set TASKD_SECRET_FILE "
                        "for the manager and all agents.", host, port)
        literal = f"[{host}]" if ":" in host else host
        try:
            self._socket.bind(f"tcp://{literal}:{port}" if port else f"tcp://{literal}:*")
        except zmq.ZMQError as error:
            self.close()
            if error.errno == errno.EADDRINUSE:
                raise TransportError(
                    f"{host}:{port} is taken: look for the process with `ss -ltnp 'sport = :{port}'` (another manager of an "
                    "earlier job?), end it, or set TASKD_PORT for the manager and all agents") from error
            raise TransportError(f"cannot listen on {host}:{port}: {error}") from error
        self.port = int(self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])

    def _authenticate(self, secret: bytes) -> None:
        self._zap = self._context.socket(zmq.ROUTER)
        self._zap.setsockopt(zmq.LINGER, 0)
        self._zap.bind(_ZAP_ENDPOINT)
        self._poller.register(self._zap, zmq.POLLIN)
        self._socket.curve_server = True
        _, self._socket.curve_secretkey = _key_pair(secret, "manager")
        self._allowed = zmq.utils.z85.decode(_key_pair(secret, "agent")[0])
        self._socket.zap_domain = b"taskd"

    def poll(self, timeout_s: float | None, fds: Sequence[int] = ()) -> set[int]:
        """See `taskd.transport.base.Transport`; requests to join are answered on the way."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            ready = super().poll(None if deadline is None else max(0.0, deadline - time.monotonic()), fds)
            if self._zap is None or not self._zap.poll(0) or self._socket.poll(0) or ready:
                self._answer_zap()
                return ready
            self._answer_zap()

    def _answer_zap(self) -> None:
        """ZAP (rfc.zeromq.org/spec/27): who knows the secret has the one public key that is allowed."""
        if self._zap is None:
            return
        with contextlib.suppress(zmq.Again):
            while True:
                frames = self._zap.recv_multipart(zmq.NOBLOCK)
                address, version, request_id, mechanism, key = frames[0], frames[2], frames[3], frames[7], frames[-1]
                allowed = mechanism == b"CURVE" and key == self._allowed
                if not allowed:
                    log.warning("a connection from %s was refused: it does not know the job's secret",
                                frames[5].decode(errors="replace"))
                status = (b"200", b"OK") if allowed else (b"400", b"not a member of this job")
                self._zap.send_multipart([address, b"", version, request_id, *status, b"", b""])

    def send(self, peer: bytes | None, data: bytes) -> bool:
        """See `taskd.transport.base.Transport`."""
        assert peer is not None
        try:
            self._socket.send_multipart([peer, data], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno in (errno.EHOSTUNREACH, errno.EAGAIN):
                return False
            raise
        return True

    def receive(self) -> list[tuple[bytes, bytes]]:
        """See `taskd.transport.base.Transport`. Messages of several frames are reduced to their last one."""
        found = []
        with contextlib.suppress(zmq.Again):
            while True:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
                found.append((frames[0], frames[-1]))
        return found

    def close(self) -> None:
        """See `taskd.transport.base.Transport`."""
        if getattr(self, "_zap", None) is not None:
            assert self._zap is not None
            self._zap.close()
        super().close()
