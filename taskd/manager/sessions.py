"""Who may speak.

One session per agent and per registered worker, and a count of everything that was refused.

Owns the tie between a connection's identity, a position in the job and an incarnation. Decides
nothing about recovery.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field

from taskd.log import SayOnce

log = logging.getLogger(__name__)

_LINES = 100  # per process; beyond that only the counts at each power of ten are logged
_HARM_LIMIT = 3  # a manager that begins anew for one node each second serves no other
_SHOWN_BYTES = 48  # of a stranger's identity


@dataclass(slots=True)
class Session:
    """One agent, or one worker without agent, that was accepted."""

    peer: bytes
    incarnation: str | int | None
    sequence: int
    ranks: frozenset[int]
    is_doubtful: bool = False  # a message to it may have been lost: it is asked to register again


@dataclass(slots=True)
class Sessions:
    """Sessions by position: node rank for agents, rank for workers without agent."""

    agents: dict[int, Session] = field(default_factory=dict)
    workers: dict[int, Session] = field(default_factory=dict)
    # by node rank: messages that the manager could not digest
    harm: Counter[int] = field(default_factory=Counter)

    def is_harmful(self, node_rank: int) -> bool:
        """Whether so much of this node could not be digested that nothing more of it is taken."""
        return self.harm[node_rank] >= _HARM_LIMIT

    def refusal(self, node_rank: int) -> str | None:
        """Why nobody may speak for this node, or None."""
        return (
            (f"{self.harm[node_rank]} messages of node {node_rank} made the manager fail")
            if self.is_harmful(node_rank)
            else None
        )

    def ranks(self) -> frozenset[int]:
        """All ranks of agents that are present."""
        return frozenset[int]().union(*(session.ranks for session in self.agents.values()))

    def doubt(self) -> None:
        """A connection broke; which one is not known."""
        for session in self.agents.values():
            session.is_doubtful = True


class Refusals:
    """Counts by reason; a line for the first of each peer and reason, and at each power of ten."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._once = SayOnce(_LINES)

    def add(self, peer: bytes, reason: str, text: str) -> None:
        """Something of `peer` was refused."""
        self.counts[reason] += 1
        if self._once.is_new(peer, reason):
            log.warning("refused a message of %s: %s", show_peer(peer), text)
        count = self.counts[reason]
        if count >= 10 and str(count).strip("0") == "1":
            log.warning("refused so far: %s", self.summary())

    def summary(self) -> str:
        """For example "malformed 120, version 3"."""
        return (
            ", ".join(f"{reason} {count}" for reason, count in sorted(self.counts.items()))
            or "nothing"
        )


def show_peer(peer: bytes) -> str:
    """An identity for a log line: ours are readable, those that ZeroMQ makes up are not."""
    text = peer[:_SHOWN_BYTES]
    return (
        text.decode("ascii")
        if text.isascii() and text.decode("ascii").isprintable()
        else f"0x{text.hex()}"
    )
