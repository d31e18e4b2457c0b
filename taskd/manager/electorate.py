"""Who votes if this manager is missing: composed from who registers, and told to the agents.

Who may vote, and when this manager may replace an agent, is decided in
`taskd.core.policy.election`; in a job of two nodes in `taskd.core.policy.pairs`.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import TYPE_CHECKING

from taskd.core import commands
from taskd.core.phase import TRAINING
from taskd.core.policy.election import MAX_VOTERS, Electorate
from taskd.core.policy.pairs import PLACES, PairElectorate, WaitingSpare
from taskd.core.votes import Voter, fitting

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from taskd.core import events
    from taskd.core.policy.election import Won
    from taskd.core.votes import Roster
    from taskd.manager.guarded import GuardedMachine
    from taskd.manager.outbox import Outbox
    from taskd.manager.sessions import Sessions

log = logging.getLogger(__name__)


class VoterDesk:
    """`register` and `keeps` are called for what agents say, `turn` after whatever happened."""

    def __init__(
        self, guarded: GuardedMachine, sessions: Sessions, outbox: Outbox, won: Won | None = None
    ) -> None:
        """`won`: the election of this manager, if there was one."""
        self._guarded, self._sessions, self._outbox = guarded, sessions, outbox
        term, roster = (0, None) if won is None else (won.term, won.roster)
        is_pair = roster is not None and roster.node_count == PLACES
        self._electorate = Electorate(term, None if is_pair else roster)
        if guarded.machine.may_get_smaller:  # some may go on alone, whoever has been elected
            self._electorate.settle()
        self._pair = PairElectorate(term, roster if is_pair else None)
        self.is_pair = is_pair  # whether the job has two nodes
        self._addresses: dict[int, tuple[str, str]] = {}  # by node: incarnation, address
        self._told: dict[int, object] = {}  # by node: the key of the roster, in a job of two nodes
        self._sizes: set[int] = set()  # ranks of a node
        self._untold: set[int] = set()  # nodes that have registered since, in a larger job
        self._is_changed = False
        self._is_held_back = self._is_cut = False

    @property
    def term(self) -> int:
        """In which this manager was elected; 0: it was not."""
        return self._electorate.term

    def register(self, event: events.AgentRegistered) -> None:
        """An agent was accepted."""
        self._addresses[event.node_rank] = (event.agent_incarnation, event.voter)
        self._sizes.add(len(event.workers))
        self._is_changed = True
        self._told.pop(event.node_rank, None)
        self._untold.add(event.node_rank)
        self.note_known(event.agent_incarnation, event.roster)

    def note_known(self, name: str, roster: Roster | None) -> None:
        """An agent, or a spare, has told which roster it knows."""
        if roster is not None:
            self._pair.keeps(name, roster.key)
            self._is_changed = True

    def keeps(self, event: events.RosterKept) -> None:
        """An agent knows a roster."""
        incarnation, _ = self._addresses.get(event.node_rank, ("", ""))
        self._electorate.keeps(incarnation, event.number)
        self._pair.keeps(incarnation, (self.term, event.number))
        self._is_changed = True

    @property
    def _told_roster(self) -> Roster | None:
        return self._pair.roster if self.is_pair else self._electorate.roster

    # ------------------------------------------------------------------ who may have a place

    @property
    def witness(self) -> str | None:
        """The spare whose vote counts by now: all who vote know the roster, and no other counts."""
        return self._pair.witness

    def is_deposed_by(self, name: str, term: int) -> bool:
        """Whether this is a voter, and has voted for a later manager."""
        roster = self._told_roster
        return roster is not None and name in roster.names and term > self.term

    def is_deserted(self, now: float) -> bool:
        """Whether no agent has been heard for so long that they have elected another manager.

        They may be lost, all of them, too: this one can do nothing for the job in either case.
        """
        roster = self._told_roster
        return roster is not None and self._guarded.machine.is_deserted(now)

    def contradicts(self, event: events.AgentRegistered) -> str | None:
        """Why this manager is not that of the job, if this agent is of it, as its roster shows.

        To be asked of one that fits otherwise, before it is accepted. None: it may be.
        """
        self.is_pair = event.node_count == PLACES
        name = event.agent_incarnation
        if not self.is_pair:
            self._learn(event)
            if self.is_deposed_by(name, event.term):
                return f"node {event.node_rank} has voted for another manager"
            is_other = not self._may_begin(event) and self.is_voter(event)
        else:
            if event.roster is not None and name in event.roster.names:
                self._pair.learn(event.roster)
            names = {name, *self._others(event.node_rank)}
            is_other = not self._pair.may_hold(names, PLACES - len(names))
        how = f"it has begun with others than node {event.node_rank} trains with"
        return how if is_other else None

    def without_roster(self, event: events.AgentRegistered) -> events.AgentRegistered:
        """What the machine has to know of it, and its story: that of 99 voters is long."""
        return event if self.is_pair else dataclasses.replace(event, roster=None)

    def is_stranger(self, event: events.AgentRegistered) -> bool:
        """Whether it cannot have its place beside the others, as their roster shows.

        To be asked of one that does not contradict.
        """
        return not self.is_pair and not self._may_begin(event)

    def _learn(self, event: events.AgentRegistered) -> None:
        place_count = min(event.node_count, MAX_VOTERS)
        if event.node_rank < place_count:
            told = (event.agent_incarnation, event.roster, place_count)
            is_first = not event.is_late
            self._electorate.learn(*told, is_first=is_first, has_vote=bool(event.voter))

    def _may_begin(self, event: events.AgentRegistered) -> bool:
        place_count = min(event.node_count, MAX_VOTERS)
        if self._electorate.is_settled or event.node_rank >= place_count:
            return True
        names = {event.agent_incarnation, *self._present_voters(event.node_rank)}
        return self._electorate.may_begin(names, place_count - len(names))

    def is_voter(self, event: events.AgentRegistered) -> bool:
        """Whether the newest roster names this agent, as far as is known."""
        known = self._electorate.roster
        if event.roster is not None and (known is None or event.roster.key > known.key):
            known = event.roster
        return known is not None and event.agent_incarnation in known.names

    def _present_voters(self, without: int = -1) -> set[str]:
        agents, machine = self._sessions.agents, self._guarded.machine
        return {
            str(agents[node_rank].incarnation)
            for node_rank in range(MAX_VOTERS)
            if node_rank in agents and node_rank != without and machine.is_present(node_rank)
        }

    def may_take(self, node_rank: int, name: str) -> bool:
        """Whether an agent may have this place."""
        if not self.is_pair:
            return self._may_replace()
        others = self._others(node_rank)
        return self._pair.may_hold({name, *others}, PLACES - 1 - len(others))

    @property
    def why_early(self) -> str:
        """Why an agent does not get a place that nobody has, for people."""
        who = "the other agents" if self.is_pair else "more than half of the agents"
        return (
            f"{who} that an agent here knows of are out of reach, and may go on with another "
            "manager. It gets the place when one of them is back. If all nodes were started anew, "
            "end this manager and all torchruns, and start them again"
        )

    def may_offer(self, lost: Collection[int]) -> bool:
        """Whether the places of these nodes may be offered to anybody."""
        return bool(lost) and (self.is_pair or self._may_replace())

    def takers(self, lost: Collection[int], spares: Collection[str]) -> list[str] | None:
        """Those of `spares` to whom these places may be offered; None: whoever it is."""
        if not self.is_pair:
            return None
        others = {name for place in lost for name in self._others(place)}
        return [name for name in spares if self._pair.may_offer(name, others)]

    def is_held_back(self, lost: Collection[int], spares: Collection[str]) -> bool:
        """Whether only a spare that is none of these may have the places of lost nodes."""
        fit = ("", *spares)  # one whom nobody knows, and those that wait
        return (
            self.is_pair
            and bool(lost)
            and not any(self.may_take(place, one) for place in lost for one in fit)
        )

    def lacks(self, name: str) -> bool:
        """Whether this spare has to be told the newest roster."""
        return self.is_pair and self._pair.lacks(name)

    @property
    def roster(self) -> Roster | None:
        """The newest one of a job of two nodes."""
        return self._pair.roster

    def _others(self, node_rank: int) -> set[str]:
        places = (place for place in self._present_places if place != node_rank)
        return {self._addresses[place][0] for place in places}

    @property
    def _present_places(self) -> list[int]:
        machine = self._guarded.machine
        return [place for place in sorted(self._addresses) if machine.is_present(place)]

    def _may_replace(self) -> bool:
        """Whether the place of a lost node may be given to another agent."""
        present = self._present_voters()
        may = self._electorate.may_replace(present)
        if not may and not self._is_held_back:
            self._say_held_back(len(present))
        self._is_held_back = not may
        return may

    def _say_held_back(self, count: int) -> None:
        known = min(self._guarded.machine.membership.joined_node_count or 0, MAX_VOTERS)
        if self._electorate.is_sure:
            log.warning(
                "more than half of the agents are out of reach (%d of %d are here): they may go on "
                "with another manager, so nobody is replaced before they are back",
                count,
                known,
            )
        else:
            log.warning(
                "this manager has not heard more than half of the agents since it began (%d of %d "
                "are here): the others may go on with another one, so nobody is replaced before "
                "more of them are back",
                count,
                known,
            )

    # ------------------------------------------------------------------ who votes

    def turn(self, listeners: Iterable[str], spares: Iterable[WaitingSpare] = ()) -> None:
        """Tell the agents who votes, if that has changed.

        `listeners`: addresses of all spares; `spares`: those that might be given a place.
        """
        machine = self._guarded.machine
        if not self._is_changed or not machine.replaces_nodes or machine.phase not in TRAINING:
            return
        self._is_changed = False
        places = range(machine.membership.joined_node_count or 0)
        is_whole = all(rank in self._addresses and machine.is_present(rank) for rank in places)
        if self.is_pair and (not is_whole or len(self._sizes) == 1):
            self._turn_pair(tuple(spares), self._fitting(listeners), is_whole=is_whole)
        if self.is_pair or not is_whole:
            return
        self._electorate.settle()
        if len(self._sizes) != 1:
            return
        voters = tuple(Voter(rank, *self._addresses[rank]) for rank in places[:MAX_VOTERS])
        if not all(voter.address for voter in voters):
            return  # TASKD_MANAGER is off on one of them
        others = tuple(self._addresses[rank][1] for rank in places[MAX_VOTERS:])
        told = self._fitting((*others, *listeners))
        new = self._electorate.compose(len(places), max(self._sizes), voters, told)
        self._tell_roster(new, voters)

    def _fitting(self, listeners: Iterable[str]) -> tuple[str, ...]:
        """Of these addresses, who can be told of another manager."""
        known = tuple(listeners)
        told = fitting(known)
        if len(told) < len(known) and not self._is_cut:
            log.warning(
                "%d of %d addresses have no room in what voters are told: whoever is there (the "
                "last spares and nodes) does not hear of another manager, should one be elected",
                len(known) - len(told),
                len(known),
            )
        self._is_cut = len(told) < len(known)
        return told

    def _tell_roster(self, new: Roster | None, voters: tuple[Voter, ...]) -> None:
        """A new one to all. None: the last one to those who may have missed it."""
        roster = new or self._electorate.roster
        untold = [
            voter.node_rank
            for voter in voters
            if new or (voter.node_rank in self._untold and self._electorate.lacks(voter.name))
        ]
        self._untold.clear()
        if roster is not None and untold:
            order = commands.KeepRoster("roster", self._guarded.machine.generation, roster)
            self._outbox.order(order, untold)

    def note_change(self) -> None:
        """Spares have come or gone."""
        self._is_changed = True

    def _turn_pair(
        self, spares: tuple[WaitingSpare, ...], listeners: tuple[str, ...], *, is_whole: bool
    ) -> None:
        machine, pair = self._guarded.machine, self._pair
        voters = tuple(Voter(place, *self._addresses[place]) for place in self._present_places)
        may_vote = all(voter.address for voter in voters)  # else TASKD_MANAGER is off on one
        # Where the job may get smaller one of two nodes goes on alone, whoever has been elected.
        if is_whole and not machine.may_get_smaller and (may_vote or pair.roster is not None):
            pair.compose(max(self._sizes), voters, spares if may_vote else (), listeners)
        if pair.roster is None:
            return
        order = commands.KeepRoster("roster", machine.generation, pair.roster)
        untold = [
            voter.node_rank
            for voter in voters
            if pair.lacks(voter.name) and self._told.get(voter.node_rank) != pair.roster.key
        ]
        self._told.update(dict.fromkeys(untold, pair.roster.key))
        if untold:
            self._outbox.order(order, untold)
