"""Agents, spares and managers on hosts of which some do not reach others, and who goes on then.

The real `Election` of each agent and `Electorate` of each manager, in a model of everything else: a
message arrives at once or never; a manager looks at who is there when it is told to, and whom it
does not hear has to register again. A manager may be started again, with nothing but what agents
tell it. What is checked after each step, `who_goes_on`, is that at most one manager has an agent in
every place; and at the end of a story, that another one is elected when the host of the manager is
lost.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from taskd.core.policy.election import Election, Electorate, Won
from taskd.core.votes import Elected, Voter
from taskd.testing.partition_world import PartitionWorld

if TYPE_CHECKING:
    from collections.abc import Iterator


_TOLD = 5  # turns after which all have the newest roster


@dataclass(slots=True, eq=False)
class Agent:
    """`place`: that it claims; None: somebody else has it. `is_first`: it began with the job."""

    name: str
    host: int
    election: Election
    manager: Manager
    place: int | None
    is_first: bool


@dataclass(slots=True, eq=False)
class Manager:
    """`holders`: by place, whom it takes for the agent there. `registered`: who counts as there.

    `together`: who was there when there was somebody in every place, the last time.
    `won`, `starter`: the election, and the agent that was elected; None: it began with the job.
    """

    host: int
    electorate: Electorate
    holders: dict[int, Agent] = field(default_factory=dict)
    won: Won | None = None
    starter: Agent | None = None
    is_over: bool = False
    registered: set[str] = field(default_factory=set)
    together: frozenset[str] = frozenset()


@dataclass(slots=True)
class World(PartitionWorld[Agent, Manager]):
    """`count` agents on hosts of their own, the first with the manager; spares beside each."""

    replaced: int = 0  # agents
    _named: int = 0

    def __post_init__(self) -> None:
        first = Manager(0, Electorate())
        self.managers.append(first)
        for host in range(self.count):
            self._agent(host, first, host, is_first=True)
        for _ in range(10):
            self.look(first)

    def start_again(self, manager: Manager) -> None:
        """The manager dies, and the next one is started there, which knows nothing of it.

        An elected one by its agent, as long as that obeys it; the first one by anybody, whenever.
        """
        won, starter = manager.won, manager.starter
        if manager.host in self.dead:
            return
        if won is None or starter is None:
            new = Manager(manager.host, Electorate())
        elif manager.is_over or not self._obeys(starter, manager):
            return
        else:
            new = self._elected(won.again(starter.election.roster), starter)
        term = new.electorate.term
        for former in [one for one in self.managers if one.electorate.term == term]:
            former.is_over = True
        self.managers.append(new)
        for agent in self.torchruns:
            agent.manager = new if agent.manager.electorate.term == term else agent.manager

    def look(self, manager: Manager) -> None:
        """The manager hears who is there, replaces who is not, and tells who votes."""
        if manager.is_over or manager.host in self.dead:
            return
        for agent in self.torchruns:
            if not self._obeys(agent, manager):
                manager.registered.discard(agent.name)
            elif agent.name not in manager.registered:
                self._register(agent, manager)
        there = {place for place, agent in manager.holders.items() if self._hears(agent, manager)}
        present = {manager.holders[place].name for place in there}
        for place in sorted(set(range(self.count)) - there if present else ()):
            if manager.electorate.may_replace(present):
                self.replaced += 1
                host = self._spare_host(manager)
                manager.holders[place] = self._agent(host, manager, place, is_first=False)
        if self.is_whole(manager):
            manager.together = _names(manager)
            manager.electorate.settle()
            self._tell_roster(manager)

    def who_goes_on(self) -> list[Manager]:
        """The managers that have had an agent in every place, and still have the same.

        Whether it reaches them does not matter. More than one: the job is there twice.
        """
        return [
            manager
            for manager in self.managers
            if len(manager.holders) == self.count
            and manager.together == _names(manager)
            and all(
                agent.manager is manager
                and agent.host not in self.dead
                and agent.election.may_obey(manager.electorate.term)
                for agent in manager.holders.values()
            )
        ]

    def is_whole(self, manager: Manager) -> bool:
        """Whether it hears an agent in every place."""
        holders = manager.holders.values()
        is_full = not manager.is_over and len(holders) == self.count
        return is_full and all(self._hears(agent, manager) for agent in holders)

    def whole_within(self, seconds: float) -> Manager | None:
        """The manager that hears an agent in every place, as soon as there is one."""
        until = self.now + seconds
        while self.now < until:
            for manager in self.managers:
                if self.is_whole(manager):
                    return manager
            self.turn()
        return None

    # ------------------------------------------------------------------ how

    def _block_of(self, host: int) -> int:
        return self._block.get(host % self.count, 0)

    def _agent(self, host: int, manager: Manager, place: int, *, is_first: bool) -> Agent:
        self._named += 1
        name = f"agent-{self._named}"
        agent = Agent(name, host, Election(name), manager, place, is_first)
        agent.election.obey(str(manager.host), manager.electorate.term)
        self.torchruns.append(agent)
        return agent

    def _register(self, agent: Agent, manager: Manager) -> None:
        """It claims its place, and says which roster it knows."""
        electorate, known = manager.electorate, agent.election.roster
        if agent.place is None or not self._arrives(agent.host, manager.host):
            return
        if manager.holders.get(agent.place, agent) is not agent:
            agent.place = None
            return
        told = None if known is None else replace(known, listeners=())
        electorate.learn(agent.name, told, self.count, is_first=agent.is_first)
        held = [one for one in manager.holders.values() if self._hears(one, manager)]
        names = {agent.name, *(one.name for one in held if one.place != agent.place)}
        if electorate.may_begin(names, self.count - len(names)):
            manager.holders[agent.place] = agent
            manager.registered.add(agent.name)
        elif electorate.roster is not None and agent.name in electorate.roster.names:
            manager.is_over = True  # it has begun with others than this one trains with

    def _spare_host(self, manager: Manager) -> int:
        """One of its own, beside one that the manager reaches: there are as many as are asked for.

        It stays in the block of that one.
        """
        block = self._block_of(manager.host)
        near = [host for host in range(self.count) if self._block_of(host) == block]
        return self.random.choice(near) + self.count * (self._named + 1)

    def _obeys(self, agent: Agent, manager: Manager) -> bool:
        """Whether the manager hears from it, as its agent."""
        may = agent.election.may_obey(manager.electorate.term)
        return agent.manager is manager and may and self.reaches(agent.host, manager.host)

    def _hears(self, agent: Agent, manager: Manager) -> bool:
        """Whether it has registered since the manager has missed it."""
        return agent.name in manager.registered and self._obeys(agent, manager)

    def _look_for_manager(self, agent: Agent) -> None:
        manager = agent.manager
        term = manager.electorate.term
        is_there = not manager.is_over and self._obeys(agent, manager)
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
        self.managers.append(self._elected(won, winner))
        for agent in self._voters(won.roster):
            if agent is winner or self._arrives(winner.host, agent.host):
                self._follow(agent, Elected(won.term, str(winner.host)))

    def _elected(self, won: Won, starter: Agent) -> Manager:
        known = {agent.name: agent for agent in self.torchruns}
        holders = {voter.node_rank: known[voter.name] for voter in won.roster.voters}
        electorate = Electorate(won.term, won.roster)
        manager = Manager(starter.host, electorate, holders, won, starter)
        manager.together = _names(manager)
        return manager

    def _follow(self, agent: Agent, elected: Elected) -> None:
        there = [one for one in self.managers if not one.is_over]
        found = (one for one in there if one.electorate.term == elected.term)
        manager = next((one for one in found if str(one.host) == elected.address), None)
        if manager is not None and agent.election.follows(elected):
            agent.manager = manager
            agent.election.obey(elected.address, elected.term)


def _names(manager: Manager) -> frozenset[str]:
    return frozenset(agent.name for agent in manager.holders.values())


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


def _lose_manager(world: World) -> bool:
    """All meet again, and then the host of the manager is lost. Whether another one goes on.

    No message is lost any more. True, too, where there was none that had an agent in every place.
    """
    world.split({})
    world.loss = 0.0
    manager = world.whole_within(10.0)
    if manager is None:
        return True
    for _ in range(_TOLD):
        world.turn()
    if not world.is_whole(manager):
        return True
    world.kill(manager.host)
    return world.whole_within(30.0) is not None


def play(seed: int, node_count: int, step_count: int = 60) -> tuple[int, int]:
    """A random story: hosts fall apart in changing ways, and die; managers are started again.

    Returns how many managers were elected, and how many holders were replaced. Raises
    AssertionError: two managers brought the job on, or none after the host of one was lost.
    """
    chance = random.Random(seed)  # noqa: S311
    world = World(node_count, chance, loss=chance.choice((0.0, 0.1, 0.4)))
    kinds = list(patterns(node_count))
    for _ in range(step_count):
        match chance.randrange(9):
            case 0:
                world.split(chance.choice(kinds))
            case 1:
                world.split({})
            case 2 if chance.random() < 0.3:
                world.kill(chance.choice(world.torchruns).host)
            case 3:
                world.start_again(chance.choice(world.managers))
            case _:
                for _ in range(chance.randrange(1, 40)):
                    world.turn()
                    going = world.who_goes_on()
                    assert len(going) <= 1, f"seed {seed}: {len(going)} managers at {world.now:g}"
    assert _lose_manager(world), f"seed {seed}: no manager at {world.now:g}"
    terms = {manager.electorate.term for manager in world.managers}
    return len(terms) - 1, world.replaced
