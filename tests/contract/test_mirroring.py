"""Mirrors between two agents: real arenas, real sockets, real threads.

What is damaged, late, foreign or too large costs nothing that is whole.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import resource
import select
import socket
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from taskd.agent.mirrors.mirroring import Mirroring
from taskd.clock import MonotonicClock
from taskd.config import AgentConfig, LogConfig
from taskd.core import commands, events
from taskd.native.arena import Arena
from taskd.native.arena_copy import UNMIRRORED, Outgoing, Outline, may_go_on
from taskd.native.arenas import Arenas
from taskd.transport import zeromq
from taskd.wire import mirroring
from taskd.wire.mirroring import Answer, Offer, Piece
from tests.native.arenas import patterned, put

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SECRET = b"a secret of 16 bytes and more"
RANKS = (0, 1)


class Node:
    """An agent's mirrors, with the arenas of its ranks in the place of workers."""

    def __init__(
        self, node_rank: int, ranks: tuple[int, ...] = (), secret: bytes | None = None
    ) -> None:
        self.node_rank, self.incarnation = node_rank, f"agent-{node_rank}"
        config = AgentConfig(
            "job", "127.0.0.1:1", 30.0, secret, LogConfig(pathlib.Path()), host=f"host-{node_rank}"
        )
        self.mirroring = Mirroring(config, MonotonicClock(), node_rank, self.incarnation)
        asked, held = self.mirroring.want(0.0)
        assert isinstance(asked, events.AgentMirrors)
        assert isinstance(held, events.MirrorsHeld)
        assert self.mirroring.want(0.0) == []
        self.address = asked.address
        self.workers = {rank: SimpleNamespace(arenas=Arenas.create()) for rank in ranks}

    def pair(self, buddy: Node, *sources: Node) -> None:
        order = commands.Pair(
            "test",
            0,
            self.node_rank,
            buddy.node_rank,
            buddy.address,
            buddy.incarnation,
            tuple((source.node_rank, source.incarnation) for source in sources),
        )
        assert self.obey(order) == []

    def obey(self, command: commands.Command) -> list[events.Event]:
        return self.mirroring.obey(command, self.workers, 0.0)

    def snapshot(self, rank: int, version: int, generation: int = 0, room: int = 8_000_000) -> None:
        arenas = self.workers[rank].arenas
        arena = next(
            (arena for arena in reversed(arenas.all()) if arena.capacity >= room), None
        ) or arenas.make(room)
        writer = arena.begin(version, generation)
        for name, data in patterned(version + rank).items():
            writer.add(name, "uint8", (len(data),), len(data))
            put(writer, data)
        writer.complete(b"rest")

    @property
    def held(self) -> dict[int, tuple[int, ...]]:
        return dict(self.mirroring.introduction(0.0)[1].held)

    def may_go_on(self, rank: int) -> bool:
        return may_go_on(self.workers[rank].arenas.all())

    def mirrored(self, rank: int, version: int) -> dict[str, bytes]:
        """What a writer of this node would find."""
        descriptor = self.mirroring.find(rank, version)
        assert descriptor is not None
        arena = Arena.attach(os.dup(descriptor))
        found = arena.open(version)
        return {name: bytes(found.view(name)) for name in found.entries}

    def close(self) -> None:
        self.mirroring.close()
        for worker in self.workers.values():
            worker.arenas.close()


def until(said: Callable[[], object], timeout_s: float = 30.0) -> None:
    """Wait for a fact."""
    deadline = time.monotonic() + timeout_s
    while not said():
        assert time.monotonic() < deadline, "it never came to that"
        select.select([], [], [], 0.005)


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


# ---------------------------------------------------------------------- a stranger, or a source
# that does not keep to the rules


class Stranger:
    """Speaks to a buddy as the agent of node 0 would."""

    def __init__(self, buddy: Node, secret: bytes | None = None) -> None:
        self.buddy, self.transfers = buddy, 0
        self.dealer = zeromq.Dealer(buddy.address, "mirror-0-x", secret=secret)
        self.arena = Arena.create(8_000_000)
        writer = self.arena.begin(10, 0)
        for name, data in patterned(10).items():
            writer.add(name, "uint8", (len(data),), len(data))
            put(writer, data)
        writer.complete(b"rest")
        self.outgoing = Outgoing(self.arena)

    def say(self, frame: mirroring.Frame | bytes) -> None:
        self.dealer.send(None, frame if isinstance(frame, bytes) else mirroring.encode(frame))

    def answer(self) -> Answer:
        until(
            lambda: (
                self.dealer.poll(0.05) is not None
                and (found := self.dealer.receive())
                and self._keep(found)
            )
        )
        return self.kept

    def _keep(self, found: list[tuple[bytes, bytes]]) -> bool:
        frame = mirroring.decode(found[-1][1])
        assert isinstance(frame, Answer)
        self.kept = frame
        return True

    def offer(self, **change: object) -> int:
        outline = self.outgoing.outline
        words = {
            name: change.pop(name, getattr(outline, name))
            for name in outline.__slots__
            if name != "seal"
        }
        seal = change.pop("seal", Outline(**words, seal=0).true_seal() or 0)
        self.transfers += 1
        fields = {
            "transfer": self.transfers,
            "job_id": "job",
            "node_rank": 0,
            "incarnation": "agent-0",
            "to": "agent-1",
            "rank": 0,
            **change,
        }
        self.say(Offer(**fields, **words, seal=seal))
        return self.transfers

    def send(self, transfer: int, hurt: int = -1, end: int | None = None) -> Answer:
        size = self.outgoing.outline.size if end is None else end
        answer = None
        for at in range(0, size, mirroring.PIECE_BYTES):
            data = bytearray(self.outgoing.piece(at, min(mirroring.PIECE_BYTES, size - at)))
            if at <= hurt < at + len(data):
                data[hurt - at] ^= 1
            self.say(Piece(transfer, at, bytes(data)))
            answer = self.answer()
        assert answer is not None
        return answer

    def mirror(self) -> None:
        transfer = self.offer()
        assert self.answer().stage == mirroring.GO
        assert self.send(transfer).stage == mirroring.KEPT

    def close(self) -> None:
        self.dealer.close()
        self.arena.close()


@pytest.fixture
def buddy() -> Iterator[Node]:
    node = Node(1)
    node.obey(commands.Pair("test", 0, 1, 0, "127.0.0.1:1", "agent-0", ((0, "agent-0"),)))
    yield node
    node.close()


@pytest.fixture
def stranger(buddy: Node) -> Iterator[Stranger]:
    speaker = Stranger(buddy)
    yield speaker
    speaker.close()


def test_one_who_keeps_to_the_rules_is_heard(buddy: Node, stranger: Stranger) -> None:
    stranger.mirror()
    assert buddy.held == {0: (10,)}
    assert buddy.mirrored(0, 10) == patterned(10)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"job_id": "another"}, "no source"),
        ({"node_rank": 2}, "no source"),
        ({"incarnation": "older"}, "no source"),
        ({"to": "another"}, "no source"),
        ({"seal": 12345}, "damaged on its way"),
        ({"index_bytes": 1 << 50}, "at most"),
    ],
)
def test_an_offer_of_somebody_else_is_refused_and_said_once(
    buddy: Node,
    stranger: Stranger,
    caplog: pytest.LogCaptureFixture,
    change: dict[str, object],
    why: str,
) -> None:
    stranger.mirror()
    for _ in range(3):
        stranger.offer(**change)
    stranger.say(b"\x93 what is this")
    stranger.mirror()  # the frames before it have been read
    assert buddy.held == {0: (10,)}
    said = [
        record.getMessage()
        for record in caplog.records
        if "refused what was to be a mirror" in record.getMessage()
    ]
    assert sum(why in line for line in said) == 1, said


def test_damage_on_the_way_costs_the_snapshot_that_was_damaged(
    buddy: Node, stranger: Stranger, caplog: pytest.LogCaptureFixture
) -> None:
    stranger.mirror()
    outline = stranger.outgoing.outline
    for place in (0, outline.data_bytes // 2, outline.data_bytes, outline.size - 1):
        transfer = stranger.offer(version=20)
        assert stranger.answer().stage == mirroring.GO
        assert stranger.send(transfer, hurt=place).stage == mirroring.DAMAGED
        assert buddy.held == {0: (10,)}
    assert "a mirror of version 20 of rank 0 was damaged on its way and is dropped" in caplog.text
    assert buddy.mirrored(0, 10) == patterned(10)


@pytest.mark.parametrize("cut", [1, 5, 9])
def test_a_source_that_vanishes_in_the_middle_costs_what_it_was_sending(
    buddy: Node, stranger: Stranger, cut: int
) -> None:
    stranger.mirror()
    transfer = stranger.offer(version=20)
    assert stranger.answer().stage == mirroring.GO
    stranger.send(transfer, end=cut * mirroring.PIECE_BYTES)
    stranger.dealer.close()
    assert buddy.held == {0: (10,)}
    assert buddy.mirrored(0, 10) == patterned(10)


@pytest.mark.parametrize(
    "piece",
    [
        lambda transfer: Piece(transfer, 64, b"x"),
        lambda transfer: Piece(transfer + 1, 0, b"x"),
        lambda transfer: Piece(transfer, 2**62, b"x"),
    ],
)
def test_a_piece_that_is_not_the_next_one_is_refused(
    buddy: Node, stranger: Stranger, caplog: pytest.LogCaptureFixture, piece
) -> None:
    transfer = stranger.offer()
    assert stranger.answer().stage == mirroring.GO
    stranger.say(piece(transfer))
    until(lambda: "refused what was to be a mirror (malformed)" in caplog.text)
    stranger.mirror()
    assert buddy.held == {0: (10,)}


def test_checksums_of_another_kind_are_refused_with_the_reason(
    buddy: Node, stranger: Stranger
) -> None:
    stranger.offer(kind=77)
    answer = stranger.answer()
    assert answer.stage == mirroring.REFUSED
    assert "libtaskd" in answer.reason


def test_between_interrupt_and_resume_nothing_that_is_held_goes_away(
    buddy: Node, stranger: Stranger
) -> None:
    stranger.mirror()
    under_way = stranger.offer(version=20)
    assert stranger.answer().stage == mirroring.GO
    (said,) = buddy.obey(commands.Interrupt("test", 1, "a fault"))
    assert isinstance(said, events.MirrorsHeld)
    assert said.held == ((0, (10,)),)
    assert stranger.send(under_way).stage == mirroring.KEPT
    (said,) = [
        event for event in buddy.mirroring.read(0.0) if isinstance(event, events.MirrorsHeld)
    ]
    assert said.held == ((0, (10, 20)),), "told as soon as it is whole"
    for rank in (0, 1):
        stranger.offer(version=30, rank=rank)
        assert stranger.answer().stage == mirroring.LATER
    assert buddy.held == {0: (10, 20)}
    buddy.obey(commands.Resume("test", 1, 20, (), 0))
    stranger.offer(version=30)
    assert stranger.answer().stage == mirroring.LATER, "rolled back from there"
    stranger.offer(version=30, generation=1)
    assert stranger.answer().stage == mirroring.GO
    assert buddy.held == {0: (20,)}


def test_more_than_the_node_has_is_refused(buddy: Node, stranger: Stranger) -> None:
    stranger.mirror()
    stranger.offer(rank=5, data_bytes=1 << 45)
    answer = stranger.answer()
    assert answer.stage == mirroring.REFUSED
    assert "MemAvailable" in answer.reason or "memory cgroup" in answer.reason
    assert buddy.held == {0: (10,)}


@pytest.mark.parametrize("secret", [None, b"another secret, also long enough"])
def test_with_a_secret_nobody_is_let_in_without_it(
    caplog: pytest.LogCaptureFixture, secret: bytes | None
) -> None:
    node = Node(1, (), SECRET)
    node.obey(commands.Pair("test", 0, 1, 0, "127.0.0.1:1", "agent-0", ((0, "agent-0"),)))
    speaker = Stranger(node, secret)
    try:
        speaker.offer()
        until(lambda: "let no mirror in: a connection was refused" in caplog.text)
        assert node.held == {}
    finally:
        speaker.close()
        node.close()


def test_a_connection_that_is_no_zeromq_costs_nothing(buddy: Node, stranger: Stranger) -> None:
    host, _, port = buddy.address.rpartition(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\n\r\n" + os.urandom(4000))
        stranger.mirror()
    assert buddy.held == {0: (10,)}


def test_after_a_wrong_piece_the_rest_of_that_snapshot_is_not_taken(
    buddy: Node, stranger: Stranger
) -> None:
    transfer = stranger.offer()
    assert stranger.answer().stage == mirroring.GO
    stranger.say(Piece(transfer, 64, b"x"))
    stranger.say(Piece(transfer, 0, b"x"))
    following = stranger.offer(version=20)
    answer = stranger.answer()
    assert (answer.transfer, answer.stage) == (following, mirroring.GO), "the next that is answered"
    assert buddy.held == {}


def test_what_is_held_is_told_once(buddy: Node, stranger: Stranger) -> None:
    under_way = stranger.offer()
    assert stranger.answer().stage == mirroring.GO
    buddy.obey(commands.Interrupt("test", 1, "a fault"))
    assert stranger.send(under_way).stage == mirroring.KEPT
    assert len(buddy.mirroring.read(0.0)) == 1
    assert buddy.mirroring.read(0.0) == []


def test_a_rank_that_is_refused_again_and_again_is_said_once(
    buddy: Node, stranger: Stranger, caplog: pytest.LogCaptureFixture
) -> None:
    for version in (10, 20, 30):
        stranger.offer(kind=77, version=version)
        assert stranger.answer().stage == mirroring.REFUSED
    assert caplog.text.count("node 1 takes no mirror of rank 0 of node 0") == 1
    assert buddy.held == {}


def test_a_peer_node_whose_address_is_none_is_said(caplog: pytest.LogCaptureFixture) -> None:
    own = Node(0, RANKS)
    try:
        own.obey(commands.Pair("test", 0, 0, 1, "127.0.0.1:no port", "agent-1", ()))
        until(lambda: "node 0: snapshots are not mirrored: " in caplog.text)
        own.snapshot(0, 10)
        assert own.may_go_on(0)
    finally:
        own.close()
