"""The arena: two snapshots in node memory, and whatever else may be in that memory.

Real files, several processes.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import random
import struct
import subprocess
import sys
import textwrap

import pytest
from hypothesis import given
from hypothesis import strategies as st

from taskd.errors import ArenaError
from taskd.native import _ctypes_binding, arena_index, copying, library
from taskd.native.arena import PIECE_BYTES, Arena, capacity_for
from taskd.native.arena_index import Entry
from tests.native.arenas import put
from tests.native.programs import ROOT, environment

needs_library = pytest.mark.skipif(library.load() is None, reason="libtaskd is not built here")
SHARD_BYTES = 64 << 10


def content(version: int, sizes=(40_000, 8, 0, 12_345)) -> dict[str, bytes]:
    """What a snapshot of this version holds."""
    return {
        f"layer.{i}.weight": random.Random(f"{version} {i}").randbytes(size)
        for i, size in enumerate(sizes)
    }


def write(arena: Arena, version: int, tensors=None, generation=0, rest=b"rest"):
    writer = arena.begin(version, generation)
    for name, data in (content(version) if tensors is None else tensors).items():
        writer.add(name, "uint8", (len(data),), len(data))
        put(writer, data)
    return writer.complete(rest)


def read(arena: Arena, version: int) -> dict[str, bytes]:
    snapshot = arena.open(version)
    return {name: bytes(snapshot.view(name)) for name in snapshot.entries}


def numbers(arena: Arena) -> list[int]:
    return [held.version for held in arena.versions()]


def attach_bytes(data: bytes, *, sealed=True) -> Arena:
    """An arena whose memory is exactly this."""
    fd = os.memfd_create("damaged", os.MFD_ALLOW_SEALING)
    os.write(fd, data)
    if sealed:
        fcntl.fcntl(
            fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        )
    return Arena.attach(fd)


def bytes_of(arena: Arena) -> bytearray:
    return bytearray(os.pread(arena.fd, os.fstat(arena.fd).st_size, 0))


@pytest.fixture
def arena():
    with contextlib.closing(Arena.create(SHARD_BYTES)) as made:
        yield made


@pytest.fixture
def filled(arena):
    write(arena, 10)
    write(arena, 20)
    return arena


# ---------------------------------------------------------------- writing and reading


def test_a_new_arena_is_empty_and_has_nothing_to_complain_about(arena):
    assert arena.versions() == arena.problems() == []
    with pytest.raises(ArenaError, match="no snapshot of version 3"):
        arena.open(3)


def test_what_was_written_is_read_by_whoever_attaches_newest_first(filled):
    with contextlib.closing(Arena.attach(os.dup(filled.fd))) as other:
        assert numbers(other) == [20, 10]
        for version in (10, 20):
            assert read(other, version) == content(version)
            assert other.open(version).rest == b"rest"
        assert other.problems() == []


def test_the_older_of_two_is_overwritten_and_stays_gone_while_that_goes_on(filled):
    writer = filled.begin(30, 1)
    assert numbers(filled) == [20]
    assert "never completed" in filled.problems()[0]
    writer.add("late", "uint8", (3,), 3)
    put(writer, b"abc")
    held = writer.complete()
    assert (held.version, held.generation) == (30, 1)
    assert numbers(filled) == [30, 20]
    assert read(filled, 30) == {"late": b"abc"}
    assert filled.problems() == []


def test_after_a_roll_back_the_version_that_was_rolled_back_to_is_not_the_next_to_be_overwritten(
    filled,
):
    filled.forget_after(10)
    assert numbers(filled) == [10]
    filled.begin(11, 1)
    assert numbers(filled) == [10]


def test_a_version_that_is_made_again_is_read_in_its_newest_form(filled):
    write(filled, 20, {"again": b"x"}, generation=2)
    assert read(filled, 20) == {"again": b"x"}
    assert [(held.version, held.generation) for held in filled.versions()] == [(20, 2), (20, 0)]


def test_views_are_the_memory_itself_and_cannot_be_written(filled):
    view = filled.open(20).view("layer.0.weight")
    assert view.readonly
    before = view[0]
    data = bytes_of(filled)
    offset = data.rindex(bytes(view[:100]))
    os.pwrite(filled.fd, bytes([before ^ 1]), offset)
    assert view[0] == before ^ 1


def test_views_outlive_the_arena_that_gave_them(filled):
    view = filled.open(20).view("layer.0.weight")
    filled.close()
    assert bytes(view) == content(20)["layer.0.weight"]
    with pytest.raises(ArenaError, match="closed"):
        filled.begin(30, 0)


def test_a_reader_is_told_that_the_writer_has_begun_to_overwrite_what_it_reads(filled):
    snapshot = filled.open(10)
    assert snapshot.is_intact()
    writer = filled.begin(30, 0)
    assert not snapshot.is_intact()
    writer.add("x", "uint8", (40_000,), 40_000)
    put(writer, bytes(40_000))
    target = ctypes.create_string_buffer(40_000)
    with pytest.raises(ArenaError, match=r"layer\.0\.weight.*overwritten"):
        snapshot.copy_out("layer.0.weight", ctypes.addressof(target))


def test_a_tensor_may_be_put_in_pieces_and_its_checksum_does_not_depend_on_them():
    data = random.Random(1).randbytes(2 * PIECE_BYTES + 5)
    address = ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value
    with contextlib.closing(Arena.create(len(data))) as arena:
        for version, pieces in ((1, (len(data),)), (2, (PIECE_BYTES, PIECE_BYTES, 5))):
            writer, start = arena.begin(version, 0), 0
            writer.add("x", "uint8", (len(data),), len(data))
            for piece in pieces:
                writer.put(address + start, piece)
                start += piece
            writer.complete()
        first, second = (arena.open(version).entries["x"] for version in (1, 2))
        assert first.checksum == second.checksum
        assert arena.open(2).view("x") == data


def test_a_snapshot_that_is_too_large_or_not_whole_is_not_published(filled):
    writer = filled.begin(30, 0)
    with pytest.raises(ArenaError, match=r"'big' ends at .* a buffer has"):
        writer.add("big", "uint8", (10**7,), 10**7)
    with pytest.raises(ArenaError, match="of index, a buffer has"):
        writer.complete(bytes(filled.capacity))
    writer = filled.begin(30, 0)
    writer.add("x", "uint8", (5,), 5)
    with pytest.raises(ArenaError, match="'x' of 5 bytes was given 6"):
        put(writer, bytes(6))
    with pytest.raises(ArenaError, match="'x' is not complete: 0 of 5"):
        writer.complete()
    assert numbers(filled) == [20]
    with pytest.raises(ArenaError, match="version -1"):
        filled.begin(-1, 0)


def test_two_buffers_are_twice_the_shard_and_one_percent_and_all_their_pages_are_there():
    shard = 40 << 20
    with contextlib.closing(Arena.create(shard)) as arena:
        status = os.fstat(arena.fd)
        assert status.st_blocks * 512 == status.st_size
        assert 2 * shard < status.st_size <= 2 * shard * 1.01
        with pytest.raises(OSError, match="not permitted"):
            os.ftruncate(arena.fd, 0)


@pytest.mark.parametrize("count", [0, 1, 1000])
def test_the_room_that_is_asked_for_is_enough_for_any_number_of_tensors(count):
    tensors = {f"module.{i}.weight": b"1234567" for i in range(count)}
    needed = arena_index.room_for_rest(b"rest") + sum(
        arena_index.room_for(name, (7,), 7) for name in tensors
    )
    with contextlib.closing(Arena.create(needed)) as arena:
        held = write(arena, 1, tensors)
        assert read(arena, 1) == tensors
        data = bytes_of(arena)
        assert held.data_bytes <= needed <= capacity_for(needed)
        assert data


# ---------------------------------------------------------------- damage


def test_any_flipped_bit_costs_at_most_what_it_is_in_and_never_shows_in_a_tensor(filled):
    whole = bytes_of(filled)
    chance = random.Random(20240611)
    header, capacity = range(40), filled.capacity
    slots = {0: range(512, 576), 1: range(1024, 1088)}
    used = {
        held.slot: (
            held.version,
            range(4096 + held.slot * capacity, 4096 + held.slot * capacity + held.data_bytes + 400),
        )
        for held in filled.versions()
    }
    offsets = [chance.randrange(len(whole)) for _ in range(300)]
    for area in (header, *slots.values()):
        offsets += [chance.choice(area) for _ in range(60)]
    for _, area in used.values():
        offsets += [chance.choice(area) for _ in range(60)]
    seen = {"header": 0, "slot": 0, "data": 0}
    for offset in offsets:
        data = bytearray(whole)
        data[offset] ^= 1 << chance.randrange(8)
        with contextlib.closing(attach_bytes(data)) as damaged:
            readable = {}
            for held in damaged.versions():
                with contextlib.suppress(ArenaError):
                    readable[held.version] = read(damaged, held.version)
            assert all(readable[version] == content(version) for version in readable)
            if offset in header:
                seen["header"] += 1
                assert not readable
                assert len(damaged.problems()) == 1
                continue
            hit = [used[slot][0] for slot in slots if offset in slots[slot]]
            seen["slot"] += len(hit)
            assert set(readable) >= {10, 20} - set(hit) - {
                version for version, area in used.values() if offset in area
            }
            assert not set(readable) & set(hit)
            if len(readable) < 2:
                assert damaged.problems()
                seen["data"] += not hit
    assert min(seen.values()) > 50, seen


def test_a_tensor_that_was_overwritten_is_named_and_its_snapshot_is_gone(filled):
    data = bytes_of(filled)
    offset = data.index(content(20)["layer.3.weight"])
    data[offset + 77] ^= 4
    with contextlib.closing(attach_bytes(data)) as damaged:
        assert numbers(damaged) == [20, 10]
        with pytest.raises(ArenaError, match=r"layer\.3\.weight"):
            damaged.open(20)
        assert numbers(damaged) == [10]
        assert "layer.3.weight" in damaged.problems()[0]
        write(damaged, 30)
        assert numbers(damaged) == [30, 10]


@pytest.mark.parametrize(("change", "text"), [
    (lambda data: data[: len(data) // 2], "it was cut"),
    (lambda data: data[:20], "which is no header"),
    (lambda data: b"", "which is no header"),
    (lambda data: data + bytes(4096), "it was cut"),
    (lambda data: bytes(len(data)), "does not begin like one"),
    (lambda data: data[:8] + struct.pack("=Q", 2) + data[16:], "layout version 2, 1 is understood"),
    (lambda data: data[:24] + struct.pack("=Q", 9) + data[32:], "of kind 9"),
    (lambda data: data[:16] + struct.pack("=Q", 1 << 63) + data[24:], "header is damaged"),
])  # fmt: skip
def test_a_file_that_is_no_arena_of_ours_holds_nothing_and_says_why(filled, change, text):
    with contextlib.closing(attach_bytes(change(bytes_of(filled)))) as other:
        assert other.versions() == []
        assert text in other.problems()[0]
        with pytest.raises(ArenaError, match="no snapshot of version 20"):
            other.open(20)
        with pytest.raises(ArenaError, match="is no arena"):
            other.begin(30, 0)


def test_a_file_that_could_be_cut_under_its_reader_is_refused(filled):
    with contextlib.closing(attach_bytes(bytes_of(filled), sealed=False)) as other:
        assert other.versions() == []
        assert "could be cut" in other.problems()[0]


@pytest.mark.parametrize("make", [
    lambda: os.pipe()[0], lambda: os.open(os.devnull, os.O_RDWR), lambda: os.open("/", os.O_RDONLY),
    lambda: os.open(__file__, os.O_RDONLY),
])  # fmt: skip
def test_a_descriptor_of_something_else_holds_nothing(make):
    with contextlib.closing(Arena.attach(make())) as other:
        assert other.versions() == []
        assert "is no arena" in other.problems()[0]


def test_a_number_that_is_no_descriptor_is_not_closed_later():
    fd = os.open(os.devnull, os.O_RDONLY)
    os.close(fd)
    other = Arena.attach(fd)
    assert "Bad file descriptor" in other.problems()[0]
    assert os.open(os.devnull, os.O_RDONLY) == fd
    other.close()
    os.close(fd)  # is still open


def test_an_index_that_points_outside_is_refused_even_when_its_checksum_fits():
    for entry in (
        Entry("x", "uint8", (64,), 1 << 40, 64, 0),
        Entry("x", "uint8", (64,), 1, 64, 0),
        Entry("x", "uint8", (3,), 0, 64, 0),
    ):
        with pytest.raises(ValueError, match="does not fit its buffer: 'x'"):
            arena_index.decode(arena_index.encode([entry], b""), 128)
    good = Entry("x", "uint8", (64,), 64, 64, 5)
    assert arena_index.decode(arena_index.encode([good], b"r"), 128) == ([good], b"r")
    with pytest.raises(ValueError, match="a name twice"):
        arena_index.decode(arena_index.encode([good, good], b""), 128)


@given(
    st.binary(max_size=200)
    | st.recursive(
        st.none() | st.integers(-(2**63), 2**64 - 1) | st.text() | st.binary(), st.lists
    ).map(arena_index.msgpack.packb)
)
def test_no_bytes_make_the_index_raise_anything_else(data):
    with contextlib.suppress(ValueError):
        arena_index.decode(data, 1 << 20)


# ---------------------------------------------------------------- checksums


@needs_library
def test_both_bindings_copy_and_agree():
    binding, data = library.load(), random.Random(3).randbytes(1001)
    source = ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value
    for module in (binding, _ctypes_binding):
        target = ctypes.create_string_buffer(1001)
        assert (
            module.copy_checksummed(ctypes.addressof(target), source, 1001)
            == binding.checksum(source, 1001)
            == _ctypes_binding.checksum(source, 1001)
        )
        assert target.raw == data


@needs_library
def test_without_the_library_an_arena_works_and_one_that_was_made_with_it_says_what_is_missing(
    filled,
):
    code = """
        import sys
        from taskd.native.arena import Arena
        from tests.native import test_arena
        with_library = Arena.attach(int(sys.argv[1]))
        print(with_library.versions(), with_library.problems()[0])
        size = test_arena.SHARD_BYTES
        arena = Arena.attach(int(sys.argv[2])) if len(sys.argv) > 2 else Arena.create(size)
        test_arena.write(arena, 10)
        print(test_arena.read(arena, 10) == test_arena.content(10), arena.problems())
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(filled.fd)],
        pass_fds=[filled.fd],
        capture_output=True,
        text=True,
        env=environment() | {"TASKD_NATIVE": "off"},
        timeout=60,
        cwd=ROOT,
        check=True,
    )
    first, second = done.stdout.splitlines()
    assert first.startswith("[] ")
    assert "TASKD_NATIVE" in first
    assert second == "True []"
    assert copying.copier_of_kind(copying.CRC32) is not None
