"""The `Link` contract in memory, for tests and simulation: ordered, and lossy on demand.

Owns no thread and no clock: `poll` never waits, it returns at once whatever the timeout. Must not
know messages.
"""

from collections import deque
from collections.abc import Callable, Sequence

from taskd.errors import TransportError
from taskd.transport.base import MAX_FRAME_BYTES

Filter = Callable[[bytes, bytes], bool]


class MemoryNetwork:
    """Where routers and dealers of one test meet.

    `passes(peer, data)` decides about each message in either direction, `peer` being the dealer's
    identity; False loses it.
    """

    def __init__(self, passes: Filter | None = None) -> None:
        self.passes: Filter = passes or (lambda _peer, _data: True)
        self.routers: dict[str, MemoryRouter] = {}


class _MemoryLink:
    """What router and dealer share."""

    def __init__(self, network: MemoryNetwork, address: str) -> None:
        self._network = network
        self.address = address
        self.inbox: deque[tuple[bytes, bytes]] = deque()

    def poll(self, timeout_s: float | None, fds: Sequence[int] = ()) -> set[int]:  # noqa: ARG002
        """See `Link`; no descriptors here."""
        return set()

    def receive(self) -> list[tuple[bytes, bytes]]:
        """See `Link`."""
        received = list(self.inbox)
        self.inbox.clear()
        return received


class MemoryRouter(_MemoryLink):
    """Binds a name."""

    def __init__(self, network: MemoryNetwork, address: str) -> None:
        if address in network.routers:
            raise TransportError(f"{address} is taken")
        super().__init__(network, address)
        self.is_abused = False
        self.dealers: dict[bytes, MemoryDealer] = {}
        network.routers[address] = self

    def send(self, peer: bytes | None, data: bytes) -> bool:
        """See `Link`."""
        dealer = None if peer is None else self.dealers.get(peer)
        if peer is None or dealer is None:
            return False
        if self._network.passes(peer, data):
            dealer.inbox.append((b"", data))
        return True

    def drop_connections(self) -> None:
        """See `Listener`."""
        self.inbox.clear()

    def hang_up(self, peer: bytes) -> None:
        """Nor is a connection closed."""

    def take_refused(self) -> list[str]:
        """Nobody is turned away here."""
        return []

    def take_disconnected(self) -> set[bytes]:
        """Nor does a connection break; lose messages with the network's filter."""
        return set()

    def close(self) -> None:
        """See `Link`."""
        self._network.routers.pop(self.address, None)


class MemoryDealer(_MemoryLink):
    """Connects to a name, also if nobody is there yet: messages wait until somebody is."""

    def __init__(self, network: MemoryNetwork, address: str, identity: str | bytes) -> None:
        super().__init__(network, address)
        self._identity = identity.encode() if isinstance(identity, str) else identity
        self._waiting: deque[bytes] = deque()
        self._connect()

    def _connect(self) -> MemoryRouter | None:
        router = self._network.routers.get(self.address)
        if router is not None:
            router.dealers[self._identity] = self
            while self._waiting:
                router.inbox.append((self._identity, self._waiting.popleft()))
        return router

    def poll(self, timeout_s: float | None, fds: Sequence[int] = ()) -> set[int]:
        """See `Link`. Finds a router that has come since."""
        self._connect()
        return super().poll(timeout_s, fds)

    def send(self, peer: bytes | None, data: bytes) -> bool:
        """See `Link`."""
        if peer is not None:
            raise ValueError("a dealer has one peer only")
        if self._network.passes(self._identity, data) and len(data) <= 4 * MAX_FRAME_BYTES:
            self._waiting.append(data)
        self._connect()
        return True

    def close(self) -> None:
        """See `Link`."""
        router = self._network.routers.get(self.address)
        if router is not None and router.dealers.get(self._identity) is self:
            del router.dealers[self._identity]
