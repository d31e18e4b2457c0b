"""Snapshots that come back from their mirrors: real arenas, real sockets, real threads.

Node 0 was lost; node 1 keeps what its ranks had. Another agent has the place of node 0.
"""

from __future__ import annotations

import dataclasses
import resource
import select
from typing import TYPE_CHECKING

import pytest

from taskd.core import commands, events
from taskd.native.arena import Arena
from taskd.transport import zeromq
from taskd.wire import mirroring
from taskd.wire.mirroring import Answer, Ask, Offer
from tests.contract.mirrored import RANKS, SECRET, Node, until
from tests.descriptors import none_free
from tests.native.arenas import patterned

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(params=[None, SECRET], ids=["open", "secret"])
def nodes(request: pytest.FixtureRequest) -> Iterator[tuple[Node, Node]]:
    """Who takes the place of the lost node, and who keeps versions 10 and 20 of its ranks."""
    lost, keeper = Node(0, RANKS, request.param), Node(1, (), request.param)
    keeper.pair(lost, lost)
    lost.pair(keeper, keeper)
    for version in (10, 20):
        for rank in RANKS:
            lost.snapshot(rank, version)
            until(lambda: version in keeper.held.get(rank, ()))  # noqa: B023
    lost.close()
    keeper.obey(commands.Interrupt("test", 1, "node 0 is lost"))
    other = Node(0, RANKS, request.param)
    other.incarnation = other.mirroring._incarnation = "another"
    yield other, keeper
    other.close()
    keeper.close()


def an_order(keeper: Node, version: int = 20, **changed: object) -> commands.ReturnMirrors:
    """To the agent in the place of node 0."""
    order = commands.ReturnMirrors(
        "test", 1, 0, 0, "another", 1, keeper.address, keeper.incarnation, version, RANKS
    )
    return dataclasses.replace(order, **changed)


def told(node: Node, timeout_s: float = 30.0) -> events.MirrorsReturned:
    """What the manager hears of it."""
    found: list[events.MirrorsReturned] = []

    def has_said() -> bool:
        news = node.mirroring.read(5.0)
        found.extend(event for event in news if isinstance(event, events.MirrorsReturned))
        return bool(found)

    until(has_said, timeout_s)
    (event,) = found
    return event


def has_answered(node: Node) -> bool:
    return any(isinstance(one, events.MirrorsReturned) for one in node.mirroring.read(5.0))


def contents(node: Node, rank: int, version: int) -> dict[str, bytes]:
    """What the process of this rank would load."""
    arena = node.workers[rank].arenas.find(version)
    assert isinstance(arena, Arena)
    found = arena.open(version)
    assert bytes(found.rest) == b"rest"
    return {name: bytes(found.view(name)) for name in found.entries}


@pytest.mark.parametrize("version", [10, 20])
def test_they_are_in_the_arenas_of_the_new_ranks(nodes: tuple[Node, Node], version: int) -> None:
    other, keeper = nodes
    order = an_order(keeper, version)
    assert keeper.obey(dataclasses.replace(order, node_rank=1)) == []
    assert other.obey(order) == []
    event = told(other)
    assert event == events.MirrorsReturned(5.0, "mirrors", 0, 1, 1, version, RANKS)
    for rank in RANKS:
        assert contents(other, rank, version) == patterned(version + rank)
    assert keeper.held == {0: (10, 20), 1: (10, 20)}


def test_the_other_agent_may_hear_of_it_later(nodes: tuple[Node, Node]) -> None:
    other, keeper = nodes
    order = an_order(keeper)
    other.obey(order)
    select.select([], [], [], 0.3)  # it is told "later" some times
    assert not has_answered(other)
    keeper.obey(dataclasses.replace(order, node_rank=1))
    assert told(other).ranks == RANKS


def test_an_order_that_is_repeated_is_answered_again(nodes: tuple[Node, Node]) -> None:
    other, keeper = nodes
    order = an_order(keeper)
    keeper.obey(dataclasses.replace(order, node_rank=1))
    for _ in range(2):
        other.obey(order)
        assert told(other).ranks == RANKS


def test_a_version_that_is_not_there_is_refused(nodes: tuple[Node, Node]) -> None:
    other, keeper = nodes
    order = an_order(keeper, 30)
    keeper.obey(dataclasses.replace(order, node_rank=1))
    other.obey(order)
    event = told(other)
    assert event.ranks == ()
    assert event.reason == "node 1 keeps no snapshot of version 30 of rank 0"


def test_a_node_without_memory_says_so(nodes: tuple[Node, Node]) -> None:
    other, keeper = nodes
    order = an_order(keeper)
    keeper.obey(dataclasses.replace(order, node_rank=1))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000, hard))  # a memfd is a file
    try:
        other.obey(order)
        event = told(other)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert event.ranks == ()
    assert "no node memory for snapshots" in event.reason


def test_a_node_without_free_descriptors_says_so(nodes: tuple[Node, Node]) -> None:
    other, keeper = nodes
    order = an_order(keeper)
    with none_free():
        (event,) = other.obey(order)
    assert event.ranks == ()
    assert event.reason == "node 0 cannot take them: [Errno 24] Too many open files"
    keeper.obey(dataclasses.replace(order, node_rank=1))
    other.obey(order)
    assert told(other).ranks == RANKS


def test_an_address_that_is_none_is_told(nodes: tuple[Node, Node]) -> None:
    other, keeper = nodes
    other.obey(an_order(keeper, address="no address"))
    event = told(other)
    assert (event.ranks, "no address" in event.reason) == ((), True)


def test_nothing_is_given_when_the_recovery_is_over(nodes: tuple[Node, Node]) -> None:
    other, keeper = nodes
    order = an_order(keeper)
    keeper.obey(dataclasses.replace(order, node_rank=1))
    for node in (keeper, other):
        node.obey(commands.Resume("test", 1, 20, (), 0))
    other.obey(order)
    select.select([], [], [], 0.3)
    assert not has_answered(other)
    assert all(other.workers[rank].arenas.versions() == () for rank in RANKS)


@pytest.mark.parametrize("what", ["incarnation", "job_id", "to", "rank", "version"])
def test_a_stranger_gets_nothing(
    nodes: tuple[Node, Node], what: str, caplog: pytest.LogCaptureFixture
) -> None:
    _, keeper = nodes
    keeper.obey(an_order(keeper, node_rank=1))
    true = Ask(1, "job", 0, "another", keeper.incarnation, 0, 20)
    value = 7 if what in ("rank", "version") else "mine"
    secret = keeper.mirroring._config.secret
    stranger = zeromq.Dealer(keeper.address, "fetch-0-x", secret=secret)
    try:
        said: list[mirroring.Frame] = []

        def answered() -> bool:
            stranger.poll(0.05)
            said.extend(mirroring.decode(data) for _, data in stranger.receive())
            return bool(said)

        def got(ask: Ask) -> bool:
            """Whether there is another answer than "later", at which agents ask again."""
            if answered() and said == [Answer(1, mirroring.LATER)]:
                said.clear()
                stranger.send(None, mirroring.encode(ask))
            return bool(said)

        false = dataclasses.replace(true, **{what: value})
        stranger.send(None, mirroring.encode(false))
        if what == "incarnation":
            until(answered)
            assert said == [Answer(1, mirroring.LATER)]
        else:
            until(lambda: got(false) or "to be a mirror (foreign)" in caplog.text)
            assert not said
        said.clear()
        stranger.send(None, mirroring.encode(true))
        until(lambda: got(true))
        assert isinstance(said[0], Offer), "who says the truth gets it"
    finally:
        stranger.close()
