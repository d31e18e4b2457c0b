"""Mirrors between two agents: real arenas, real sockets, real threads.

What is damaged, late, foreign or too large costs nothing that is whole.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import resource
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from taskd.agent.mirrors.mirroring import Mirroring
from taskd.clock import MonotonicClock
from taskd.config import AgentConfig, LogConfig
from taskd.core import commands, events
from taskd.native.arena_copy import UNMIRRORED
from taskd.native.arenas import Arenas
from tests.contract.mirrored import RANKS, SECRET, Node, until
from tests.descriptors import none_free
from tests.native.arenas import patterned, put

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(params=[None, SECRET], ids=["open", "secret"])
def nodes(request: pytest.FixtureRequest) -> Iterator[tuple[Node, Node]]:
    """A node with two ranks, and its buddy."""
    own, buddy = Node(0, RANKS, request.param), Node(1, (), request.param)
    buddy.pair(own, own)
    own.pair(buddy, buddy)
    yield own, buddy
    own.close()
    buddy.close()


def test_the_newest_two_snapshots_of_each_rank_have_mirrors(nodes: tuple[Node, Node]) -> None:
    own, buddy = nodes
    for version in (10, 20, 30):
        for rank in RANKS:
            own.snapshot(rank, version)
            until(lambda: version in buddy.held.get(rank, ()))  # noqa: B023
            until(lambda: own.may_go_on(rank))  # noqa: B023
    assert buddy.held == {0: (20, 30), 1: (20, 30)}
    assert own.held == {}
    for rank in RANKS:
        for version in (20, 30):
            assert buddy.mirrored(rank, version) == patterned(version + rank)
    assert buddy.mirroring.find(0, 10) is None
    assert buddy.mirroring.find(7, 10) is None


def test_a_rank_waits_until_its_snapshot_has_arrived_and_never_without_a_buddy(
    nodes: tuple[Node, Node],
) -> None:
    own, buddy = nodes
    own.snapshot(0, 10)
    until(lambda: 10 in buddy.held.get(0, ()) and own.may_go_on(0))
    buddy.obey(commands.Interrupt("test", 1, "a fault"))  # takes no more
    own.snapshot(0, 20)
    assert not own.may_go_on(0)
    buddy.obey(commands.Resume("test", 1, 20, (), 0))
    until(lambda: own.may_go_on(0))
    assert buddy.held[0] == (10, 20)


def test_what_a_job_has_rolled_back_from_is_void(nodes: tuple[Node, Node]) -> None:
    own, buddy = nodes
    for version in (10, 20):
        own.snapshot(0, version)
        until(lambda: version in buddy.held.get(0, ()))  # noqa: B023
    for node in nodes:
        node.obey(commands.Interrupt("test", 1, "a fault"))
        node.obey(commands.Resume("test", 1, 10, (), 0))
    assert buddy.held == {0: (10,)}, "at once"
    own.workers[0].arenas.forget_after(10)
    until(lambda: own.may_go_on(0))
    own.snapshot(0, 20, generation=1)
    until(lambda: buddy.held == {0: (10, 20)})
    for node in nodes:
        node.obey(commands.RestartGroup("test", 2, 0, "nothing is left", ()))
    assert buddy.held == {}
    assert buddy.mirroring.find(0, 10) is None


def test_a_state_that_grows_takes_a_larger_mirror(nodes: tuple[Node, Node]) -> None:
    own, buddy = nodes
    own.snapshot(0, 10)
    until(lambda: buddy.held == {0: (10,)})
    for version in (20, 30):
        arena = (
            own.workers[0].arenas.all()[-1]
            if version == 30
            else own.workers[0].arenas.make(30_000_000)
        )
        writer = arena.begin(version, 0)
        data = os.urandom(20_000_000)
        writer.add("large", "uint8", (len(data),), len(data))
        put(writer, data)
        writer.complete()
        until(lambda: version in buddy.held.get(0, ()))  # noqa: B023
        assert buddy.mirrored(0, version) == {"large": data}
    until(lambda: buddy.held == {0: (20, 30)})


def test_another_pairing_drops_what_is_not_to_be_kept_any_more(nodes: tuple[Node, Node]) -> None:
    own, buddy = nodes
    own.snapshot(0, 10)
    until(lambda: buddy.held == {0: (10,)})
    third = Node(2, (), own.mirroring._config.secret)
    try:
        third.pair(own, own)
        buddy.pair(own)
        own.pair(third, buddy)
        assert buddy.held == {}
        until(lambda: third.held == {0: (10,)})
        until(lambda: own.may_go_on(0))
    finally:
        third.close()


def test_a_buddy_without_memory_says_so_once_and_is_not_waited_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    own, buddy = Node(0, RANKS), Node(1)
    with contextlib.ExitStack() as stack:
        stack.callback(buddy.close)
        stack.callback(own.close)
        own.snapshot(0, 10)
        own.snapshot(1, 10)
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, hard))  # a memfd is a file
        stack.callback(resource.setrlimit, resource.RLIMIT_FSIZE, (soft, hard))
        buddy.pair(own, own)
        own.pair(buddy, buddy)
        until(
            lambda: (
                "snapshots of rank 0 have no mirror and are lost with this node: node 1 "
                "says: no node memory" in caplog.text
            )
        )
        until(
            lambda: (
                "snapshots of rank 1 have no mirror and are lost with this node: node 1 "
                "says: no node memory" in caplog.text
            )
        )
        own.workers[0].arenas.all()[-1].forget_after(-1)
        writer = own.workers[0].arenas.all()[-1].begin(20, 0)
        writer.complete(b"another one, which is not even offered")
        assert own.may_go_on(0)
        assert own.may_go_on(1)
        own.mirroring.close()
        said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        assert len(said) == 4, said
        refusal = next(
            line
            for line in said
            if line.startswith(
                "node 1 takes no mirror of rank 0 of node 0: no node memory for snapshots: "
            )
        )
        assert "ulimit -f" in refusal


def test_a_closed_agent_leaves_its_ranks_waiting_for_nobody(nodes: tuple[Node, Node]) -> None:
    own, buddy = nodes
    own.snapshot(0, 10)
    until(lambda: buddy.held == {0: (10,)} and own.may_go_on(0))
    buddy.obey(commands.Interrupt("test", 1, "a fault"))
    own.snapshot(0, 20)
    assert not own.may_go_on(0)
    own.mirroring.close()
    assert own.may_go_on(0)
    assert own.workers[0].arenas.all()[-1].mirror_mark == UNMIRRORED


def test_a_node_that_is_alone_opens_no_port(caplog: pytest.LogCaptureFixture) -> None:
    config = AgentConfig("job", "127.0.0.1:1", 30.0, None, LogConfig(pathlib.Path()), host="only")
    alone = Mirroring(config, MonotonicClock(), 0, "agent-0", is_alone=True)
    asked, held = alone.want(0.0)
    assert isinstance(asked, events.AgentMirrors)
    assert isinstance(held, events.MirrorsHeld)
    assert (asked.host, asked.address, held.held, alone.fds) == ("only", "", (), [])
    assert alone.obey(commands.Interrupt("test", 1, "a fault"), {}, 0.0) == alone.read(0.0) == []
    assert [type(event) for event in alone.introduction(0.0)] == [
        events.AgentMirrors,
        events.MirrorsHeld,
    ]
    alone.close()
    assert not caplog.records


def test_an_address_that_is_not_of_this_host_costs_mirrors_and_nothing_else(
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = AgentConfig(
        "job",
        "127.0.0.1:1",
        30.0,
        None,
        LogConfig(pathlib.Path()),
        own_address="192.0.2.1",
        host="only",
    )
    lost = Mirroring(config, MonotonicClock(), 0, "agent-0")
    assert lost.want(0.0) == lost.introduction(0.0) == []
    lost.close()
    (record,) = caplog.records
    assert record.getMessage().startswith(
        "node 0: snapshots are not mirrored: 192.0.2.1:0 cannot "
        "be bound: this host has no such address"
    )


def test_a_peer_node_whose_address_is_none_is_said(caplog: pytest.LogCaptureFixture) -> None:
    own = Node(0, RANKS)
    try:
        own.obey(commands.Pair("test", 0, 0, 1, "127.0.0.1:no port", "agent-1", ()))
        until(lambda: "node 0: snapshots are not mirrored for now: " in caplog.text)
        own.snapshot(0, 10)
        assert own.may_go_on(0)
    finally:
        own.close()


def test_a_second_peer_node_that_cannot_be_reached_costs_its_own_mirrors_alone(
    nodes: tuple[Node, Node], caplog: pytest.LogCaptureFixture
) -> None:
    own, buddy = nodes
    own.snapshot(0, 10)
    until(lambda: buddy.held == {0: (10,)} and own.may_go_on(0))
    own.obey(commands.Pair("test", 0, 0, 2, "127.0.0.1:no port", "agent-2", ((1, "agent-1"),)))
    until(lambda: "node 0: snapshots are not mirrored for now: " in caplog.text)
    own.snapshot(0, 20)
    assert own.may_go_on(0), "it waits for nobody"
    buddy.workers[1] = SimpleNamespace(arenas=Arenas.create())
    buddy.snapshot(1, 10)
    buddy.pair(own, own)
    until(lambda: own.held == {1: (10,)})
    own.pair(buddy, buddy)
    until(lambda: 20 in buddy.held[0] and own.may_go_on(0))
    assert "a bug in taskd" not in caplog.text


def test_without_free_descriptors_mirrors_wait_and_nothing_else(
    caplog: pytest.LogCaptureFixture,
) -> None:
    own, buddy = Node(0, RANKS), Node(1)
    try:
        buddy.pair(own, own)
        until(lambda: buddy.mirroring._dealer is not None)
        with none_free():
            for _ in range(2):
                own.pair(buddy, buddy)
                # the thread has tried to connect, too
                until(lambda: "no socket can be opened" in caplog.text)
        # with twice the same pair, each is said once
        connection, ranks = sorted(caplog.messages)
        assert connection == (
            f"node 0: snapshots are not mirrored for now: {buddy.mirroring._address}: no socket "
            "can be opened: [Errno 24] Too many open files; raise the limit of open files of this "
            "process (ulimit -n)"
        )
        assert ranks == (
            "node 0: snapshots of ranks 0, 1 are not mirrored for now: [Errno 24] Too many open "
            "files. Raise the limit of open files of torchrun (ulimit -n)"
        )
        own.mirroring.follow(own.workers)  # with each heartbeat
        own.snapshot(0, 10)
        until(lambda: 10 in buddy.held.get(0, ()))
    finally:
        own.close()
        buddy.close()


def test_a_node_without_free_descriptors_opens_no_port(caplog: pytest.LogCaptureFixture) -> None:
    config = AgentConfig("job", "127.0.0.1:1", 30.0, None, LogConfig(pathlib.Path()), host="only")
    lost = Mirroring(config, MonotonicClock(), 0, "agent-0")
    with none_free():
        assert lost.want(0.0) == lost.introduction(0.0) == lost.fds == []
    lost.close()
    (record,) = caplog.records
    assert "node 0: snapshots are not mirrored: 127.0.0.1:0: no socket can be opened" in (
        record.getMessage()
    )
