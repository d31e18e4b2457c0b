"""Deadlines as data: who was last heard when, and who is overdue.

Owns no clock: `now` is always handed in. `Deadlines` is the bare table; `Leases` adds the rule for
agents: a lease that ran out is checked once more after a short while, because a manager that was
itself stopped (SIGSTOP, swapping, a paused virtual machine) wakes up with every lease overdue and
all the heartbeats still in its socket.
"""

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator
from heapq import heappop, heappush
from typing import Generic, TypeVar

from taskd.core.timeouts import Timeouts

_DOUBTFUL_BEATS = 3  # a node whose place somebody else claims has been silent for so many

Key = TypeVar("Key", bound=Hashable)


class Deadlines(Generic[Key]):
    """A table of deadlines by key.

    `next()` is exact and costs O(log n) amortised for n different deadlines, also for thousands of
    ranks. Most of these have the same.
    """

    def __init__(self) -> None:
        # a plain dict looks at all that was taken out before it comes to its first key
        self._deadline_by_key: OrderedDict[Key, float] = OrderedDict()
        self._counts: dict[float, int] = {}  # how many keys have this deadline
        self._heap: list[float] = []  # all of `_counts`, and some that nobody has any more

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
        former = self._deadline_by_key.get(key)
        self._deadline_by_key[key] = deadline
        self._count(deadline, 1)
        if former is not None:
            self._uncount(former)

    def set_all(self, keys: Iterable[Key], deadline: float) -> None:
        """Set or move the deadline of all of these."""
        moved = OrderedDict.fromkeys(keys, deadline)
        if not moved:
            return
        before = self._deadline_by_key
        if before:
            former = [before[key] for key in moved if key in before]
            before.update(moved)
        else:
            former, self._deadline_by_key = [], moved
        self._count(deadline, len(moved))
        for one in former:
            self._uncount(one)

    def discard(self, key: Key) -> None:
        """Forget `key`."""
        deadline = self._deadline_by_key.pop(key, None)
        if deadline is not None:
            self._uncount(deadline)

    def clear(self) -> None:
        """Forget all."""
        self._deadline_by_key.clear()
        self._counts.clear()
        self._heap.clear()

    def next(self) -> float | None:
        """The earliest deadline."""
        while self._heap and self._heap[0] not in self._counts:
            heappop(self._heap)
        return self._heap[0] if self._heap else None

    def overdue(self, now: float) -> list[Key]:
        """The keys whose deadline has come, in the order in which they were set."""
        first = self.next()
        if first is None or first > now:
            return []
        return [key for key, deadline in self._deadline_by_key.items() if deadline <= now]

    def _count(self, deadline: float, more: int) -> None:
        count = self._counts.get(deadline, 0)
        self._counts[deadline] = count + more
        if not count:
            heappush(self._heap, deadline)

    def _uncount(self, deadline: float) -> None:
        count = self._counts[deadline]
        if count > 1:
            self._counts[deadline] = count - 1
        else:
            del self._counts[deadline]


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

    def decided_at(self, node_rank: int, now: float) -> float | None:
        """When it is known whether this agent, which should have been heard, is lost.

        None: it was heard in time. So was one whose place somebody else asks for, again and again
        perhaps, as long as it has not missed several heartbeats.
        """
        if node_rank not in self._rechecked or self.silence_s(node_rank, now) < self._doubtful_s:
            return None
        return self._deadlines.deadline_of(node_rank)

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
