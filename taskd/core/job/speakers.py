"""What an agent may tell the manager: only of its own node and of the ranks that it registered.

Owns the rule, the quarantine of nodes whose messages the manager cannot digest, and how much is
refused of one peer. Knows no connections: who a sender is has been found out before.
"""

from collections import Counter

from taskd.core import events as ev
from taskd.core.job.machine import EVENTS

_ALLOWED = {*EVENTS, ev.SharedReport, ev.WorkerProfiling, ev.RosterKept, ev.ImportsKnown}
_OF_A_NODE = (
    ev.AgentLeft, ev.AgentDraining, ev.AgentMirrors, ev.MirrorsHeld, ev.MirrorsReturned,
    ev.RosterKept, ev.ImportsKnown,
)  # fmt: skip
# a manager that begins anew for one node each second serves no other
HARM_LIMIT = 3
# An agent that a manager does not know yet may have as many reports of its ranks on the way; what
# cannot be read is no agent's.
_REFUSED_WEIGHT, _UNREADABLE_WEIGHT = 2000, 100
_MAX_STRANGERS = 4096


def objection(event: ev.Event, node_rank: int, ranks: frozenset[int]) -> tuple[str, str] | None:
    """Why the agent of `node_rank`, which registered `ranks`, may not say this; None: it may.

    The kind of the refusal ("malformed", "foreign") and its text.
    """
    if type(event) not in _ALLOWED:
        return "malformed", f"{type(event).__name__} is not for a manager"
    told = _ranks_of(event)
    if not ranks.issuperset(told):
        foreign = sorted(set(told) - ranks)
        return "foreign", f"node {node_rank} spoke of rank {foreign[0]}, which is not its own"
    if isinstance(event, _OF_A_NODE) and event.node_rank != node_rank:
        return "foreign", f"node {node_rank} spoke for node {event.node_rank}"
    return None


def _ranks_of(event: ev.Event) -> list[int]:
    """The ranks of which it tells: lists, which cost a heartbeat less than generators would."""
    if isinstance(event, ev.AgentHeard):
        return [mark.rank for mark in event.marks]
    if isinstance(event, ev.SharedReport):
        return [rank for rank, _ in event.lives]
    return [event.rank] if isinstance(event, ev.WorkerEvent) else []


class Strangers:
    """Peers whose messages are refused, until they were too many: then they are hung up on.

    Bounded: whoever was refused longest ago is forgotten.
    """

    def __init__(self) -> None:
        self._weights: dict[bytes, int] = {}  # in the order of the last refusal

    def refused(self, peer: bytes, *, is_readable: bool) -> bool:
        """One more message was refused. Returns whether that is one too many.

        `is_readable`: it was one of ours, from somebody who may not say it.
        """
        weight = self._weights.pop(peer, 0) + (1 if is_readable else _UNREADABLE_WEIGHT)
        if weight >= _REFUSED_WEIGHT:
            return True
        self._weights[peer] = weight
        if len(self._weights) > _MAX_STRANGERS:
            del self._weights[next(iter(self._weights))]
        return False


class Quarantine:
    """Counts, by node, the messages that made the manager fail; `HARM_LIMIT` of them exclude it."""

    def __init__(self) -> None:
        self._harm: Counter[int] = Counter()

    def blame(self, node_rank: int) -> None:
        """A message of this node made the manager fail."""
        self._harm[node_rank] += 1

    def refusal(self, node_rank: int) -> str | None:
        """Why no registration of this node is taken any more; None: it may come."""
        count = self._harm[node_rank]
        if count < HARM_LIMIT:
            return None
        return f"{count} messages of node {node_rank} made the manager fail"
