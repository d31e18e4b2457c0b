"""A manager service over a network in memory, and an agent that is registered there."""

from __future__ import annotations

import gc
import logging
from typing import TYPE_CHECKING

import pytest

from taskd.config import LogConfig, ManagerConfig
from taskd.manager.service import Service
from taskd.testing.clock import FakeClock
from taskd.transport.memory import MemoryNetwork, MemoryRouter
from taskd.wire import messages
from tests.unit.manager.peer import Peer

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Iterator


@pytest.fixture
def network() -> MemoryNetwork:
    return MemoryNetwork()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def service(network: MemoryNetwork, clock: FakeClock, tmp_path: pathlib.Path) -> Iterator[Service]:
    config = ManagerConfig("job", "unused", 30.0, None, LogConfig(tmp_path / "log"))
    thresholds = gc.get_threshold()
    yield Service(config, MemoryRouter(network, "manager"), clock)
    gc.set_threshold(*thresholds)
    gc.unfreeze()  # what other tests have left is to be collected, not kept for ever


@pytest.fixture
def agent(network: MemoryNetwork, service: Service) -> Peer:
    peer = Peer(network)
    peer.register()
    service.turn()
    assert [type(message) for message in peer.heard()] == [messages.Accepted]
    return peer


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    logger = logging.getLogger("taskd")
    logger.propagate = True
    caplog.set_level(logging.INFO, "taskd")
    return caplog
