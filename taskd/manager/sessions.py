"""Who may speak.

One session per agent and per registered worker, and a count of everything that was refused.

Owns the tie between a connection's identity, a position in the job and an incarnation. Decides
nothing about recovery.
"""

import logging
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

from taskd.core.job.speakers import Quarantine
from taskd.log import SayOnce

log = logging.getLogger(__name__)

_LINES = 100  # per process; beyond that only the counts at each power of ten are logged
_SHOWN_BYTES = 48  # of a stranger's identity


@dataclass(slots=True)
class Session:
    """One agent, or one worker without agent, that was accepted."""

    peer: bytes
    incarnation: str | int | None
    sequence: int
    ranks: frozenset[int]
    answered_at: float | None = None  # its last heartbeat that was answered
    is_doubtful: bool = False  # a message to it may have been lost: it is asked to register again

    def is_of(self, peer: bytes, incarnation: str | int | None) -> bool:
        """Whether it is this connection and this life that was accepted."""
        return (self.peer, self.incarnation) == (peer, incarnation)

    def answers(self, now: float, every_s: float) -> bool:
        """Whether its heartbeat is answered: if all is well, so many seconds after the last one."""
        is_early = self.answered_at is not None and now - self.answered_at < every_s
        if is_early and not self.is_doubtful:
            return False
        self.answered_at = now
        return True

    def advance(self, sequence: int) -> bool:
        """Take note of a message by its number. False: it was there before."""
        if sequence <= self.sequence:
            return False
        self.sequence = sequence
        return True


@dataclass(slots=True)
class Sessions:
    """Sessions by position: node rank for agents, rank for workers without agent."""

    agents: dict[int, Session] = field(default_factory=dict)
    workers: dict[int, Session] = field(default_factory=dict)
    quarantine: Quarantine = field(default_factory=Quarantine)

    def agent(
        self, node_rank: int | None, peer: bytes, incarnation: str | int | None
    ) -> Session | None:
        """The session of this node if it is of this connection and this life."""
        session = None if node_rank is None else self.agents.get(node_rank)
        return session if session is not None and session.is_of(peer, incarnation) else None

    def ranks(self) -> frozenset[int]:
        """All ranks of agents that are present."""
        return frozenset[int]().union(*(session.ranks for session in self.agents.values()))

    def doubt(self, peers: Collection[bytes]) -> None:
        """Their connections broke: what was on its way may be lost."""
        for session in self.agents.values() if peers else ():
            session.is_doubtful = session.is_doubtful or session.peer in peers


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
