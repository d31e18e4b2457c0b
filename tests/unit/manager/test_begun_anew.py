"""A manager that was started again in a job of three nodes or more: what agents tell it counts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from taskd.config import LogConfig, ManagerConfig
from taskd.core import events
from taskd.core.votes import Roster, Voter
from taskd.manager.service import Service
from taskd.transport.memory import MemoryRouter
from taskd.wire import messages
from tests.unit.manager.peer import Peer

if TYPE_CHECKING:
    import pathlib

    from taskd.testing.clock import FakeClock
    from taskd.transport.memory import MemoryNetwork


class Job:
    """Agents with a rank each; in its manager's memory nothing but what they tell."""

    def __init__(
        self, network: MemoryNetwork, clock: FakeClock, directory: pathlib.Path, *, nodes: int = 3
    ) -> None:
        config = ManagerConfig(
            "job", "unused", 30.0, None, LogConfig(directory / "log"), strategies=("recover",),
            reschedule_s=270.0,
        )  # fmt: skip
        self.network, self.clock, self.nodes = network, clock, nodes
        self.service = Service(config, MemoryRouter(network, "manager"), clock)

    def register(
        self, node_rank: int, name: str = "", roster: Roster | None = None, **more: object
    ) -> tuple[Peer, list[messages.Message]]:
        """Returns the agent, and what it hears."""
        name = name or f"agent {node_rank}"
        peer = Peer(self.network, node_rank=node_rank, incarnation=name)
        return peer, self.say(peer, roster, **more)

    def say(self, peer: Peer, roster: Roster | None, **more: object) -> list[messages.Message]:
        node_rank, name = peer.envelope.node_rank, str(peer.envelope.incarnation)
        report = events.WorkerReport(node_rank, 0, "running", declared=True, entered=True)
        known = (node_rank, name, self.nodes, self.nodes, 3, 1, 0, (report,))
        peer.say(
            messages.MESSAGE_BY_RECORD[events.AgentRegistered](
                *known, voter=f"h{node_rank}:1", roster=roster, **more
            )
        )
        self.service.turn()
        return peer.heard()

    def pass_s(self, seconds: int, *talking: Peer) -> None:
        for _ in range(seconds):
            self.clock.advance(1.0)
            for agent in talking:
                agent.say(messages.Heartbeat())
            self.service.turn()


def roster(number: int, *names: str, **more) -> Roster:
    voters = tuple(Voter(rank, name, "") for rank, name in enumerate(names))
    return Roster(more.pop("term", 0), number, len(names), 1, voters, **more)


AGENTS = tuple(f"agent {node_rank}" for node_rank in range(4))


@pytest.fixture
def job(network, clock, tmp_path: pathlib.Path) -> Job:
    return Job(network, clock, tmp_path)


def told(heard: list[messages.Message]) -> Roster:
    (order,) = (message for message in heard if isinstance(message, messages.KeepRoster))
    return order.roster


def test_it_tells_a_newer_roster_than_its_agents_know(job: Job) -> None:
    agents = [job.register(rank, roster=roster(3, *AGENTS[:3]))[0] for rank in range(3)]
    job.service.turn()
    for agent in agents[:2]:
        assert told(agent.heard()).number > 3
    assert job.service._machine.story.last(1)
    assert all("Voter(" not in str(entry) for entry in job.service._machine.story)


def test_a_lost_node_is_replaced_when_more_than_half_have_told(
    network, clock, tmp_path, lines
) -> None:
    """Of four with two of whom nobody has heard; these may have another manager."""
    job = Job(network, clock, tmp_path, nodes=4)
    spare = Peer(network, role="spare", node_rank=None, incarnation="spare")
    spare.say(messages.MESSAGE_BY_RECORD[events.SpareRegistered]("host", "host", listens="h:9"))
    known = roster(3, *AGENTS)
    agents = [job.register(rank, roster=known, store=f"s{rank}:1")[0] for rank in range(2)]
    job.pass_s(40, spare, *agents)
    assert messages.OfferPlace not in map(type, spare.heard())
    assert "has not heard more than half of the agents since it began (2 of 4 are here)" in (
        lines.text
    )
    agents.append(job.register(2, roster=known)[0])
    job.pass_s(2, spare, *agents)
    assert messages.OfferPlace in map(type, spare.heard())


def test_strangers_do_not_get_all_places(job: Job) -> None:
    """The newest roster has others in them, who may have elected another manager."""
    job.register(0, roster=roster(3, "agent 0", "new 1", "new 2"))
    job.register(1, roster=roster(1, *AGENTS[:3]))
    _, heard = job.register(2, roster=roster(1, *AGENTS[:3]))
    (answer,) = heard
    assert isinstance(answer, messages.Postponed)
    assert "may go on with another manager" in answer.reason
    _, heard = job.register(2, "new 2")
    assert messages.Accepted in map(type, heard)


BEFORE = roster(3, *(f"agent {node_rank}" for node_rank in range(5)))
NEWEST = roster(5, "agent 0", "new 1", "new 2", "new 3", "new 4")


@pytest.fixture
def replaced(network, clock, tmp_path: pathlib.Path) -> tuple[Job, Peer]:
    """A manager of five nodes that lacks node 2, and the agent that was there, and is too late.

    It knew only the roster before the newest one, and was lost when the others came.
    """
    job = Job(network, clock, tmp_path, nodes=5)
    late, *others = (job.register(node_rank, roster=BEFORE)[0] for node_rank in (2, 3, 4))
    job.pass_s(40, *others)
    assert job.service._machine.lost_nodes == [2]
    for name in ("agent 0", "new 1"):
        _, heard = job.register(int(name[-1]), name, roster=NEWEST)
        assert messages.Accepted in map(type, heard)
    late.heard()
    return job, late


def test_a_lost_agent_that_comes_back_is_checked_like_any_other(replaced: tuple[Job, Peer]) -> None:
    """With it all places would be full, and less than half of the newest roster there."""
    job, late = replaced
    (answer,) = job.say(late, BEFORE)
    assert isinstance(answer, messages.Postponed)
    assert "may go on with another manager" in answer.reason


def test_one_of_the_newest_roster_gets_the_place_of_a_lost_agent(
    replaced: tuple[Job, Peer],
) -> None:
    """Though the manager has heard less than half of that roster before."""
    job, _ = replaced
    _, heard = job.register(2, "new 2", roster=NEWEST)
    assert messages.Accepted in map(type, heard), heard
    assert not job.service._machine.lost_nodes


def test_one_that_has_begun_with_strangers_ends(job: Job, lines) -> None:
    job.register(1, roster=roster(1, *AGENTS[:3]))
    job.register(2, roster=roster(1, *AGENTS[:3]))
    job.register(0, roster=roster(3, "agent 0", "new 1", "new 2"))
    assert job.service.result is True
    assert "it has begun with others than node 0 trains with" in lines.text


def test_one_that_was_succeeded_ends_as_soon_as_a_voter_says_so(job: Job, lines) -> None:
    job.register(1, roster=roster(1, *AGENTS[:3]), term=1)
    assert job.service.result is True
    assert "node 1 has voted for another manager" in lines.text


def test_an_agent_whose_connection_broke_is_told_the_roster_again(job: Job) -> None:
    agents = [job.register(rank)[0] for rank in range(3)]
    job.service.turn()
    first = told(agents[0].heard())
    assert told(agents[1].heard()) == first
    heard = job.say(agents[0], None)
    job.service.turn()
    assert told([*heard, *agents[0].heard()]) == first
    heard = job.say(agents[1], first)
    job.service.turn()
    assert messages.KeepRoster not in map(type, [*heard, *agents[1].heard()])
