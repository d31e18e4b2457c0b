"""Deadlines as data: who was last heard when, and who is overdue.

Owns no clock: `now` is always handed in. `Deadlines` is the bare table; `Leases` adds the rule for
agents: a lease that ran out is checked once more after a short while, because a manager that was
itself stopped (SIGSTOP, swapping, a paused virtual machine) wakes up with every lease overdue and
all the heartbeats still in its socket.
"""

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

from taskd.core.timeouts import Timeouts

_DOUBTFUL_BEATS = 3  # a node whose place somebody else claims has been silent for so many

Key = TypeVar("Key", bound=Hashable)


class Deadlines(Generic[Key]):
    """A table of deadlines by key.

    `next()` is exact and costs O(log n) amortised, also for thousands of ranks.
    """

    def __init__(self) -> None:
        # a plain dict looks at all that was taken out before it comes to its first key
        self._deadline_by_key: OrderedDict[Key, float] = OrderedDict()
        self._heap: list[tuple[float, int, Key]] = []
        self._pushes = 0

    def __contains__(self, key: object) -> bool:
        return key in self._deadline_by_key

    def __len__(self) -> int:
        return len(self._deadline_by_key)

    def __iter__(self) -> Iterator[Key]:
        return iter(self._deadline_by_key)

    def deadline_of(self, key: Key) -> float | None:
        """None: it has none."""
        return self._deadline_by_key.get(key)

    def pending(self) -> list[Key]:
        """The keys in the order in which they were first set."""
        return list(self._deadline_by_key)

    def set(self, key: Key, deadline: float) -> None:
        """Set or move the deadline of `key`."""
        self._deadline_by_key[key] = deadline
        self._pushes += 1
        heappush(self._heap, (deadline, self._pushes, key))

    def set_each(self, deadlines: Iterable[tuple[Key, float]]) -> None:
        """Set or move nearly all, each a key with its deadline: costs O(n), however few are set."""
        for key, deadline in deadlines:
            self._deadline_by_key[key] = deadline
            self._pushes += 1
            self._heap.append((deadline, self._pushes, key))
        heapify(self._heap)

    def discard(self, key: Key) -> None:
        """Forget `key`."""
        self._deadline_by_key.pop(key, None)

    def clear(self) -> None:
        """Forget all."""
        self._deadline_by_key.clear()
        self._heap.clear()

    def next(self) -> float | None:
        """The earliest deadline."""
        while self._heap:
            deadline, _, key = self._heap[0]
            if self._deadline_by_key.get(key) == deadline:
                return deadline
            heappop(self._heap)
        return None

    def overdue(self, now: float) -> list[Key]:
        """The keys whose deadline has come, in the order in which they were set."""
        first = self.next()
        if first is None or first > now:
            return []
        return [key for key, deadline in self._deadline_by_key.items() if deadline <= now]


class Leases:
    """The agents' right to count as alive, by node rank."""

    def __init__(self, timeouts: Timeouts) -> None:
        self.use(timeouts)
        self._deadlines: Deadlines[int] = Deadlines()
        self._heard_at: dict[int, float] = {}
        self._rechecked: set[int] = set()

    def use(self, timeouts: Timeouts) -> None:
        """For what is granted from now on."""
        self._recheck_s = timeouts.lease_recheck_s
        self._first_s = timeouts.agent_lease_s - timeouts.lease_recheck_s
        self._doubtful_s = _DOUBTFUL_BEATS * timeouts.heartbeat_s

    def renew(self, node_rank: int, now: float) -> None:
        """The agent was heard."""
        self._heard_at[node_rank] = now
        self._rechecked.discard(node_rank)
        self._deadlines.set(node_rank, now + self._first_s)

    def doubt(self, node_rank: int, now: float) -> None:
        """Somebody else claims its place: it has to be heard soon."""
        if node_rank in self._deadlines and node_rank not in self._rechecked:
            self._rechecked.add(node_rank)
            soon = max(now + self._recheck_s, self._heard_at[node_rank] + self._doubtful_s)
            self._deadlines.set(node_rank, min(soon, now + self._first_s))

    def drop(self, node_rank: int) -> None:
        """The agent left: its silence means nothing any more."""
        self._deadlines.discard(node_rank)
        self._rechecked.discard(node_rank)

    def is_held(self, node_rank: int) -> bool:
        """Whether the agent counts as alive."""
        return node_rank in self._deadlines

    def decided_at(self, node_rank: int) -> float | None:
        """When it is known whether this agent, which should have been heard, is lost.

        None: it was heard in time.
        """
        is_doubtful = node_rank in self._rechecked
        return self._deadlines.deadline_of(node_rank) if is_doubtful else None

    def silence_s(self, node_rank: int, now: float) -> float:
        """Seconds since the agent was last heard."""
        return now - self._heard_at[node_rank]

    def expired(self, now: float) -> list[int]:
        """The nodes whose lease has ended by now, sorted; their leases are dropped."""
        lost = []
        for node_rank in sorted(self._deadlines.overdue(now)):
            if node_rank in self._rechecked:
                self.drop(node_rank)
                lost.append(node_rank)
            else:
                self._rechecked.add(node_rank)
                self._deadlines.set(node_rank, now + self._recheck_s)
        return lost

    def are_deserted(self, now: float, silence_s: float) -> bool:
        """Whether a lease ends by now, and none of the other agents has been heard for so long."""
        ends = any(node_rank in self._rechecked for node_rank in self._deadlines.overdue(now))
        return ends and all(self.silence_s(one, now) >= silence_s for one in self._deadlines)

    def next_deadline(self) -> float | None:
        """When `expired` should be asked next."""
        return self._deadlines.next()
