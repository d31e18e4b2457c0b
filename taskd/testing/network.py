"""A network in memory, over virtual time, as bad as one asks for.

Between two ends messages keep their order, as in a TCP connection: a lost packet is sent again,
which shows as delay. Between different pairs there is no order. `cut` breaks a connection: what is
under way is gone, and the far end learns of it only by what is missing. `part` takes a link down
for a while, `slow_down` makes every message of an end late. `duplicate` repeats messages, as an
agent that registers again does.
"""

import functools
import random
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass

from taskd.testing.clock import FakeClock


@dataclass(frozen=True, slots=True)
class NetworkQuality:
    """Seconds and probabilities, per message."""

    delay_s: float = 0.0005
    jitter_s: float = 0.001
    loss: float = 0.0  # each loss costs one retransmission
    retransmission_s: float = 0.2
    duplicate: float = 0.0


class MemoryNetwork:
    """Delivers anything from one address to another by calling the receiver of that address."""

    def __init__(
        self, clock: FakeClock, rng: random.Random, quality: NetworkQuality | None = None
    ) -> None:
        self._clock = clock
        self._rng = rng
        self._quality = quality or NetworkQuality()
        self._receiver_by_address: dict[Hashable, Callable[[Hashable, object], None]] = {}
        self._last_arrival: dict[tuple[Hashable, Hashable], float] = {}
        self._under_way: dict[tuple[Hashable, Hashable], deque[object]] = {}
        self._connection: dict[frozenset[Hashable], int] = {}
        self._parted: dict[frozenset[Hashable], tuple[float, bool]] = {}  # until when; lossy
        self._slowness: dict[Hashable, float] = {}  # seconds, by end
        self.dropped = 0
        self.delivered = 0

    def listen(self, address: Hashable, receive: Callable[[Hashable, object], None]) -> None:
        """From now on this address is answered by `receive(sender, message)`."""
        self._receiver_by_address[address] = receive

    def unlisten(self, address: Hashable) -> None:
        """Nobody is there any more; what arrives is dropped."""
        self._receiver_by_address.pop(address, None)

    def send(
        self, sender: Hashable, address: Hashable, message: object, *, is_background: bool = False
    ) -> None:
        """Hand over a message; it arrives later, or never if the connection is cut.

        `is_background`: see `FakeClock`.
        """
        quality, rng, pair = self._quality, self._rng, (sender, address)
        ends = frozenset(pair)
        healed_at, is_lossy = self._parted.get(ends, (0.0, False))
        sent_at = max(self._clock.now(), healed_at)
        if is_lossy and sent_at > self._clock.now():
            self.dropped += 1
            return
        slowness_s = self._slowness.get(sender, 0.0) + self._slowness.get(address, 0.0)
        for _ in range(2 if rng.random() < quality.duplicate else 1):
            delay_s = quality.delay_s + rng.random() * quality.jitter_s + slowness_s
            while rng.random() < quality.loss:
                delay_s += quality.retransmission_s
            arrival = max(sent_at + delay_s, self._last_arrival.get(pair, 0.0))
            self._last_arrival[pair] = arrival
            connection = self._connection.get(ends, 0)
            self._under_way.setdefault(pair, deque()).append(message)
            call = functools.partial(self._arrive, pair, connection, message)
            self._clock.call_at(arrival, call, is_background=is_background)

    def cut(self, one: Hashable, other: Hashable) -> None:
        """Break the connection: all that is under way is lost. The next message opens a new one."""
        ends = frozenset((one, other))
        self._connection[ends] = self._connection.get(ends, 0) + 1
        self._under_way.pop((one, other), None)
        self._under_way.pop((other, one), None)

    def part(self, one: Hashable, other: Hashable, seconds: float, *, is_lossy: bool) -> None:
        """The link between them is down for so long.

        What is sent meanwhile is lost, with what is under way; or it arrives when the link is up.
        """
        if is_lossy:
            self.cut(one, other)
        self._parted[frozenset((one, other))] = (self._clock.now() + seconds, is_lossy)

    def is_parted(self, one: Hashable, other: Hashable) -> bool:
        """Whether the link between them is down."""
        return self._parted.get(frozenset((one, other)), (0.0, False))[0] > self._clock.now()

    def slow_down(self, end: Hashable, seconds: float) -> None:
        """From now on every message from there and to there takes so much longer."""
        self._slowness[end] = seconds

    def is_slow(self, end: Hashable, seconds: float) -> bool:
        """Whether every message from there and to there takes at least so much longer."""
        return self._slowness.get(end, 0.0) >= seconds

    def under_way(self, sender: Hashable, address: Hashable) -> Iterable[object]:
        """What will arrive there, in its order, if nothing cuts the connection."""
        return self._under_way.get((sender, address), ())

    def _arrive(self, pair: tuple[Hashable, Hashable], connection: int, message: object) -> None:
        receive = self._receiver_by_address.get(pair[1])
        is_cut = self._connection.get(frozenset(pair), 0) != connection
        if not is_cut:
            self._under_way[pair].popleft()
        if receive is None or is_cut:
            self.dropped += 1
            return
        self.delivered += 1
        receive(pair[0], message)
