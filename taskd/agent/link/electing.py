"""How a torchrun takes part in the election of a manager: its door, and its questions to others.

      agent  ── AskVote ──►  doors of all other voters        ◄── Vote ──
             ── Elected ──►  doors of all voters and spares    (who has started the manager)

The door, a port of its own, is open from the start; connections to other doors are there only
during an election, and while this node has the elected manager (`taskd.agent.link.door`). A spare
that takes a place goes on with the same door, name and promises. When to ask and what to answer is
decided in `taskd.core.policy.election`.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import TYPE_CHECKING

from taskd.agent.link.door import MOST_WAYS, Door
from taskd.agent.machine import ELECTION_S
from taskd.core import events
from taskd.core.policy.election import Election, Won
from taskd.core.policy.pairs import PLACES
from taskd.core.votes import Elected
from taskd.errors import TransportError
from taskd.wire import messages

if TYPE_CHECKING:
    from collections.abc import Iterable

    from taskd.clock import Clock
    from taskd.config import AgentConfig
    from taskd.core.votes import AskVote, Roster
    from taskd.transport import zeromq

log = logging.getLogger(__name__)

# Who was cut off hears where the manager is when he is back. In a large job each of the others has
# a connection of its own for that, so that it takes longer.
_REPEAT_S = 5.0
_TOLD_PER_S = MOST_WAYS


class Electing:
    """See the module. `read` and `turn` are called by the loop of the agent, or of the spare.

    `name`: the incarnation of this torchrun, as a spare and as an agent.
    """

    def __init__(self, config: AgentConfig, clock: Clock, name: str) -> None:
        self.name = name
        self.election = Election(name)
        self._config, self._clock = config, clock
        self._node_rank: int | None = None
        self._door: Door | None = None
        self._elected: Elected | None = None  # that this node has started
        self._repeats_at = 0.0

    def wait(self) -> None:
        """As a spare, from now on. Where no port can be had it hears of no other manager."""
        self._node_rank = None
        problem = self._open()
        if problem is not None:
            self._say_deaf(problem)

    def take_place(self, node_rank: int, node_count: int) -> None:
        """As the agent of a place, from now on. Where no port can be had it has no vote."""
        self._node_rank = node_rank
        problem = self._open() if node_count >= PLACES else None
        if problem is not None:
            self._say_deaf(problem)

    def _say_deaf(self, problem: TransportError) -> None:
        if self._node_rank is None:
            log.warning("this spare will not hear of another manager: %s", problem)
        else:
            log.warning("node %d has no vote if the manager is lost: %s", self._node_rank, problem)

    def _open(self) -> TransportError | None:
        if self._config.elects and self._door is None:
            try:
                self._door = Door(self._config, self._clock, self._node_rank, self.name)
            except TransportError as error:
                return error
        return None

    @property
    def address(self) -> str:
        """Where it can be asked for its vote; "": nowhere."""
        return "" if self._door is None else self._door.address

    @property
    def links(self) -> list[zeromq.Router | zeromq.Dealer]:
        """To be polled."""
        return [] if self._door is None else self._door.links

    @property
    def next_deadline(self) -> float | None:
        """When `turn` has something to do."""
        deadlines = (
            self.election.next_deadline,
            self._repeats_at if self._elected else None,
            None if self._door is None else self._door.ways.next_deadline,
        )
        return min((due for due in deadlines if due is not None), default=None)

    @property
    def look_at(self) -> float | None:
        """When `read` has something to look at in any case: whether somebody floods the door."""
        return None if self._door is None else self._door.listener.next_deadline

    def may_obey(self, event: events.Event) -> bool:
        """Whether the manager that says this is not older than one that has this one's vote."""
        term = event.term if isinstance(event, events.ManagerJoined) else self.election.term
        return self.election.may_obey(term)

    def obey(self, address: str, term: int) -> None:
        """A manager has accepted this agent."""
        self.election.obey(address, term)
        if self._elected is not None and self._elected.term < term:
            self._elected = None  # the manager of this node is over
        if self._elected is None:
            self._hang_up()

    def miss(self, now: float) -> None:
        """The manager has been silent for too long."""
        self.election.miss(now)

    def keep(self, roster: Roster, now: float) -> list[events.Event]:
        """The manager says who votes. Returns what it is to hear of an agent."""
        if not self.election.keep(roster) or self._node_rank is None:
            return []
        return [events.RosterKept(now, "roster", self._node_rank, roster.number)]

    @property
    def has_vote(self) -> bool:
        """Whether others may ask for it, as far as is known."""
        return self.election.roster is not None and bool(self.address)

    @property
    def grace_s(self) -> float:
        """How much longer a fault waits, as this node of two can be elected."""
        roster = self.election.roster
        is_pair = roster is not None and roster.witness is not None
        return ELECTION_S if is_pair and self.election.may_ask else 0.0

    @property
    def told(self) -> Roster | None:
        """What a manager is told that this one knows; in a large job only what it needs of that."""
        roster = self.election.roster
        if roster is None:
            return None
        voters = roster.voters
        if roster.node_count != PLACES:
            voters = tuple(dataclasses.replace(voter, address="") for voter in voters)
        return dataclasses.replace(roster, voters=voters, listeners=())

    def started(self, term: int, address: str) -> None:
        """The manager that was started here listens: all others are to hear of it."""
        now = self._clock.now()
        self._elected = Elected(term, address)
        self.election.begun(term, now)
        self._tell_elected(now)

    def turn(self, now: float, *, is_coming: bool = False) -> None:
        """Ask others if it is time, and repeat who was elected.

        `is_coming`: the manager that this node was elected for has been started.
        """
        if is_coming:
            self.election.hold(now)
        if self._door is not None:
            self._door.ways.turn(now)
        if self._elected is not None and now >= self._repeats_at:
            self._tell_elected(now)
        ask = self.election.turn(now)
        if ask is not None:
            self._ask(ask)

    def read(self, now: float) -> list[Won | Elected]:
        """What others said, and what is to follow: start a manager, or obey another one."""
        if self._door is None:
            return []
        if not self._is_bounded(self._door):
            return []
        self._door.turn()
        results: list[Won | Elected | None] = []
        for peer, name, message in self._door.heard():
            if isinstance(message, messages.AskVote):
                self._answer(peer, name, message)
            elif isinstance(message, messages.Elected) and self._believes(name):
                results.append(message)
        for name, message in self._door.answers():
            if isinstance(message, messages.Vote):
                results.append(self._take_vote(name, message, now))
        return [
            result
            for result in results
            if isinstance(result, Won)
            or (isinstance(result, Elected) and self.election.follows(result))
        ]

    def _is_bounded(self, door: Door) -> bool:
        """Whether the door is open, and nobody fills the memory there, from now on."""
        why = door.listener.flood()
        if not why:
            return True
        try:
            door.drop(why)
        except TransportError as error:
            self._say_deaf(error)
            self.close()
        return self._door is not None

    def close(self) -> None:
        """No more."""
        if self._door is not None:
            self._door.close()
            self._door = None

    def _believes(self, name: str) -> bool:
        """A spare that is no voter has been told no names."""
        is_told = self.election.roster is not None or self._node_rank is not None
        return self.election.knows(name) if is_told else True

    def _answer(self, peer: bytes, name: str, ask: messages.AskVote) -> None:
        assert self._door is not None
        vote = self.election.take_ask(name, ask, self._clock.now())
        if vote.is_given and not vote.is_trial and self._node_rank is None:
            log.warning("this spare votes for the manager of a node (term %d)", ask.term)
        elif vote.is_given and not vote.is_trial:
            log.warning(
                "node %d votes for the manager of another node (term %d)", self._node_rank, ask.term
            )
        answer = messages.Vote(
            vote.term,
            vote.is_trial,
            vote.is_given,
            vote.manager,
            vote.manager_term,
            vote.promised,
            vote.roster,
        )
        self._door.listener.router.send(peer, self._door.encode(answer))

    def _take_vote(self, name: str, vote: messages.Vote, now: float) -> Won | Elected | None:
        result = self.election.take_vote(name, vote, now)
        if isinstance(result, (Won, Elected)) or result is None:
            return result
        self._ask(result)
        return None

    def _ask(self, ask: AskVote) -> None:
        if not ask.is_trial:
            log.warning("node %d asks for votes (term %d)", self._node_rank, ask.term)
        message = messages.AskVote(ask.term, ask.is_trial, ask.roster_term, ask.roster_number)
        self._send(message, self.election.others.values(), is_answered=True)

    def _tell_elected(self, now: float) -> None:
        roster, elected = self.election.roster, self._elected
        assert roster is not None
        assert elected is not None
        told = dict.fromkeys((*self.election.others.values(), *roster.listeners))
        self._repeats_at = now + max(_REPEAT_S, len(told) / _TOLD_PER_S)
        self._send(messages.Elected(elected.term, elected.address), told, is_answered=False)

    def _send(
        self, message: messages.Message, addresses: Iterable[str], *, is_answered: bool
    ) -> None:
        if self._door is None:
            return
        data = self._door.encode(message)
        self._door.ways.say(data, addresses, self._clock.now(), is_answered=is_answered)

    def _hang_up(self) -> None:
        if self._door is not None:
            self._door.ways.close()
