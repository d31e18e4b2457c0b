"""Snapshots from one arena into another: whole or not at all."""

from __future__ import annotations

import dataclasses
import random

import pytest

from taskd.errors import ArenaError
from taskd.native.arena import Arena
from taskd.native.arena_copy import AWAITED, Incoming, Outgoing, may_go_on
from tests.native.arenas import SHARD_BYTES, patterned, put

PIECE = 100_000


def snapshot(arena: Arena, version: int, generation: int = 0) -> None:
    writer = arena.begin(version, generation)
    for name, data in patterned(version).items():
        writer.add(name, "uint8", (len(data),), len(data))
        put(writer, data)
    writer.complete(b"rest of %d" % version)


def send(outgoing: Outgoing, incoming: Incoming, end: int | None = None, hurt: int = -1) -> None:
    """Up to `end`; the byte at `hurt` is another one."""
    end = outgoing.outline.size if end is None else end
    for at in range(0, end, PIECE):
        data = bytearray(outgoing.piece(at, min(PIECE, end - at)))
        if at <= hurt < at + len(data):
            data[hurt - at] ^= 4
        incoming.put(bytes(data))


@pytest.fixture
def own():
    arena = Arena.create(SHARD_BYTES)
    snapshot(arena, 10)
    yield arena
    arena.close()


@pytest.fixture
def mirror():
    arena = Arena.create(SHARD_BYTES)
    yield arena
    arena.close()


def versions(arena: Arena) -> list[int]:
    return [held.version for held in arena.versions()]


def test_a_mirror_has_every_byte_and_whatever_else_belongs_to_it(own: Arena, mirror: Arena) -> None:
    for version in (10, 20, 30):
        if version > 10:
            snapshot(own, version, generation=2)
        outgoing = Outgoing(own)
        incoming = Incoming(mirror, outgoing.outline)
        send(outgoing, incoming)
        held = incoming.complete()
        assert (held.version, held.generation) == (version, 0 if version == 10 else 2)
        found = mirror.open(version)
        assert found.rest == b"rest of %d" % version
        assert {name: bytes(found.view(name)) for name in found.entries} == patterned(version)
    assert versions(mirror) == [30, 20]


def test_one_that_does_not_arrive_costs_the_older_and_not_the_newer(
    own: Arena, mirror: Arena
) -> None:
    for version in (10, 20):
        snapshot(own, version)
        outgoing = Outgoing(own)
        incoming = Incoming(mirror, outgoing.outline)
        send(outgoing, incoming)
        incoming.complete()
    snapshot(own, 30)
    outgoing = Outgoing(own)
    incoming = Incoming(mirror, outgoing.outline)
    send(outgoing, incoming, end=outgoing.outline.size - 1)
    assert versions(mirror) == [20]
    with pytest.raises(ArenaError, match="bytes have come"):
        incoming.complete()
    assert versions(mirror) == [20]
    assert mirror.open(20).rest == b"rest of 20"


def test_any_byte_that_changed_on_the_way_shows(own: Arena, mirror: Arena) -> None:
    outgoing = Outgoing(own)
    outline = outgoing.outline
    lengths = [(entry.offset, entry.length) for entry in own.open(10).entries.values()]
    chance = random.Random(7)
    places = [
        outline.data_bytes,
        outline.size - 1,
        *(chance.randrange(outline.data_bytes, outline.size) for _ in range(10)),
        *(offset + chance.randrange(length) for offset, length in lengths for _ in range(3)),
    ]
    for place in places:
        incoming = Incoming(mirror, outline)
        send(outgoing, incoming, hurt=place)
        with pytest.raises(ArenaError, match="checksum"):
            incoming.complete()
        assert versions(mirror) == []


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"index_sum": 1}, "checksum of its index"),
        (
            {"data_bytes": 64},
            (
                r"bytes have come|checksum "
                r"of its index"
            ),
        ),
        ({"kind": 77}, "another kind"),
        ({"data_bytes": 1 << 40}, "does not fit"),
    ],
)
def test_a_wrong_outline_is_refused(
    own: Arena, mirror: Arena, change: dict[str, int], why: str
) -> None:
    outgoing = Outgoing(own)
    outline = dataclasses.replace(outgoing.outline, **change)
    with pytest.raises(ArenaError, match=why):  # which of the three refuses it is its own business
        incoming = Incoming(mirror, outline)
        send(outgoing, incoming)
        incoming.complete()
    assert versions(mirror) == []


def test_too_many_bytes_are_refused(own: Arena, mirror: Arena) -> None:
    outgoing = Outgoing(own)
    incoming = Incoming(mirror, outgoing.outline)
    send(outgoing, incoming)
    with pytest.raises(ArenaError, match="have come of a snapshot of"):
        incoming.put(b"x")


def test_the_sender_sees_that_its_snapshot_was_overwritten(own: Arena) -> None:
    outgoing = Outgoing(own)
    snapshot(own, 20)
    assert outgoing.is_intact(), "the other buffer was taken"
    own.begin(30, 0)
    assert not outgoing.is_intact()
    newest = Outgoing(own)
    own.forget_after(15)
    assert not newest.is_intact(), "rolled back"


def test_of_an_empty_arena_nothing_goes_out(mirror: Arena) -> None:
    with pytest.raises(ArenaError, match="no whole snapshot"):
        Outgoing(mirror)


def test_a_rank_waits_for_its_mirror_if_there_is_to_be_one(own: Arena) -> None:
    assert may_go_on([own]), "no mirror"
    own.mirror_mark = AWAITED
    assert not may_go_on([own])
    own.mirror_mark = Outgoing(own).outline.seal
    assert may_go_on([own])
    snapshot(own, 20)
    assert not may_go_on([own]), "this one has none yet"
    own.forget_after(10)
    assert may_go_on([own]), "rolled back to one that has"


def test_a_state_that_has_outgrown_its_arena_waits_as_well(own: Arena, mirror: Arena) -> None:
    """The new arena says nothing of mirrors yet."""
    own.mirror_mark = Outgoing(own).outline.seal
    assert may_go_on([own, mirror])
    snapshot(mirror, 20)
    assert not may_go_on([own, mirror])
    mirror.mirror_mark = Outgoing(mirror).outline.seal
    assert may_go_on([own, mirror])


def test_two_snapshots_of_one_version_have_different_seals(own: Arena) -> None:
    first = own.newest_seal()
    own.forget_after(5)
    assert own.newest_seal() == 0
    snapshot(own, 10, generation=1)
    assert own.newest_seal() not in (0, first)
