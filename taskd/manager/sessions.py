"""Who may speak.

One session per agent and per registered worker, and a count of everything that was refused.

Owns the tie between a connection's identity, a position in the job and an incarnation. Decides
nothing about recovery.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from taskd.core.job.speakers import Quarantine
from taskd.log import SHOWN_CHARACTERS, SayOnce
from taskd.transport.base import NAMELESS

if TYPE_CHECKING:
    from collections.abc import Collection

    from taskd.clock import Clock

log = logging.getLogger(__name__)

_LARGE = 256  # agents
_MAX_WORKERS = 1 << 16  # without an agent; each costs half a KB here
# Of refusals: so many lines at most within so many seconds, and then how many there were. That is
# 9 MB a day of a stranger who does not stop.
_LINES, _INTERVAL_S = 20, 60.0
_SHOWN_BYTES = 48  # of a stranger's identity
# Numbers that one sender may skip between two messages: far more than it says within a lease, and
# too few to use the numbers up.
_MAX_SKIPPED = 1 << 20


@dataclass(slots=True)
class Session:
    """One agent, or one worker without agent, that was accepted."""

    peer: bytes
    incarnation: str | int | None
    sequence: int
    ranks: frozenset[int]
    answered_at: float | None = None  # its last heartbeat that was answered
    is_out_of_reach: bool = False  # it has been said: its connection is down
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

    def is_ahead(self, sequence: int) -> bool:
        """Whether no message of this sender can have this number yet."""
        return sequence > self.sequence + _MAX_SKIPPED

    def advance(self, sequence: int) -> bool:
        """Take note of a message by its number. False: it was there before, or is far ahead."""
        if sequence <= self.sequence or self.is_ahead(sequence):
            return False
        self.sequence = sequence
        return True


@dataclass(slots=True)
class Sessions:
    """Sessions by position: node rank for agents, rank for workers without agent."""

    agents: dict[int, Session] = field(default_factory=dict)
    workers: dict[int, Session] = field(default_factory=dict)
    quarantine: Quarantine = field(default_factory=Quarantine)
    waiting: set[int] = field(default_factory=set)  # nodes whose place somebody else asks for
    # by node rank: who was accepted last, also when it has no session any more
    holders: dict[int, Session] = field(default_factory=dict)

    def agent(
        self, node_rank: int | None, peer: bytes, incarnation: str | int | None
    ) -> Session | None:
        """The session of this node if it is of this connection and this life."""
        session = None if node_rank is None else self.agents.get(node_rank)
        return session if session is not None and session.is_of(peer, incarnation) else None

    def claim_refusal(
        self, node_rank: int, peer: bytes, incarnation: str | int | None
    ) -> str | None:
        """Why this connection may not speak for an incarnation that was accepted; None: it may.

        An agent connects under a name that nobody else is told. Who has only heard of the
        incarnation, in a log or as a peer of that node, has another one. What it said before it
        connected anew may be read after its name was handed over, and does not have the place.
        """
        if peer.startswith(NAMELESS):
            return f"node {node_rank} has another connection by now, or said no name on this one"
        holder = self.holders.get(node_rank)
        if holder is None or holder.incarnation != incarnation or holder.peer == peer:
            return None
        return f"node {node_rank} is taken: its agent has another connection"

    def accept(self, node_rank: int, session: Session) -> None:
        """The agent of this node from now on."""
        if node_rank not in self.holders or self.holders[node_rank].peer != session.peer:
            self.waiting.discard(node_rank)
        self.agents[node_rank] = self.holders[node_rank] = session

    def accept_worker(self, rank: int, session: Session) -> bool:
        """The process of this rank from now on. False: there are too many of them already."""
        if rank not in self.workers and len(self.workers) >= _MAX_WORKERS:
            return False
        self.workers[rank] = session
        return True

    @property
    def is_large(self) -> bool:
        """Whether so many agents are present that what each of them costs is spared."""
        return len(self.agents) > _LARGE

    def ranks(self) -> frozenset[int]:
        """All ranks of agents that are present."""
        return frozenset[int]().union(*(session.ranks for session in self.agents.values()))

    def knows(self, peer: bytes) -> bool:
        """Whether somebody who was accepted speaks there."""
        held = (*self.agents.values(), *self.workers.values())
        return any(session.peer == peer for session in held)

    def notes_waiting(self, node_rank: int) -> bool:
        """Whether it is new that somebody waits for the place of a node. Once for each holder."""
        is_new = node_rank not in self.waiting
        self.waiting.add(node_rank)
        return is_new

    def doubt(self, peers: Collection[bytes]) -> None:
        """Their connections broke: what was on its way may be lost."""
        for session in self.agents.values() if peers else ():
            session.is_doubtful = session.is_doubtful or session.peer in peers


class Refusals:
    """Counts by reason, and says them: at once what is new, within bounds, else at intervals."""

    def __init__(self, clock: Clock) -> None:
        self.counts: Counter[str] = Counter()
        self.next_deadline: float | None = None  # when `turn` has something to say
        self._clock = clock
        self._once = SayOnce()
        self._said = self._unsaid = 0  # in this interval

    def add(self, peer: bytes, reason: str, text: str) -> None:
        """Something of `peer` was refused."""
        self.counts[reason] += 1
        if self.next_deadline is None:
            self.next_deadline = self._clock.now() + _INTERVAL_S
        if self._said < _LINES and self._once.is_new(peer, reason):
            self._said += 1
            log.warning("refused a message of %s: %.*s", show_peer(peer), SHOWN_CHARACTERS, text)
        else:
            self._unsaid += 1
        count = self.counts[reason]
        if count >= 10 and str(count).strip("0") == "1":
            log.warning("refused so far: %s", self.summary())

    def turn(self, now: float) -> None:
        """Say how much was refused without a line of its own, if it is time for that."""
        if self.next_deadline is None or now < self.next_deadline:
            return
        if self._unsaid:
            log.warning(
                "refused so far: %s; %d of them in the last %.0f s without a line of their own",
                self.summary(),
                self._unsaid,
                _INTERVAL_S,
            )
            self._once = SayOnce()  # the same ones again, if they do not stop
        self._said = self._unsaid = 0
        self.next_deadline = None

    def summary(self) -> str:
        """For example "malformed 120, version 3"."""
        return (
            ", ".join(f"{reason} {count}" for reason, count in sorted(self.counts.items()))
            or "nothing"
        )


def show_peer(peer: bytes) -> str:
    """An identity for a log line: ours are readable, those that ZeroMQ makes up are not.

    What stands behind a dot is the part that nobody else is to know.
    """
    text = peer.partition(b".")[0][:_SHOWN_BYTES]
    return (
        text.decode("ascii")
        if text.isascii() and text.decode("ascii").isprintable()
        else f"0x{text.hex()}"
    )
