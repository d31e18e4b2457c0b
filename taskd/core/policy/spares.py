"""Spare nodes: who waits for the place of a lost node, and who gets which.

A spare is a torchrun without a place in the job (`TASKD_SPARE`). It is offered the place of a lost
node, says goodbye as a spare and registers as the agent of that node, like any torchrun that is
started again with its index. Owns the offers; whether a node is waited for at all is decided in
`taskd.core.job.absence`. Knows no connection and no clock.
"""

from collections.abc import Collection
from dataclasses import dataclass

from taskd.core.timeouts import Timeouts

MAX_SPARES = 4096  # each costs half a KB
_BEATS = 3  # within so many heartbeats agents that run register with a manager that is new
_MAX_LOSSES = 2  # places that a host may lose before it is offered none any more


@dataclass(slots=True)
class Spare:
    """One that waits, or has been offered a place and has not registered there yet.

    `host`: the same for all torchruns of a machine. `node_rank`: of the place; None: no offer yet.
    """

    name: str
    host: str
    heard_at: float
    node_rank: int | None = None


@dataclass(frozen=True, slots=True)
class Offer:
    """`spare` may take the place of node `node_rank`."""

    spare: str
    node_rank: int


class Spares:
    """See the module. `offers` is asked whenever something changed, and at `next_deadline`."""

    def __init__(self, timeouts: Timeouts, now: float) -> None:
        """`now`: the manager begins."""
        self._knows_at = now + _BEATS * timeouts.heartbeat_s
        self._lease_s = timeouts.agent_lease_s
        self._arrival_s = 2 * timeouts.agent_lease_s  # from its goodbye as a spare
        self._waiting: dict[str, Spare] = {}  # by name, the one that came first in front
        # by node rank: who left for this place, and until when nobody else is offered it
        self._on_the_way: dict[int, tuple[Spare, float]] = {}
        self._host_by_place: dict[int, str] = {}  # of the spare that has the place
        self._losses: dict[str, int] = {}  # by host: places that it has taken and lost

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, name: object) -> bool:
        return name in self._waiting

    @property
    def names(self) -> list[str]:
        """Of those that wait."""
        return list(self._waiting)

    def refusal(self, name: str) -> str | None:
        """Why this one may not wait, or None."""
        if name not in self._waiting and len(self._waiting) >= MAX_SPARES:
            return f"{MAX_SPARES} spares wait already"
        return None

    def may_answer(self, now: float, *, is_sure: bool) -> bool:
        """Whether to tell a torchrun that is no spare if the job runs already.

        `is_sure`: that is known. Else whoever has begun before this manager has a moment to come;
        who asks does so again, after 1, 3 and 7 heartbeats if it hears nothing.
        """
        return is_sure or now >= self._knows_at

    def join(self, name: str, host: str, now: float) -> None:
        """It waits, for the first time or again: it may have missed its offer."""
        self._waiting[name] = Spare(name, host, now)

    def heard(self, name: str, now: float) -> bool:
        """A sign of life. False: nobody knows it."""
        if name not in self._waiting:
            return False
        self._waiting[name].heard_at = now
        return True

    def leave(self, name: str, now: float, *, takes_place: bool = False) -> None:
        """It does not wait any more: it takes the place that it was offered, or ends."""
        spare = self._waiting.pop(name, None)
        if spare is not None and takes_place and spare.node_rank is not None:
            self._on_the_way[spare.node_rank] = (spare, now + self._arrival_s)

    def offers(
        self, lost: Collection[int], now: float, takers: Collection[str] | None = None
    ) -> list[Offer]:
        """What to offer now, given the nodes whose place is free.

        `takers`: the only ones who may have one.
        """
        for node_rank, (spare, until) in list(self._on_the_way.items()):
            if node_rank not in lost or now >= until:
                del self._on_the_way[node_rank]
                self._host_by_place[node_rank] = spare.host
        for node_rank in sorted(set(lost) & set(self._host_by_place)):
            host = self._host_by_place.pop(node_rank)
            self._losses[host] = self._losses.get(host, 0) + 1
        for name in [name for name, spare in self._waiting.items() if self._is_gone(spare, now)]:
            del self._waiting[name]
        for spare in self._waiting.values():
            if spare.node_rank not in lost:
                spare.node_rank = None
        offered = {spare.node_rank for spare in self._waiting.values()}
        offered.update(self._on_the_way)
        free = (
            spare
            for spare in list(self._waiting.values())
            if self._may_take(spare) and (takers is None or spare.name in takers)
        )
        made = []
        # A free place with nobody to take it is no error: zip ends with the shorter one.
        for node_rank, spare in zip(sorted(set(lost) - offered), free, strict=False):
            spare.node_rank = node_rank
            made.append(Offer(spare.name, node_rank))
        return made

    @property
    def expected(self) -> set[int]:
        """Nodes whose place somebody has been offered, and has not refused or missed."""
        offered = {spare.node_rank for spare in self._waiting.values()}
        return {place for place in (*offered, *self._on_the_way) if place is not None}

    def unserved(self, lost: Collection[int]) -> dict[int, str]:
        """Places that nobody is about to take, each with the reason.

        None of them while a spare waits that may take one: who holds it back says why.
        """
        hosts = [spare.host for spare in self._waiting.values() if spare.node_rank is None]
        if not all(self.is_barred(host) for host in hosts):
            return {}
        why = f"the spares that wait are on hosts that have lost {_MAX_LOSSES} places before"
        why = why if hosts else "no spare waits"
        return dict.fromkeys(sorted(set(lost) - self.expected), why)

    def is_barred(self, host: str) -> bool:
        """Whether this host has lost so many places that it gets none any more."""
        return self._losses.get(host, 0) >= _MAX_LOSSES

    def next_deadline(self) -> float | None:
        """When a spare counts as gone, or as too slow; None: nothing is waited for."""
        leases = [spare.heard_at + self._lease_s for spare in self._waiting.values()]
        return min([*leases, *(until for _, until in self._on_the_way.values())], default=None)

    def _is_gone(self, spare: Spare, now: float) -> bool:
        return now >= spare.heard_at + self._lease_s

    def _may_take(self, spare: Spare) -> bool:
        return spare.node_rank is None and not self.is_barred(spare.host)
