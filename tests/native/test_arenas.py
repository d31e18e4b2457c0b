"""The arenas of one rank: made by the agent, filled by one life after the other."""

import ctypes
import os

import pytest

from taskd.errors import ArenaError
from taskd.native import node_memory
from taskd.native.arenas import Arenas


@pytest.fixture
def arenas():
    arenas = Arenas.create()
    yield arenas
    arenas.close()


def another_process(arenas):
    """The same files behind other descriptors."""
    return Arenas([os.dup(descriptor) for descriptor in arenas.descriptors])


def put(arena, version, size=1000):
    data = ctypes.create_string_buffer(bytes([version]) * size, size)
    writer = arena.begin(version, 1)
    writer.add("t", "uint8", (size,), size)
    writer.put(ctypes.addressof(data), size)
    writer.complete()


def blocks(descriptor):
    """Bytes of memory behind a file."""
    return os.fstat(descriptor).st_blocks * 512


def test_files_take_no_memory_until_an_arena_is_made(arenas):
    assert [blocks(descriptor) for descriptor in arenas.descriptors] == [0, 0, 0]
    assert (arenas.versions(), arenas.all(), arenas.find(1)) == ((), [], None)


def test_what_one_life_writes_the_next_one_and_the_agent_find(arenas):
    life = another_process(arenas)
    arena = life.make(1000)
    put(arena, 3)
    put(arena, 4)
    life.close()
    successor = another_process(arenas)
    for reader in (arenas, successor):
        assert reader.versions() == (3, 4)
        assert bytes(reader.find(3).open(3).view("t")) == b"\3" * 1000
        assert reader.find(5) is None
    put(successor.all()[-1], 5)
    assert arenas.versions() == (4, 5)
    successor.forget_after(4)
    assert arenas.versions() == (4,)
    successor.forget_after(-1)
    assert arenas.versions() == ()
    successor.close()


def test_a_state_that_grows_takes_the_next_file_and_gives_the_old_memory_back(arenas):
    life = another_process(arenas)
    old = life.make(1000)
    put(old, 1)
    new = life.make(2_000_000)
    assert [blocks(descriptor) > 0 for descriptor in arenas.descriptors] == [True, True, False]
    assert arenas.versions() == (1,)
    put(new, 2, 2_000_000)
    assert arenas.versions() == (1, 2)
    life.discard(old)
    assert [blocks(descriptor) > 0 for descriptor in arenas.descriptors] == [False, True, False]
    assert (arenas.versions(), life.versions()) == ((2,), (2,))
    life.make(3_000_000)
    with pytest.raises(ArenaError, match="outgrown its memory for snapshots"):
        life.make(4_000_000)
    life.close()


def test_a_file_that_was_being_made_is_made_again(arenas):
    os.posix_fallocate(arenas.descriptors[0], 0, 1 << 20)  # a life that was killed there
    life = another_process(arenas)
    assert (life.versions(), arenas.versions()) == ((), ())
    life = another_process(arenas)
    put(life.make(1000), 7)
    assert life.all()[0].problems() == []
    assert (life.versions(), another_process(arenas).versions()) == ((7,), (7,))


def test_an_arena_without_a_header_gives_its_memory_back(arenas):
    node_memory.fill(arenas.descriptors[0], 1 << 20)  # a life that was killed between the two
    life = another_process(arenas)
    put(life.make(1000), 7)
    assert blocks(arenas.descriptors[0]) == 0
    assert (life.versions(), arenas.versions()) == ((7,), (7,))
    life.close()


def test_no_memory_leaves_the_file_empty(arenas, monkeypatch):
    monkeypatch.setattr(node_memory, "limits", lambda *_: [node_memory.Limit("the test", 0)])
    with pytest.raises(ArenaError, match="the test leaves"):
        arenas.make(1 << 20)
    monkeypatch.undo()
    put(arenas.make(1000), 1)
    assert arenas.versions() == (1,)


def test_closing_twice_is_once_and_frees_every_descriptor():
    before = len(os.listdir("/proc/self/fd"))
    arenas = Arenas.create()
    arenas.make(1000)
    arenas.close()
    arenas.close()
    assert len(os.listdir("/proc/self/fd")) == before
