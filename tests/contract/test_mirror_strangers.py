"""What a stranger, or a source that does not keep to the rules, can do to whoever keeps mirrors."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

import pytest

from taskd.core import commands, events
from taskd.native.arena import Arena
from taskd.native.arena_copy import Outgoing, Outline
from taskd.transport import zeromq
from taskd.wire import mirroring
from taskd.wire.mirroring import Answer, Offer, Piece
from tests.contract.mirrored import SECRET, Node, until
from tests.native.arenas import patterned, put

if TYPE_CHECKING:
    from collections.abc import Iterator


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
        """What is there already need not be sent."""
        transfer = self.offer()
        answer = self.answer()
        if answer.stage == mirroring.GO:
            answer = self.send(transfer)
        assert answer.stage == mirroring.KEPT

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
