"""An agent that does not get its place yet is told so, and the manager's log says it, too."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from taskd.config import LogConfig, ManagerConfig
from taskd.core.events import AgentRegistered, WorkerReport
from taskd.core.votes import Roster, Voter, Witness
from taskd.manager.service import Service
from taskd.transport.memory import MemoryRouter
from taskd.wire import messages
from tests.unit.manager.peer import Peer

if TYPE_CHECKING:
    import pathlib

# of a job of two nodes that is over; the first agent of the next one was its witness
DEAD = Roster(
    0, 2, 2, 1, (Voter(0, "dead 0", "h:1"), Voter(1, "dead 1", "h:2")), (), (), Witness("new 0", "")
)


@pytest.fixture
def pair(network, clock, tmp_path: pathlib.Path) -> Service:
    log = LogConfig(tmp_path / "log")
    config = ManagerConfig(
        "job", "unused", 30.0, None, log, strategies=("recover",), reschedule_s=270.0
    )
    return Service(config, MemoryRouter(network, "manager"), clock)


def register(service: Service, peer: Peer, roster: Roster | None = None, **more: object) -> list:
    node_rank, name = peer.envelope.node_rank, str(peer.envelope.incarnation)
    assert node_rank is not None
    report = WorkerReport(node_rank, 0, "running", declared=True, entered=True)
    known = (node_rank, name, 2, 2, 3, 0, 0, (report,))
    peer.say(messages.MESSAGE_BY_RECORD[AgentRegistered](*known, roster=roster, **more))
    service.turn()
    return peer.heard()


def test_one_whom_the_roster_of_another_does_not_name(pair, network, lines) -> None:
    first = Peer(network, node_rank=0, incarnation="new 0")
    other = Peer(network, node_rank=1, incarnation="new 1")
    assert messages.Accepted in map(type, register(pair, first, DEAD))
    for _ in range(2):
        (answer,) = register(pair, other)
        assert isinstance(answer, messages.Postponed)
        assert "may go on with another manager" in answer.reason
        assert "end this manager and all torchruns, and start them again" in answer.reason
    said = [text for text in lines.messages if "does not get it yet" in text]
    assert said == [f"node 1 asks for its place, and does not get it yet: {answer.reason}"]


def test_one_whose_place_another_agent_has(pair, network) -> None:
    for node_rank in range(2):
        peer = Peer(network, node_rank=node_rank, incarnation=f"agent {node_rank}")
        assert messages.Accepted in map(type, register(pair, peer))
    second = Peer(network, node_rank=1, incarnation="second")
    second.say(
        messages.MESSAGE_BY_RECORD[AgentRegistered](1, "second", 2, 2, 3, 0, 0, (), is_late=True)
    )
    pair.turn()
    assert [type(answer) for answer in second.heard()] == [messages.Postponed]
