"""The arenas of one rank: made by the agent, filled by one life after the other."""

import ctypes
import errno
import gc
import os
import pathlib
import shutil
import sys
import tempfile

import pytest

from taskd.agent.spawning.processes import open_descriptors
from taskd.errors import ArenaError
from taskd.native import node_memory
from taskd.native.arena import Arena
from taskd.native.arenas import FILES, Arenas
from testbed.proc import open_files


def named(folder):
    """Files as an agent makes them that is to be outlived by them."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    return Arenas([os.open(folder / f"{number}", flags, 0o600) for number in range(FILES)])


@pytest.fixture
def folder():
    with tempfile.TemporaryDirectory(prefix="test-", dir="/dev/shm") as name:
        yield pathlib.Path(name)


@pytest.fixture(params=["memfd", "files"])
def arenas(request, folder):
    arenas = Arenas.create() if request.param == "memfd" else named(folder)
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
    # what has a name may have been mapped by others, and keeps its size
    assert 0 <= blocks(arenas.descriptors[0]) < 1 << 20
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
    gc.collect()  # what other tests have left must not be closed meanwhile
    before = open_files("taskd-arena")
    arenas = Arenas.create()
    arenas.make(1000)
    assert len(open_files("taskd-arena")) > len(before)
    arenas.close()
    arenas.close()
    assert open_files("taskd-arena") == before


def test_damaged_snapshots_are_dropped_and_said(arenas):
    arena = arenas.make(100_000)
    put(arena, 3, 100_000)
    put(arena, 4, 100_000)
    assert arenas.verify() == []
    offset = os.pread(arena.fd, os.fstat(arena.fd).st_size, 0).index(b"\4" * 100_000)
    os.pwrite(arena.fd, b"x", offset + 50_000)
    successor = another_process(arenas)
    assert successor.versions() == (3, 4), "nobody has looked yet"
    (problem,) = successor.verify()
    assert "the checksum of 't' does not fit" in problem
    assert (successor.versions(), arenas.versions()) == ((3,), (3,))
    assert successor.verify() == []
    successor.close()


def test_a_snapshot_that_was_never_completed_is_said(arenas):
    arena = arenas.make(1000)
    put(arena, 3)
    arena.begin(4, 1)
    (problem,) = another_process(arenas).verify()
    assert "begun and never completed" in problem
    assert arenas.versions() == (3,)


class TestFilesWithNames:
    """They cannot be sealed, and who reads behind their end is killed."""

    def test_no_file_that_may_hold_an_arena_is_made_smaller(self, folder):
        arenas = named(folder)
        old = arenas.make(1000)
        put(old, 1)
        life = another_process(arenas)
        old_size = os.fstat(arenas.descriptors[0]).st_size
        life.discard(life.all()[0])
        successor = another_process(arenas)
        put(successor.make(1000), 2)
        assert os.fstat(arenas.descriptors[0]).st_size == old_size
        assert blocks(arenas.descriptors[0]) == 0
        assert arenas.versions() == (2,), "it still has the old one mapped, and reads it"
        for one in (arenas, life, successor):
            one.close()

    @pytest.mark.parametrize("size", [0, 10, 4096, 6000])
    def test_one_that_was_cut_holds_nothing(self, folder, size):
        arenas = named(folder)
        put(arenas.make(1000), 1)
        arenas.close()
        os.truncate(folder / "0", size)
        again = Arenas([os.open(folder / "0", os.O_RDWR)])
        assert again.versions() == ()
        problems = again.verify()
        assert problems == [] if size == 0 else "was cut" in problems[0] or "header" in problems[0]
        again.close()

    def test_one_that_others_may_open_holds_nothing(self, folder):
        arenas = named(folder)
        put(arenas.make(1000), 1)
        arenas.close()
        (folder / "0").chmod(0o660)
        arena = Arena.attach(os.open(folder / "0", os.O_RDWR))
        assert (arena.versions(), "could be cut" in arena.problems()[0]) == ([], True)
        arena.close()

    def test_a_file_on_a_disk_holds_nothing(self, tmp_path):
        descriptor = os.open(tmp_path / "0", os.O_RDWR | os.O_CREAT, 0o600)
        os.write(descriptor, bytes(8192))
        arena = Arena.attach(descriptor)
        assert (arena.versions(), "could be cut" in arena.problems()[0]) == ([], True)
        arena.close()

    def test_the_size_of_the_mount_counts(self, folder, monkeypatch):
        arenas, before = named(folder), os.fstatvfs
        free = os.statvfs_result((4096, 4096, 1000, 200, 200, 0, 0, 0, 0, 255))
        monkeypatch.setattr(os, "fstatvfs", lambda _: free)
        with pytest.raises(ArenaError) as found:
            arenas.make(1 << 20)
        assert "the mount behind TASKD_NODE_MEMORY leaves 819200 bytes" in str(found.value)
        assert "must have room for all ranks of the node" in str(found.value)
        with pytest.raises(ArenaError, match="behind TASKD_NODE_MEMORY"):
            arenas.require(1 << 20)
        monkeypatch.setattr(os, "fstatvfs", before)
        assert [blocks(descriptor) for descriptor in arenas.descriptors] == [0, 0, 0]
        put(arenas.make(1 << 20), 1)
        arenas.close()

    def test_a_mount_that_gets_full_meanwhile(self, folder, monkeypatch):
        """Others fill it between the look and the allocation."""

        def full(*_):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        arenas = named(folder)
        monkeypatch.setattr(os, "posix_fallocate", full)
        with pytest.raises(ArenaError, match="No space left on device"):
            arenas.make(1 << 20)
        arenas.close()


class Interrupted(BaseException):
    """As the worker is interrupted: between any two lines."""


def interrupted_behind(lines, call):
    """Make the call, and raise behind this many lines in taskd.native. Whether it came to that."""
    left = lines

    def trace(frame, event, _):
        nonlocal left
        if "taskd/native" not in frame.f_code.co_filename:
            return None
        if event == "line":
            left -= 1
            if not left:
                sys.settrace(None)
                raise Interrupted
        return trace

    before = sys.gettrace()
    gc.disable()  # it may close what another test has left: its lines would count
    sys.settrace(trace)
    try:
        call()
    except Interrupted:
        return True
    finally:
        sys.settrace(before)
        gc.enable()
    return False


@pytest.mark.parametrize("kind", ["memfd", "files"])
def test_who_is_interrupted_while_making_an_arena_loses_no_file(kind, folder, monkeypatch):
    monkeypatch.setattr(node_memory, "limits", lambda *_: ())  # many lines, which change nothing
    is_interrupted, lines = True, 0
    while is_interrupted:
        lines += 1
        (folder / f"{lines}").mkdir()
        arenas = Arenas.create() if kind == "memfd" else named(folder / f"{lines}")
        before = set(open_descriptors())
        is_interrupted = interrupted_behind(lines, lambda: arenas.make(1000))  # noqa: B023
        noted = list(arenas._open.values())
        left = set(open_descriptors()) - before
        # on the line behind the one that has made a descriptor; what is left has no memory
        assert len(left) - len(noted) <= 1, lines
        for descriptor in left - {arena.fd for arena in noted}:
            os.close(descriptor)
        put(arenas.fitting(1000), 1)
        assert len(arenas.all()) == 1, lines
        used = [bool(blocks(descriptor)) for descriptor in arenas.descriptors]
        assert used == [True, False, False], lines
        arenas.close()
        shutil.rmtree(folder / f"{lines}")
    assert lines > 40
