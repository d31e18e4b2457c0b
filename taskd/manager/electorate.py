"""Who votes if this manager is missing: composed from who registers, and told to the agents.

Who may vote, and when this manager may replace an agent, is decided in
`taskd.core.policy.election`.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from taskd.core import commands
from taskd.core.phase import TRAINING
from taskd.core.policy.election import MAX_VOTERS, Electorate
from taskd.core.votes import Voter

if TYPE_CHECKING:
    from collections.abc import Iterable

    from taskd.core import events
    from taskd.core.policy.election import Won
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
        self._electorate = Electorate() if won is None else Electorate(won.term, won.roster)
        self._addresses: dict[int, tuple[str, str]] = {}  # by node: incarnation, address
        self._sizes: set[int] = set()  # ranks of a node
        self._is_changed = False
        self._is_held_back = False

    @property
    def term(self) -> int:
        """In which this manager was elected; 0: it was not."""
        return self._electorate.term

    def register(self, event: events.AgentRegistered) -> None:
        """An agent was accepted."""
        self._addresses[event.node_rank] = (event.agent_incarnation, event.voter)
        self._sizes.add(len(event.workers))
        self._is_changed = True

    def keeps(self, event: events.RosterKept) -> None:
        """An agent knows a roster."""
        incarnation, _ = self._addresses.get(event.node_rank, ("", ""))
        self._electorate.keeps(incarnation, event.number)
        self._is_changed = True

    def is_deposed_by(self, event: events.AgentRegistered) -> bool:
        """Whether one of the voters has voted for a later manager."""
        roster = self._electorate.roster
        is_voter = roster is not None and event.agent_incarnation in roster.names
        return is_voter and event.term > self.term

    def may_replace(self) -> bool:
        """Whether the place of a lost node may be given to another agent."""
        agents, machine = self._sessions.agents, self._guarded.machine
        present = {
            str(agents[node_rank].incarnation)
            for node_rank in range(MAX_VOTERS)
            if node_rank in agents and machine.is_present(node_rank)
        }
        may = self._electorate.may_replace(present)
        if not may and not self._is_held_back:
            log.warning(
                "more than half of the agents are out of reach (%d of %d are here): they may go on "
                "with another manager, so nobody is replaced before they are back",
                len(present),
                min(len(self._addresses), MAX_VOTERS),
            )
        self._is_held_back = not may
        return may

    def turn(self, listeners: Iterable[str]) -> None:
        """Tell the agents who votes, if that has changed. `listeners`: addresses of spares."""
        machine = self._guarded.machine
        if not self._is_changed or not machine.replaces_nodes or machine.phase not in TRAINING:
            return
        self._is_changed = False
        places = range(machine.membership.joined_node_count or 0)
        is_whole = all(rank in self._addresses and machine.is_present(rank) for rank in places)
        if not is_whole or len(self._sizes) != 1:
            return
        voters = tuple(Voter(rank, *self._addresses[rank]) for rank in places[:MAX_VOTERS])
        if not all(voter.address for voter in voters):
            return  # TASKD_MANAGER is off on one of them
        others = tuple(self._addresses[rank][1] for rank in places[MAX_VOTERS:])
        told = (*listeners, *others)
        roster = self._electorate.compose(len(places), max(self._sizes), voters, told)
        if roster is not None:
            order = commands.KeepRoster("roster", machine.generation, roster)
            self._outbox.order(order, [voter.node_rank for voter in voters])

    def note_change(self) -> None:
        """Spares have come or gone."""
        self._is_changed = True
