"""A manager that no agent speaks to any more, in a job whose agents may elect another one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from taskd.config import LogConfig, ManagerConfig
from taskd.core import events
from taskd.manager.service import Service
from taskd.transport.memory import MemoryRouter
from taskd.wire import messages
from tests.unit.manager.peer import Peer

if TYPE_CHECKING:
    import pathlib

NODES = 3


class Job:
    """Three agents with a rank each, which have a port for votes, or have none."""

    def __init__(self, network, clock, directory: pathlib.Path, *, elects: bool) -> None:
        log = LogConfig(directory / "log")
        config = ManagerConfig(
            "job", "unused", 30.0, None, log, strategies=("recover",), reschedule_s=270.0
        )
        self.clock, self.records = clock, directory / "log" / "recoveries.jsonl"
        self.service = Service(config, MemoryRouter(network, "manager"), clock)
        self.agents = [Peer(network, node_rank=n, incarnation=f"agent {n}") for n in range(NODES)]
        for node_rank, agent in enumerate(self.agents):
            voter = f"h{node_rank}:1" if elects else ""
            report = events.WorkerReport(node_rank, 0, "running", declared=True, entered=True)
            agent.say(
                messages.AgentRegistered(
                    node_rank, f"agent {node_rank}", NODES, NODES, 3, 0, 0, (report,), voter=voter
                )
            )
        self.service.turn()
        assert all(messages.Accepted in map(type, agent.heard()) for agent in self.agents)
        self.service.turn()

    def pass_s(self, seconds: float, *talking: Peer) -> None:
        """In steps of a second."""
        for _ in range(int(seconds)):
            self.clock.advance(1.0)
            for agent in talking:
                agent.say(messages.Heartbeat())
            self.service.turn()


@pytest.mark.parametrize("elects", [False, True])
def test_it_ends_without_a_record_if_they_may_have_another_one(
    network, clock, tmp_path, lines, elects: bool
) -> None:
    job = Job(network, clock, tmp_path, elects=elects)
    job.pass_s(5.0, *job.agents)
    job.pass_s(33.0)
    told = "none of its agents is heard any more" in lines.text
    assert told == elects
    assert job.service.result is elects  # False: the job has failed
    job.service._records.write_all()
    assert job.records.exists() != elects


def test_it_goes_on_while_one_agent_is_heard(network, clock, tmp_path, lines) -> None:
    job = Job(network, clock, tmp_path, elects=True)
    job.pass_s(60.0, job.agents[1])
    assert "none of its agents is heard any more" not in lines.text
    assert "the agent of node 0 has been silent" in lines.text
    assert job.service.result is None


def test_after_one_has_ended_well_nobody_has_been_elected(network, clock, tmp_path, lines) -> None:
    job = Job(network, clock, tmp_path, elects=True)
    first, *others = job.agents
    job.pass_s(5.0, *job.agents)
    for rank, one in enumerate(job.agents):
        one.say(messages.MESSAGE_BY_RECORD[events.WorkerReturned](rank, 0, 0, 10))
    job.service.turn()
    first.say(messages.MESSAGE_BY_RECORD[events.WorkerFinished](0, 0))
    first.say(messages.MESSAGE_BY_RECORD[events.AgentLeft](0, "succeeded", "every worker finished"))
    job.pass_s(2.0, *others)
    job.pass_s(33.0)
    assert job.service.result is True
    assert "this manager ends: node 0 has ended well, and no other is heard any more" in lines.text
    assert "elected" not in lines.text
