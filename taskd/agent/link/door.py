"""The port at which a torchrun takes part in an election, and its connections to those of others.

At most so many of these are there at once, and some descriptors are left free: a job has thousands
of nodes, and the torchrun that was elected has to start a manager and to connect to it. Knows no
rules of an election.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from taskd.agent.listeners import BoundedListener
from taskd.config import join_address
from taskd.errors import RemoteProtocolError, TransportError
from taskd.log import SayOnce
from taskd.transport import binding, zeromq
from taskd.wire import codec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from taskd.clock import Clock
    from taskd.config import AgentConfig
    from taskd.wire import messages

log = logging.getLogger(__name__)

MOST_WAYS = 64  # a quorum of 99 voters is 50
_WAY_S = 1.0  # a connection that is not there by then makes room for another one
_LOOK_S = 0.05  # between two looks for room, while somebody waits for it
_PER_WAY = 4  # descriptors
_RESERVED = 16  # for a manager, and the connection to it


class Door:
    """Where a process hears that another manager was elected, and is asked for its vote."""

    def __init__(
        self, config: AgentConfig, clock: Clock, node_rank: int | None, incarnation: str
    ) -> None:
        """`node_rank`: None for a spare. Raises `TransportError`."""
        role = "spare" if node_rank is None else "agent"
        self._sender = (config.job_id, role, node_rank, None, incarnation, 0)
        self._secret = config.secret
        self.listener = BoundedListener(join_address(config.own_address, 0), config.secret, clock)
        self.ways = Ways(self.connect)
        self._said = 0
        self._once = SayOnce()

    @property
    def address(self) -> str:
        """host:port."""
        return self.listener.address

    @property
    def links(self) -> list[zeromq.Router | zeromq.Dealer]:
        """To be polled."""
        return [self.listener.router, *self.ways.links]

    def heard(self) -> list[tuple[bytes, str, object]]:
        """What others of this job said here: connection, incarnation, message."""
        return list(self._read(self.listener.router.receive()))

    def answers(self) -> list[tuple[str, object]]:
        """What others of this job said on the ways to them: incarnation, message."""
        return [(name, message) for _, name, message in self._read(self.ways.receive())]

    def _read(self, said: Sequence[tuple[bytes, bytes]]) -> Iterator[tuple[bytes, str, object]]:
        for peer, data in said:
            try:
                envelope, message = codec.decode(data)
            except RemoteProtocolError as error:
                if self._once.is_new(error.reason, str(error)):
                    log.warning("what is no word of another voter was refused: %s", error)
                continue
            if envelope.job_id == self._sender[0] and isinstance(envelope.incarnation, str):
                yield peer, envelope.incarnation, message

    def drop(self, why: str) -> None:
        """Close all connections, as `BoundedListener.drop`. Raises `TransportError`."""
        self.ways.close()  # they share what is closed now
        self.listener.drop(why)

    def turn(self) -> None:
        """Let go of what is not looked at."""
        self.listener.router.take_refused()
        self.listener.router.take_disconnected()

    def encode(self, message: messages.Message) -> bytes:
        """The bytes of a message of this process."""
        self._said += 1
        return codec.encode(codec.Envelope(*self._sender, self._said, "election"), message)

    def connect(self, address: str) -> zeromq.Dealer:
        """To the door of another one. Raises `TransportError`."""
        name, beside = f"{self._sender[4]}.{self._said}", self.listener.router
        return zeromq.Dealer(address, name, secret=self._secret, beside=beside, watches=True)

    def close(self) -> None:
        """No more."""
        self.ways.close()
        self.listener.close()


@dataclass(slots=True)
class _Way:
    """A connection. `since`: when something was said there. `awaited`: so many answers."""

    dealer: zeromq.Dealer
    since: float
    awaited: int = 0

    def is_over(self, now: float) -> bool:
        """Whether it has done what it was there for, or will not."""
        is_done = self.dealer.is_connected and not self.awaited
        return is_done or now >= self.since + _WAY_S


class Ways:
    """Connections to the doors of others. See the module."""

    def __init__(self, connect: Callable[[str], zeromq.Dealer]) -> None:
        """`connect` raises `TransportError`."""
        self._connect = connect
        self._ways: dict[str, _Way] = {}  # by address, the oldest first
        self._waiting: dict[str, tuple[bytes, bool]] = {}  # what is to be said, and if it answers
        self._look_at = 0.0
        self._once = SayOnce()

    @property
    def links(self) -> list[zeromq.Dealer]:
        """To be polled."""
        return [way.dealer for way in self._ways.values()]

    @property
    def next_deadline(self) -> float | None:
        """When `turn` has something to do."""
        return self._look_at if self._waiting else None

    def say(self, data: bytes, addresses: Iterable[str], now: float, *, is_answered: bool) -> None:
        """This is to be said there, instead of what has had to wait until now."""
        self._waiting.update(dict.fromkeys(addresses, (data, is_answered)))
        self.turn(now)

    def turn(self, now: float) -> None:
        """Say what has had to wait, as far as there is room."""
        self._look_at = now + _LOOK_S
        for address in [address for address in self._waiting if address in self._ways]:
            self._send(self._ways[address], address, now)
        for address in list(self._waiting):
            if not self._has_room(address, now):
                break
            try:
                self._ways[address] = _Way(self._connect(address), now)
            except TransportError as error:
                del self._waiting[address]
                self._say_unreached(error)
            else:
                self._send(self._ways[address], address, now)

    def receive(self) -> list[tuple[bytes, bytes]]:
        """What has been answered."""
        found: list[tuple[bytes, bytes]] = []
        for way in self._ways.values():
            said = way.dealer.receive()
            way.awaited = max(0, way.awaited - len(said))
            found += said
        return found

    def close(self) -> None:
        """Hang up; what has had to wait is not said."""
        for way in self._ways.values():
            way.dealer.close()
        self._ways.clear()
        self._waiting.clear()

    def _send(self, way: _Way, address: str, now: float) -> None:
        data, is_answered = self._waiting.pop(address)
        way.awaited, way.since = way.awaited + is_answered, now
        way.dealer.send(None, data)

    def _has_room(self, address: str, now: float) -> bool:
        """Whether one more may be opened. What is over is closed for it."""
        is_full = len(self._ways) >= MOST_WAYS
        if not is_full and self._is_affordable(address):
            return True
        over = [known for known, way in self._ways.items() if way.is_over(now)]
        for known in over[:1] if is_full else over:
            self._ways.pop(known).dealer.part()
        return is_full and bool(over) and self._is_affordable(address)

    def _is_affordable(self, address: str) -> bool:
        """Whether there are descriptors, for those that are about to be connected, too."""
        coming = sum(not way.dealer.is_connected for way in self._ways.values())
        try:
            binding.require_descriptors(address, _RESERVED + _PER_WAY * (1 + coming))
        except TransportError as error:
            if not self._ways:
                self._say_unreached(error)
            return False
        return True

    def _say_unreached(self, error: TransportError) -> None:
        if self._once.is_new(str(error)):
            log.warning("a voter cannot be reached: %s", error)
