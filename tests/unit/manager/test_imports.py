"""What workers import is told to spares: to those who wait, and to those who come later."""

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

_NAMES = (("numpy", "numpy.linalg"), ("RANK",))


@pytest.fixture
def service(network, clock, tmp_path: pathlib.Path) -> Service:
    """Of a job that replaces lost nodes."""
    log = LogConfig(tmp_path / "log")
    config = ManagerConfig(
        "job", "unused", 30.0, None, log, strategies=("recover",), reschedule_s=270.0
    )
    return Service(config, MemoryRouter(network, "manager"), clock)


def spare(network, name: str) -> Peer:
    made = Peer(network, role="spare", node_rank=None, incarnation=name)
    made.report(events.SpareRegistered, name, name)
    return made


def test_both_are_told(service, network, agent) -> None:
    waits = spare(network, "first")
    service.turn()
    assert types(waits.heard()) == [messages.Accepted], "nothing is known yet"
    agent.report(events.ImportsKnown, 0, *_NAMES)
    service.turn()
    comes = spare(network, "second")
    service.turn()
    for heard in (waits.heard(), comes.heard()[1:]):
        (order,) = heard
        assert isinstance(order, messages.Preload)
        assert (order.modules, order.variables) == _NAMES


def test_a_node_speaks_of_its_own_imports_alone(service, network, agent) -> None:
    agent.report(events.ImportsKnown, 1, *_NAMES)
    service.turn()
    waits = spare(network, "first")
    service.turn()
    assert types(waits.heard()) == [messages.Accepted]
