"""Agents, spares and managers on hosts of which some do not reach others, and who goes on then.

The real `Election` of each agent and `Electorate` of each manager, in a model of everything else: a
message arrives at once or never; a manager looks at who is there when it is told to. What is
checked after each step, `who_goes_on`, is that at most one manager has an agent in every place.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from taskd.core.policy.election import Election, Electorate, Won
from taskd.core.votes import Elected, Voter
from taskd.testing.partition_world import PartitionWorld

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(slots=True)
class Agent:
    """`place` None: a spare, which obeys nobody in particular."""

    name: str
    host: int
    election: Election
    manager: Manager | None


@dataclass(slots=True)
class Manager:
    """`holders`: by place, whom it takes for the agent there."""

    host: int
    electorate: Electorate
    holders: dict[int, Agent]


@dataclass(slots=True)
class World(PartitionWorld[Agent, Manager]):
    """`count` agents on hosts of their own, the first with the manager; spares beside each."""

    _named: int = 0

    def __post_init__(self) -> None:
        first = Manager(0, Electorate(), {})
        self.managers.append(first)
        for host in range(self.count):
            first.holders[host] = self._agent(host, first)
        self.look(first)

    def look(self, manager: Manager) -> None:
        """The manager sees who is there, replaces who is not, and tells who votes."""
        if manager.host in self.dead:
            return
        there = {place for place, agent in manager.holders.items() if self._obeys(agent, manager)}
        present = {manager.holders[place].name for place in there}
        for place in sorted(set(manager.holders) - there):
            if manager.electorate.may_replace(present):
                manager.holders[place] = self._agent(self._spare_host(manager), manager)
        if all(self._obeys(agent, manager) for agent in manager.holders.values()):
            self._tell_roster(manager)

    def who_goes_on(self) -> list[Manager]:
        """The managers that have an agent in every place. Whether it reaches them does not matter.

        More than one: the job is there twice.
        """
        return [
            manager
            for manager in self.managers
            if all(
                agent.manager is manager
                and agent.host not in self.dead
                and agent.election.may_obey(manager.electorate.term)
                for agent in manager.holders.values()
            )
        ]

    def is_whole(self, manager: Manager) -> bool:
        """Whether it reaches an agent in every place."""
        return all(self._obeys(agent, manager) for agent in manager.holders.values())

    # ------------------------------------------------------------------ how

    def _block_of(self, host: int) -> int:
        return self._block.get(host % self.count, 0)

    def _agent(self, host: int, manager: Manager) -> Agent:
        self._named += 1
        agent = Agent(f"agent-{self._named}", host, Election(f"agent-{self._named}"), manager)
        agent.election.obey(str(manager.host), manager.electorate.term)
        self.torchruns.append(agent)
        return agent

    def _spare_host(self, manager: Manager) -> int:
        """A host of its own, in the block of the manager: there are as many as are asked for."""
        return manager.host % self.count + self.count * (self._named + 1)

    def _obeys(self, agent: Agent, manager: Manager) -> bool:
        """Whether the manager hears from it, as its agent."""
        may = agent.election.may_obey(manager.electorate.term)
        return agent.manager is manager and may and self.reaches(agent.host, manager.host)

    def _look_for_manager(self, agent: Agent) -> None:
        manager = agent.manager
        if manager is None:
            return
        term = manager.electorate.term
        is_there = self.reaches(agent.host, manager.host) and agent.election.may_obey(term)
        if not is_there and agent.election.next_deadline is None:
            agent.election.miss(self.now)
        elif is_there and agent.election.next_deadline is not None:
            agent.election.obey(str(manager.host), term)

    def _tell_roster(self, manager: Manager) -> None:
        voters = tuple(
            Voter(place, agent.name, agent.name) for place, agent in manager.holders.items()
        )
        roster = manager.electorate.compose(self.count, 1, voters, ())
        told = roster or manager.electorate.roster
        assert told is not None
        for agent in manager.holders.values():
            is_kept = self._arrives(manager.host, agent.host) and agent.election.keep(told)
            if is_kept and self._arrives(agent.host, manager.host):
                manager.electorate.keeps(agent.name, told.number)

    def _start(self, winner: Agent, won: Won) -> None:
        if winner.host in self.dead:
            return
        known = {agent.name: agent for agent in self.torchruns}
        holders = {voter.node_rank: known[voter.name] for voter in won.roster.voters}
        manager = Manager(winner.host, Electorate(won.term, won.roster), holders)
        self.managers.append(manager)
        for agent in self._voters(won.roster):
            if agent is winner or self._arrives(winner.host, agent.host):
                self._follow(agent, Elected(won.term, str(winner.host)))

    def _follow(self, agent: Agent, elected: Elected) -> None:
        found = (one for one in self.managers if one.electorate.term == elected.term)
        manager = next((one for one in found if str(one.host) == elected.address), None)
        if manager is not None and agent.election.follows(elected):
            agent.manager = manager
            agent.election.obey(elected.address, elected.term)


def patterns(count: int) -> Iterator[dict[int, int]]:
    """Each way in which so many hosts may fall apart into blocks, by host."""

    def grow(blocks: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if len(blocks) == count:
            yield blocks
            return
        for block in range(max(blocks, default=-1) + 2):
            yield from grow((*blocks, block))

    for blocks in grow(()):
        yield dict(enumerate(blocks))


def play(seed: int, node_count: int, step_count: int = 60) -> tuple[int, int]:
    """A random story: hosts fall apart in changing ways, and die.

    Returns how many managers there were, and how many holders were replaced. Raises AssertionError:
    two managers brought the job on.
    """
    chance = random.Random(seed)  # noqa: S311
    world = World(node_count, chance, loss=chance.choice((0.0, 0.1, 0.4)))
    kinds = list(patterns(node_count))
    for _ in range(step_count):
        match chance.randrange(8):
            case 0:
                world.split(chance.choice(kinds))
            case 1:
                world.split({})
            case 2 if chance.random() < 0.3:
                world.kill(chance.choice(world.torchruns).host)
            case _:
                for _ in range(chance.randrange(1, 40)):
                    world.turn()
                    going = world.who_goes_on()
                    assert len(going) <= 1, f"seed {seed}: {len(going)} managers at {world.now:g}"
    return len(world.managers), len(world.torchruns) - node_count
