"""A job of two nodes and its spares on hosts that do not all reach each other, and who goes on.

As `taskd.testing.partitions`, with the rules of `taskd.core.policy.pairs`. A torchrun has a name
and promises for as long as it lives: as a spare, and as the agent of a place. A manager may also be
stopped and go on late, or be started again with nothing but what agents tell it. What is checked
after each step is that at most one manager has both places with agents that obey it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from taskd.core.policy.election import MIN_VOTERS, Election, Won
from taskd.core.policy.pairs import PLACES, PairElectorate, WaitingSpare
from taskd.core.votes import Elected, Voter
from taskd.testing.partition_world import PartitionWorld

_REPEAT_S = 5.0  # as of `taskd.agent.link.electing`
_HEALED_S = 200.0  # the longest wait for a manager that was elected, twice
APART = -1  # the host of a manager that is on none of the nodes


@dataclass(slots=True, eq=False)
class Torchrun:
    """`place`: of its agent; None: it waits as a spare. `manager`: that it is registered with."""

    name: str
    host: int
    election: Election
    manager: Manager
    place: int | None = None


@dataclass(slots=True, eq=False)
class Manager:
    """`holders`: by place, whom it has accepted there. `won`: None: it began with the job."""

    host: int
    electorate: PairElectorate
    won: Won | None = None
    holders: dict[int, Torchrun] = field(default_factory=dict)
    is_over: bool = False
    is_stopped: bool = False

    @property
    def term(self) -> int:
        """In which it was elected; 0: it was not."""
        return self.electorate.term


@dataclass(slots=True)
class PairWorld(PartitionWorld[Torchrun, Manager]):
    """Two nodes and `count` spares, each on a host of its own; the first one with the manager.

    `is_apart`: the manager, too, is on a host of its own, which is in the first block.
    """

    is_apart: bool = False
    deaf: set[int] = field(default_factory=set)  # hosts that hear no orders, and are heard
    _repeats_at: float = _REPEAT_S
    taken: int = 0  # places of lost nodes

    def __post_init__(self) -> None:
        first = Manager(APART if self.is_apart else 0, PairElectorate())
        self.managers.append(first)
        for place in range(PLACES):
            self.add(first).place = place
        for _ in range(self.count):
            self.add(first)
        for _ in range(10):
            self.look(first)

    # ------------------------------------------------------------------ what happens

    def add(self, manager: Manager) -> Torchrun:
        """One more torchrun, on a host of its own."""
        host = len(self.torchruns)
        new = Torchrun(f"torchrun-{host}", host, Election(f"torchrun-{host}"), manager)
        new.election.obey(self._address(manager), manager.term)
        self.torchruns.append(new)
        return new

    def start_again(self, manager: Manager) -> None:
        """The manager dies; as somebody still obeys it, the next one is started there.

        An elected one by the agent of its host, the first one by anybody. That knows nothing of the
        former but the election.
        """
        hosts = {one.host for one in self.present(manager).values()}
        if not hosts or (manager.won is not None and manager.host not in hosts):
            return
        known = None if manager.won is None else manager.won.roster
        new = Manager(manager.host, PairElectorate(manager.term, known), manager.won)
        manager.is_over = True
        self.managers.append(new)
        for one in self.torchruns:
            one.manager = new if one.manager is manager else one.manager

    def turn(self) -> None:
        """A moment passes; and whoever has elected a manager says so again and again."""
        PartitionWorld.turn(self)
        if self.now >= self._repeats_at:
            self._repeats_at = self.now + _REPEAT_S
            for manager in [one for one in self.managers if one.won and self._runs(one)]:
                self._tell_elected(manager)

    def look(self, manager: Manager) -> None:
        """The manager hears who is there, gives away what is free, and tells who votes."""
        if not self._runs(manager):
            return
        for one in self.torchruns:
            if one.manager is manager and self._is_heard(one, manager):
                self._register(one, manager)
        if any(self._deposes(one, manager) for one in self.torchruns):
            manager.is_over = True
            return
        names = [one.name for one in manager.holders.values()]
        if not manager.electorate.may_hold(names, PLACES - len(names)):
            manager.is_over = True  # it has accepted who was replaced before it began
            return
        present = self.present(manager)
        spares = [one for one in self._spares(manager) if self._is_heard(one, manager)]
        if manager.holders and len(present) < PLACES:
            self._offer(manager, spares, present)
        elif len(present) == PLACES:
            self._compose(manager, spares)
        self._tell(manager)

    def present(self, manager: Manager) -> dict[int, Torchrun]:
        """By place, the agents that the manager hears."""
        return {
            place: one
            for place, one in manager.holders.items()
            if one.place == place and one.manager is manager and self._is_heard(one, manager)
        }

    def who_goes_on(self) -> list[Manager]:
        """The managers that have both places. Whether they reach their agents does not matter.

        More than one: the job is there twice.
        """
        return [manager for manager in self.managers if self._goes_on(manager)]

    def is_whole(self, manager: Manager) -> bool:
        """Whether it hears an agent in each place."""
        return self._runs(manager) and len(self.present(manager)) == PLACES

    # ------------------------------------------------------------------ manager and torchruns

    def _goes_on(self, manager: Manager) -> bool:
        return not manager.is_over and len(manager.holders) == PLACES and all(
            one.manager is manager
            and one.place == place
            and one.host not in self.dead
            and one.election.may_obey(manager.term)
            for place, one in manager.holders.items()
        )  # fmt: skip

    def _register(self, one: Torchrun, manager: Manager) -> None:
        """It claims its place, or waits as a spare, and says which roster it knows."""
        electorate, known = manager.electorate, one.election.roster
        if one.place is not None:
            electorate.learn(known)
        if known is not None and self._arrives(one.host, manager.host):
            electorate.keeps(one.name, known.key)
        if one.place is None or manager.holders.get(one.place) is one:
            return
        held = self.present(manager)
        others = {agent.name for place, agent in held.items() if place != one.place}
        more = PLACES - 1 - len(others)
        if one.place not in held and electorate.may_hold({one.name, *others}, more):
            manager.holders[one.place] = one
        elif one.place in held:
            one.place = None  # somebody else has it: this one waits as a spare

    def _offer(self, manager: Manager, spares: list[Torchrun], held: dict[int, Torchrun]) -> None:
        names = {agent.name for agent in held.values()}
        free = [place for place in range(PLACES) if place not in held]
        fit = [one for one in spares if manager.electorate.may_offer(one.name, names)]
        if not names or not fit or self.random.random() < 0.8:  # it takes a while
            return
        taker = self.random.choice(fit)
        if self._arrives(manager.host, taker.host):
            taker.place = free[0]
            manager.holders[free[0]] = taker
            self.taken += 1

    def _compose(self, manager: Manager, spares: list[Torchrun]) -> None:
        voters = tuple(
            Voter(place, manager.holders[place].name, "") for place in sorted(manager.holders)
        )
        waiting = tuple(WaitingSpare(one.name, "") for one in spares)
        manager.electorate.compose(1, voters, waiting, ())

    def _tell(self, manager: Manager) -> None:
        for one in self.torchruns:
            is_there = one.manager is manager and self._is_heard(one, manager)
            if is_there and manager.electorate.lacks(one.name):
                roster = manager.electorate.roster
                is_deaf = one.host in self.deaf or not self._arrives(manager.host, one.host)
                if roster is not None and not is_deaf:
                    one.election.keep(roster)

    def _spares(self, manager: Manager) -> list[Torchrun]:
        return [one for one in self.torchruns if one.manager is manager and one.place is None]

    def _runs(self, manager: Manager) -> bool:
        return not (manager.is_over or manager.is_stopped or manager.host in self.dead)

    def _is_heard(self, one: Torchrun, manager: Manager) -> bool:
        """Whether what it says arrives; it says nothing to a manager that it may not obey."""
        may = one.election.may_obey(manager.term)
        return may and self._runs(manager) and self.reaches(one.host, manager.host)

    def _deposes(self, one: Torchrun, manager: Manager) -> bool:
        """Whether the manager hears from one of its voters that it has voted for a later one."""
        told = manager.electorate.roster
        is_voter = told is not None and one.name in told.names
        is_there = one.manager is manager and self.reaches(one.host, manager.host)
        return is_voter and is_there and one.election.promised > manager.term

    def _look_for_manager(self, one: Torchrun) -> None:
        if not self._is_heard(one, one.manager):
            if one.election.next_deadline is None:
                one.election.miss(self.now)
        else:
            one.election.obey(self._address(one.manager), one.manager.term)

    # ------------------------------------------------------------------ the election

    def _start(self, winner: Torchrun, won: Won) -> None:
        if winner.host in self.dead:
            return
        manager = Manager(winner.host, PairElectorate(won.term, won.roster), won)
        self.managers.append(manager)
        self._follow(winner, Elected(won.term, self._address(manager)))
        self._tell_elected(manager)

    def _tell_elected(self, manager: Manager) -> None:
        elected = Elected(manager.term, self._address(manager))
        for one in self.torchruns:
            if self._arrives(manager.host, one.host):
                self._follow(one, elected)

    def _follow(self, one: Torchrun, elected: Elected) -> None:
        there = [manager for manager in self.managers if not manager.is_over]
        found = (manager for manager in there if self._address(manager) == elected.address)
        manager = next((one for one in found if one.term == elected.term), None)
        if manager is not None and one.election.follows(elected):
            if one.manager.host == one.host and one.manager.won is not None:
                one.manager.is_over = True  # which its agent has started
            one.manager = manager
            one.election.obey(elected.address, elected.term)

    def _address(self, manager: Manager) -> str:
        return str(manager.host)


def _step(world: PairWorld, chance: random.Random) -> None:
    """One thing that happens."""
    there = [one for one in world.managers if not one.is_over] or world.managers[-1:]
    hosts = range(len(world.torchruns))
    match chance.randrange(16):
        case 0 | 1 | 2 | 3:
            parts = chance.choice((2, 2, 3))
            world.split({host: chance.randrange(parts) for host in hosts})
        case 4:
            world.split({})
        case 5 if chance.random() < 0.2:
            world.kill(chance.choice(hosts))
        case 6 if len(hosts) < 7:
            world.add(chance.choice(there))
        case 7 if chance.random() < 0.5:
            world.start_again(chance.choice(there))
        case 8:
            manager = chance.choice(there)
            manager.is_stopped = not manager.is_stopped
        case 9 | 10:
            world.deaf = {host for host in hosts if chance.random() < 0.4}


def story(seed: int, step_count: int = 80) -> PairWorld:
    """A random story of two nodes and one or two spares, others of which come later.

    Raises AssertionError: two managers brought the job on.
    """
    chance = random.Random(seed)  # noqa: S311
    loss, is_apart = chance.choice((0.0, 0.0, 0.1, 0.4)), chance.random() < 0.3
    world = PairWorld(chance.choice((1, 2)), chance, loss=loss, is_apart=is_apart)
    for _ in range(step_count):
        _step(world, chance)
        for _ in range(chance.randrange(1, 30)):
            world.turn()
            going = world.who_goes_on()
            assert len(going) <= 1, f"seed {seed}: {len(going)} managers at {world.now:g}"
    return world


def play(seed: int) -> tuple[int, int]:
    """A `story`: how many elections were won, and how many places were taken."""
    world = story(seed)
    return sum(manager.won is not None for manager in world.managers), world.taken


def heal(world: PairWorld) -> bool:
    """All hosts that are left reach each other from now on, and no manager is stopped.

    Returns whether an agent has a manager then, in time, or none can be elected.
    """
    world.split({})
    world.loss, world.deaf = 0.0, set()
    for manager in world.managers:
        manager.is_stopped = False
    until = world.now + _HEALED_S
    while world.now < until:
        if any(world.present(manager) for manager in world.managers):
            return True
        world.turn()
    return not any(_may_be_elected(world, one) for one in world.torchruns)


def _may_be_elected(world: PairWorld, one: Torchrun) -> bool:
    """Whether those who are left are enough, and know the candidate."""
    there = {other.name: other for other in world.torchruns if other.host not in world.dead}
    roster = one.election.roster
    if one.name not in there or one.place is None or not one.election.may_ask or roster is None:
        return False
    witness = None if roster.witness is None else there.get(roster.witness.name)
    if witness is not None and witness.election.roster is not None:
        roster = max(roster, witness.election.roster, key=lambda known: known.key)
    votes = {one.name} | {
        name
        for name, other in there.items()
        if other.election.knows(one.name)
        and other.election.roster is not None
        and other.election.roster.key <= roster.key
    }
    return len(roster.names) >= MIN_VOTERS and one.name in roster.names and roster.is_quorum(votes)
