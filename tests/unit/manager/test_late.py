"""What a torchrun is told that is no spare, and asks whether the job runs already."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from taskd.config import LogConfig, ManagerConfig
from taskd.core import events
from taskd.manager.service import Service
from taskd.transport.memory import MemoryRouter
from taskd.wire import messages
from tests.unit.manager.peer import Peer, types

if TYPE_CHECKING:
    import pathlib

_BEATS_S = 3.0  # three heartbeats


class Asking:
    """A manager that begins, and a torchrun that asks it at each heartbeat."""

    def __init__(self, network, clock, directory: pathlib.Path) -> None:
        log = LogConfig(directory / "log")
        config = ManagerConfig(
            "job", "unused", 30.0, None, log, strategies=("recover",), reschedule_s=270.0
        )
        self.network, self.clock = network, clock
        self.service = Service(config, MemoryRouter(network, "manager"), clock)
        self.peer = Peer(network, role="spare", node_rank=None, incarnation="asks")

    def ask(self, node_rank: int | None) -> list[type]:
        self.peer.report(events.SpareRegistered, "host", "name", True, node_rank)
        self.service.turn()
        return types(self.peer.heard())

    def register(self, node_rank: int) -> None:
        agent = Peer(self.network, node_rank=node_rank, incarnation=f"agent {node_rank}")
        agent.register(range(node_rank, node_rank + 1), nodes=3, world=3)
        self.service.turn()
        assert messages.Accepted in types(agent.heard())


@pytest.fixture
def asking(network, clock, tmp_path: pathlib.Path) -> Asking:
    return Asking(network, clock, tmp_path)


@pytest.mark.parametrize("node_rank", [None, 0, 2])
def test_a_manager_that_has_just_begun_does_not_say_that_no_job_runs(asking, node_rank) -> None:
    """It may have been started again; who is let go would wait where nobody comes."""
    assert asking.ask(node_rank) == []
    asking.clock.advance(_BEATS_S - 0.1)
    assert asking.ask(node_rank) == []
    asking.clock.advance(0.2)
    assert asking.ask(node_rank) == [messages.Proceed], "nobody was there: the job begins"


@pytest.mark.parametrize("node_rank", [None, 0])
def test_one_agent_that_is_back_tells_that_the_job_runs(asking, node_rank) -> None:
    assert asking.ask(node_rank) == []
    asking.register(1)
    assert asking.ask(node_rank) == [messages.Accepted]


def test_with_an_index_it_is_told_when_it_is_known_whether_the_first_node_is_there(asking) -> None:
    """It meets the others at the store of that one, as usual, and waits as a spare without it."""
    asking.register(1)
    assert asking.ask(2) == []
    asking.register(0)
    assert asking.ask(2) == [messages.Proceed]


def test_the_first_node_does_not_come(asking) -> None:
    asking.register(1)
    assert asking.ask(2) == []
    asking.clock.advance(_BEATS_S + 0.1)
    assert asking.ask(2) == [messages.Accepted]
