"""A node and its peer, whose answers are lost with a connection."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from taskd.agent.mirrors.source import SILENT_S, MirrorSource
from taskd.agent.mirrors.store import MirrorStore
from taskd.core import commands
from taskd.native.arena_copy import may_go_on
from taskd.native.arenas import Arenas
from taskd.wire import mirroring
from taskd.wire.mirroring import KEPT, Answer, Offer, Piece
from tests.native.arenas import patterned, put

if TYPE_CHECKING:
    from collections.abc import Iterator


class Connection:
    """Between the two in one process. `loses`: the next answer that a snapshot is kept."""

    def __init__(self, store: MirrorStore) -> None:
        self._store = store
        self._answers: list[tuple[bytes, bytes]] = []
        self.sent: list[Offer | Piece] = []
        self.loses = False
        self.lost = 0

    def send(self, _peer: bytes | None, data: bytes) -> None:
        frame = mirroring.decode(data)
        if isinstance(frame, Answer):
            return
        self.sent.append(frame)
        answer = self._store.hear(b"node 0", frame)
        if answer is not None and answer.stage == KEPT and self.loses:
            self.loses, self.lost = False, self.lost + 1
        elif answer is not None:
            self._answers.append((b"node 1", mirroring.encode(answer)))

    def receive(self) -> list[tuple[bytes, bytes]]:
        answers, self._answers = self._answers, []
        return answers

    @property
    def pieces(self) -> int:
        return sum(isinstance(frame, Piece) for frame in self.sent)


class Pair:
    """Node 0, whose rank 0 makes snapshots, and node 1, which keeps their mirrors."""

    def __init__(self) -> None:
        self.now = 0.0
        self.store = MirrorStore("job", 1, "agent-1", lambda: None)
        self.store.serve({0: "agent-0"})
        self.connection = Connection(self.store)
        self.arenas = Arenas.create()
        self.source = MirrorSource("job", 0, "agent-0")
        self.source.follow({0: self.arenas})
        order = commands.Pair("test", 0, 0, 1, "127.0.0.1:1", "agent-1", ())
        self.source.pair(order, self.connection)  # type: ignore[arg-type]

    def snapshot(self, version: int) -> None:
        found = self.arenas.all()
        writer = (found[-1] if found else self.arenas.make(8_000_000)).begin(version, 0)
        for name, data in patterned(version).items():
            writer.add(name, "uint8", (len(data),), len(data))
            put(writer, data)
        writer.complete(b"rest")

    def talk(self, seconds: float = 1.0) -> None:
        for _ in range(round(seconds / 0.05)):
            self.source.turn(self.now)
            self.now += 0.05

    def close(self) -> None:
        self.source.close()
        self.store.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.close()


def test_a_snapshot_that_is_kept_is_not_sent_again(pair: Pair) -> None:
    """The older one stays, which is needed where another rank has no newer one."""
    for version in (10, 20):
        pair.snapshot(version)
        pair.connection.loses = version == 20
        pair.talk()
    assert pair.connection.lost == 1
    assert not may_go_on(pair.arenas.all())
    pieces = pair.connection.pieces
    pair.talk(SILENT_S + 1.0)
    assert pair.store.held() == ((0, (10, 20)),)
    assert pair.connection.pieces == pieces


def test_ranks_wait_for_mirrors_again_after_a_lost_answer(pair: Pair) -> None:
    pair.snapshot(10)
    pair.connection.loses = True
    pair.talk(SILENT_S + 1.0)
    assert pair.connection.lost == 1
    assert may_go_on(pair.arenas.all())
    pair.snapshot(20)
    assert not may_go_on(pair.arenas.all())
    pair.talk()
    assert may_go_on(pair.arenas.all())
    assert pair.store.held() == ((0, (10, 20)),)
