"""Passes messages of this node's clients on to the manager and back (`init_taskd_proxy`).

Never looks inside.

    clients ── DEALER ──► ROUTER :9602 │ one DEALER per client, with its identity ──► manager

Because identity and order are kept, the manager cannot tell a relayed client from a direct one.
Owns one thread. Decides nothing; a client that has been silent for a while is forgotten, and is
picked up again when it speaks.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from typing import TYPE_CHECKING

from taskd.errors import TransportError
from taskd.log import SayOnce
from taskd.transport import curve, zeromq

if TYPE_CHECKING:
    from taskd.clock import Clock
    from taskd.config import RelayConfig

log = logging.getLogger(__name__)

_SILENCE_S = 60.0  # clients speak once a second; one that is silent for that long is gone
_MAX_CLIENTS = 5000  # each costs a connection to the manager


class Relay:
    """See the module.

    Listening when the constructor returns; passes messages between `start` and `close`.
    """

    def __init__(self, config: RelayConfig, clock: Clock) -> None:
        """Raises `TransportError` if the port is taken."""
        self._config = config
        self._clock = clock
        self._router = zeromq.Router(
            config.listen_address, secret=config.secret, silent_s=_SILENCE_S
        )
        self._address = self._router.address  # the thread may open the port anew
        self._dealers: dict[bytes, zeromq.Dealer] = {}
        self._heard_at: dict[bytes, float] = {}
        self._once = SayOnce()
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="taskd-relay", daemon=True)

    @property
    def address(self) -> str:
        """Where clients connect to."""
        return self._address

    def start(self) -> None:
        """Begin to pass messages."""
        self._thread.start()

    def close(self) -> None:
        """Stop; clients see a manager that is silent."""
        with contextlib.suppress(OSError):  # it has ended by itself, and has said why
            self._wake_writer.send(b"x")
        self._thread.join()

    def _run(self) -> None:
        with contextlib.ExitStack() as stack:
            stack.callback(self._router.close)
            stack.callback(self._forget_all)
            stack.enter_context(self._wake_reader)
            stack.enter_context(self._wake_writer)
            while self._turn():
                pass

    def _turn(self) -> bool:
        """One wait and what came of it. False: it is over."""
        now = self._clock.now()
        silent_at = min(
            (heard_at + _SILENCE_S for heard_at in self._heard_at.values()), default=None
        )
        timeout_s = None if silent_at is None else max(0.0, silent_at - now)
        links = [self._router, *self._dealers.values()]
        if zeromq.poll(links, timeout_s, [self._wake_reader.fileno()]):
            return False
        now = self._clock.now()
        for peer, data in self._router.receive():
            self._pass_up(peer, data, now)
        if self._router.is_abused and not self._drops_connections():
            return False
        for peer, dealer in list(self._dealers.items()):
            for _, data in dealer.receive():
                if not self._router.send(peer, data) and self._once.is_new(peer):
                    log.info(
                        "relay: a client has gone away, what the manager says to it is dropped"
                    )
        for peer in [
            peer for peer, heard_at in self._heard_at.items() if heard_at + _SILENCE_S <= now
        ]:
            self._forget(peer)
        self._router.take_refused()
        self._router.take_disconnected()
        return True

    def _drops_connections(self) -> bool:
        """A message has too many parts, and nothing can be read behind it. Whether it goes on."""
        self._forget_all()  # the dealers share what is closed now
        try:
            self._router.drop_connections()
        except TransportError as error:
            log.error("relay: it ends, as its port is lost: %s", error)
            return False
        log.warning("relay: somebody floods %s: its connections were dropped", self.address)
        return True

    def _pass_up(self, peer: bytes, data: bytes, now: float) -> None:
        dealer = self._dealers.get(peer)
        if dealer is None:
            if len(self._dealers) >= _MAX_CLIENTS:
                if self._once.is_new("full"):
                    log.warning("relay: more than %d clients, others are not served", _MAX_CLIENTS)
                return
            secret = self._config.secret
            dealer = zeromq.Dealer(
                self._config.upstream_address,
                peer,
                secret=secret,
                key=None if secret is None else curve.relayed(secret, peer),
                beside=self._router,
            )
            self._dealers[peer] = dealer
        self._heard_at[peer] = now
        dealer.send(None, data)

    def _forget(self, peer: bytes) -> None:
        del self._heard_at[peer]
        self._dealers.pop(peer).close()

    def _forget_all(self) -> None:
        for peer in list(self._dealers):
            self._forget(peer)
