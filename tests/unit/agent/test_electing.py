"""The port at which an agent is asked for its vote, on real sockets."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest
import zmq

from taskd.agent.link.door import Door
from taskd.agent.link.electing import Electing
from taskd.clock import MonotonicClock
from taskd.config import AgentConfig
from taskd.core.policy.election import Won
from taskd.core.votes import Elected, Roster, Voter, Witness
from taskd.transport import zeromq
from taskd.wire import messages

if TYPE_CHECKING:
    from collections.abc import Iterator

_DEADLINE_S = 20.0
_ELECTED = pathlib.Path(__file__).parents[2] / "process" / "scripts" / "elected.py"
NAMES = ("first", "second", "third")


def config(**changed: object) -> AgentConfig:
    """Of a job that replaces nodes."""
    loaded = AgentConfig.load({"TASKD_RECOVER_STRATEGY": "recover"}, job_id="job")
    return dataclasses.replace(loaded, **changed)


class Agents:
    """Three voters that miss the manager they have obeyed."""

    def __init__(self) -> None:
        self.clock = MonotonicClock()
        self.agents = [Electing(config(), self.clock, name) for name in NAMES]
        for rank, agent in enumerate(self.agents):
            agent.take_place(rank, 3)
        voters = tuple(
            Voter(rank, name, agent.address)
            for rank, (name, agent) in enumerate(zip(NAMES, self.agents, strict=True))
        )
        self.roster = Roster(0, 1, 3, 1, voters)
        for agent in self.agents:
            agent.obey("10.0.0.1:9601", 0)
            (kept,) = agent.keep(self.roster, self.clock.now())
            assert kept.number == 1

    def run(self, *who: int, at: float | None = None) -> Won | Elected:
        """These take part, until something follows. `at`: for them it is this moment, all along."""
        until = self.clock.now() + _DEADLINE_S
        while self.clock.now() < until:
            for rank in who:
                agent, now = self.agents[rank], at or self.clock.now()
                zeromq.poll(agent.links, 0.01)
                for result in agent.read(now):
                    return result
                agent.turn(now)
        raise TimeoutError

    def close(self) -> None:
        for agent in self.agents:
            agent.close()


class Pair(Agents):
    """Node 1 of two, and the spare that votes; node 0 is lost with the manager."""

    def __init__(self) -> None:
        self.clock = MonotonicClock()
        self.agents = [Electing(config(), self.clock, name) for name in ("node", "spare")]
        node, spare = self.agents
        node.take_place(1, 2)
        spare.wait()
        voters = (Voter(0, "lost", "127.0.0.1:1"), Voter(1, "node", node.address))
        witness = Witness("spare", spare.address)
        self.roster = Roster(0, 3, 2, 1, voters, witness=witness)
        for one in self.agents:
            one.obey("10.0.0.1:9601", 0)
            one.keep(self.roster, 0.0)


@pytest.fixture
def agents() -> Iterator[Agents]:
    made = Agents()
    yield made
    made.close()


def tell(agents: Agents, to: int, name: str, message: messages.Message) -> None:
    """Somebody says this at the door of an agent."""
    door = Door(config(), agents.clock, 1, name)
    way = door.connect(agents.agents[to].address)
    way.send(None, door.encode(message))
    way.send(None, b"garbage")
    until = agents.clock.now() + _DEADLINE_S
    link = agents.agents[to].links[0]
    zeromq.poll([link], until - agents.clock.now())
    agents.tellers = [*getattr(agents, "tellers", []), (way, door)]


def test_a_manager_is_told_what_the_agent_knows(agents: Agents) -> None:
    """In a large job without what it hears of each agent anyway."""
    first = agents.agents[0]
    first.keep(dataclasses.replace(agents.roster, number=2, listeners=("h:1",)), 0.0)
    assert first.told is not None
    assert (first.told.key, first.told.names, first.told.listeners) == ((0, 2), NAMES, ())
    assert not any(first.told.addresses.values())
    assert Electing(config(), agents.clock, "new").told is None


def test_two_that_miss_the_manager_elect_the_first_of_them(agents: Agents) -> None:
    missed_at = agents.clock.now()
    for rank in (1, 2):
        agents.agents[rank].miss(missed_at)
    won = agents.run(1, 2, at=missed_at + 0.2)  # the first one asks, and the other not yet
    assert isinstance(won, Won)
    assert (won.term, won.node_ranks) == (1, (1, 2))
    agents.agents[1].started(1, "10.0.0.2:9601")
    assert agents.run(2) == messages.Elected(1, "10.0.0.2:9601")


def test_who_hears_the_manager_brings_the_others_back(agents: Agents) -> None:
    agents.agents[2].obey("10.0.0.3:9601", 4)
    agents.agents[1].miss(agents.clock.now())
    assert agents.run(1, 2) == Elected(4, "10.0.0.3:9601")


def test_a_witness_that_knows_more_tells_it_and_gives_its_vote_the_next_time() -> None:
    pair = Pair()
    newer = dataclasses.replace(pair.roster, number=4, listeners=("h:1",))
    pair.agents[1].keep(newer, 0.0)
    for one in pair.agents:
        one.miss(pair.clock.now())
    won = pair.run(0, 1)
    assert isinstance(won, Won)
    assert won.roster == dataclasses.replace(newer, listeners=())
    assert won.names == ("node", "spare")
    pair.close()


def test_a_stranger_names_no_manager(agents: Agents) -> None:
    tell(agents, 0, "stranger", messages.Elected(7, "10.0.0.9:9601"))
    assert agents.agents[0].read(agents.clock.now()) == []
    tell(agents, 0, "third", messages.Elected(7, "10.0.0.9:9601"))
    assert agents.run(0) == messages.Elected(7, "10.0.0.9:9601")
    for way, door in agents.tellers:
        way.close()
        door.close()


@pytest.mark.parametrize(("node_count", "changed"), [
    (1, {}), (3, {"starts_manager": False}), (3, {"strategies": ("recover-in-place",)}),
])  # fmt: skip
def test_where_nothing_is_elected_no_port_is_open(
    node_count: int, changed: dict[str, object]
) -> None:
    one = Electing(config(**changed), MonotonicClock(), "first")
    one.take_place(0, node_count)
    assert one.address == ""
    assert one.links == []
    assert one.read(0.0) == []
    one.close()


def _until_heard(doors: list[zmq.Socket[bytes]]) -> None:
    """Until something was said at each of them."""
    silent, deadline = dict.fromkeys(doors, zmq.POLLIN), time.monotonic() + _DEADLINE_S
    while silent:
        assert time.monotonic() < deadline, f"{len(silent)} of {len(doors)} have heard nothing"
        for door, _ in zmq.zmq_poll(list(silent.items()), 100):
            del silent[door]


@pytest.mark.slow
@pytest.mark.parametrize("descriptors", [120, 600])
def test_who_is_elected_in_a_large_job_tells_all_and_can_reach_its_own_manager(
    descriptors: int,
) -> None:
    with zmq.Context() as context, contextlib.ExitStack() as stack:
        doors = [stack.enter_context(context.socket(zmq.ROUTER)) for _ in range(100)]
        addresses = [f"127.0.0.1:{door.bind_to_random_port('tcp://127.0.0.1')}" for door in doors]
        command = [sys.executable, str(_ELECTED), str(descriptors), *addresses]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as elected:
            stack.callback(elected.kill)
            _until_heard(doors)
            most, _ = elected.communicate(timeout=_DEADLINE_S)
        assert elected.returncode == 0
        assert 0 < int(most) <= 64
