"""What strangers do at the ports of a torchrun: where it is asked for votes, and where it mirrors.

They cost it neither memory nor descriptors, nor what it listens for.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import TYPE_CHECKING

import pytest

from taskd.agent import listeners
from taskd.agent.clients.relay import Relay
from taskd.agent.link.electing import Electing
from taskd.agent.mirrors import mirroring, source
from taskd.clock import MonotonicClock
from taskd.config import RelayConfig
from taskd.core.policy.election import Won
from taskd.transport import zeromq
from tests.contract.mirrored import RANKS, Node
from tests.process.test_floods import MORE, dropped, frame, send_until_dropped, until
from tests.unit.agent.test_electing import Agents, config

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.slow

ENDLESS = pytest.param(frame(bytes(1_000_000), MORE), id="a message without end")
IN_PARTS = pytest.param((frame(b"", MORE) * 2000 + frame(b"")) * 25, id="thousands of parts")
FLOODED = "its connections were dropped"


@pytest.fixture(autouse=True)
def _little_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listeners, "ROOM_BYTES", 32 << 20)


@pytest.fixture
def agents() -> Iterator[Agents]:
    made = Agents()
    yield made
    made.close()


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


def turn(one: Electing) -> None:
    """As the loop of an agent does, and that of a spare."""
    zeromq.poll(one.links, 0.05)
    assert one.read(MonotonicClock().now()) == []


def flood(port: int, data: bytes, meanwhile: Callable[[], object]) -> int:
    """Until the stranger is hung up on. Returns how many bytes that took."""
    sent: list[int] = []
    stranger = threading.Thread(target=lambda: sent.append(send_until_dropped(port, data)))
    stranger.start()
    while stranger.is_alive():
        meanwhile()
    stranger.join()
    return sent[0]


@contextlib.contextmanager
def connections(port: int, count: int) -> Iterator[list[socket.socket]]:
    """On which nobody speaks, each accepted after the one before."""
    with contextlib.ExitStack() as open_ones:
        found = []
        for _ in range(count):
            one = socket.create_connection(("127.0.0.1", port), timeout=30)
            found.append(open_ones.enter_context(one))
            one.recv(1)  # the beginning of the greeting
        yield found


@pytest.mark.parametrize("data", [ENDLESS, IN_PARTS])
def test_a_flooded_door_is_cleared_and_its_agent_votes(
    agents: Agents, caplog: pytest.LogCaptureFixture, data: bytes
) -> None:
    flooded = agents.agents[2]
    assert flood(port_of(flooded.address), data, lambda: turn(flooded)) < 1e9
    assert f"somebody floods {flooded.address}: {FLOODED}" in caplog.text
    for rank in (1, 2):
        agents.agents[rank].miss(agents.clock.now())
    assert isinstance(agents.run(1, 2), Won)


def test_a_door_whose_agent_asks_for_votes_is_cleared_and_it_asks_again(agents: Agents) -> None:
    """Its connections to others share what is closed."""
    asking = agents.agents[1]
    for rank in (1, 2):
        agents.agents[rank].miss(agents.clock.now())
    asking.turn(agents.clock.now() + 1.0)
    assert len(asking.links) == 3
    data = frame(bytes(1_000_000), MORE)
    flood(port_of(asking.address), data, lambda: turn(asking))
    assert isinstance(agents.run(1, 2), Won)


def test_at_a_door_who_says_nothing_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listeners, "SILENT_S", 0.2)
    spare = Electing(config(), MonotonicClock(), "spare")
    spare.wait()
    with connections(port_of(spare.address), 3) as strangers:
        until(lambda: turn(spare) or all(map(dropped, strangers)), "they are still there")
    spare.close()


def test_more_connections_than_are_let_in_cost_those_that_have_been_silent_for_longest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(listeners, "MOST", 4)
    spare = Electing(config(), MonotonicClock(), "spare")
    spare.wait()
    with connections(port_of(spare.address), 7) as strangers:
        until(lambda: turn(spare) or all(map(dropped, strangers[:3])), "they are still there")
        assert not any(map(dropped, strangers[3:]))
    spare.close()


@pytest.fixture
def nodes() -> Iterator[tuple[Node, Node]]:
    """Each of them mirrors the snapshots of the other."""
    pair = Node(0, RANKS[:1]), Node(1, RANKS[1:])
    pair[0].pair(pair[1], pair[1])
    pair[1].pair(pair[0], pair[0])
    yield pair
    for node in pair:
        node.close()


def are_mirrored(nodes: tuple[Node, Node], version: int) -> bool:
    return version in nodes[1].held.get(0, ()) and version in nodes[0].held.get(1, ())


@pytest.mark.parametrize("data", [ENDLESS, IN_PARTS])
def test_flooded_mirrors_are_cleared_and_go_on(
    nodes: tuple[Node, Node], caplog: pytest.LogCaptureFixture, data: bytes
) -> None:
    """Those that the flooded node keeps, and its own."""
    for rank in RANKS:
        nodes[rank].snapshot(rank, 10)
    until(lambda: are_mirrored(nodes, 10), "there are no mirrors")
    assert send_until_dropped(port_of(nodes[0].address), data) < 1e9
    said = f"somebody floods {nodes[0].address}: {FLOODED}"
    until(lambda: said in caplog.text, "nobody says so")
    for rank in RANKS:
        nodes[rank].snapshot(rank, 20)
    until(lambda: are_mirrored(nodes, 20), "there are no mirrors any more")
    assert are_mirrored(nodes, 10)
    assert "a bug in taskd" not in caplog.text


def test_at_mirrors_who_says_nothing_is_closed_and_a_node_without_snapshots_stays(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(mirroring, "SILENT_S", 0.6)
    monkeypatch.setattr(source, "WORD_S", 0.1)
    own, buddy = Node(0, RANKS), Node(1)
    try:
        own.pair(buddy, buddy)
        buddy.pair(own, own)
        with connections(port_of(buddy.address), 2) as strangers:
            until(lambda: all(map(dropped, strangers)), "they are still there")
        silent = "node 1 let no mirror in: a connection was refused: nobody has said anything there"
        until(lambda: silent in caplog.messages, "it is not said")
        assert own.mirroring._listener.router._peer_by_connection
        assert buddy.mirroring._listener.router._peer_by_connection
        own.snapshot(0, 10)
        until(lambda: buddy.held == {0: (10,)}, "there is no mirror")
    finally:
        own.close()
        buddy.close()


def test_a_flooded_relay_is_cleared_and_passes_on(caplog: pytest.LogCaptureFixture) -> None:
    manager = zeromq.Router("127.0.0.1:0")
    relay = Relay(RelayConfig("127.0.0.1:0", manager.address, 0, None), MonotonicClock())
    relay.start()
    send_until_dropped(port_of(relay.address), IN_PARTS.values[0])
    until(lambda: f"somebody floods {relay.address}: {FLOODED}" in caplog.text, "nobody says so")
    client = zeromq.Dealer(relay.address, "client")
    client.send(None, b"hello")
    until(
        lambda: manager.poll(0.05) == set() and (b"client", b"hello") in manager.receive(),
        "it passes nothing on",
    )
    client.close()
    relay.close()
    manager.close()
