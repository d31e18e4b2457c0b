"""Flat states: in node memory, on the disk, from the one to the other, without any framework."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import re
import struct
import subprocess
import sys
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest

from taskd.checkpoint import flat, flat_memory, folder, manifest
from taskd.checkpoint.draft import Draft
from taskd.checkpoint.flat import Flat, Layout
from taskd.checkpoint.flat_memory import Origin
from taskd.checkpoint.names import Kind
from taskd.errors import ArenaError, CheckpointError, CorruptCheckpointError
from taskd.mindspore import restoring
from taskd.native.arena_repeated import Repeated
from taskd.native.arenas import Arenas
from taskd.testing.clock import FakeClock
from tests import disks

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Iterator

LAYOUT = (Layout("a", "F64", (2, 2), 0, 32), Layout("b", "I8", (8,), 32, 40))


def content(step: int, rank: int) -> bytes:
    return struct.pack("=4d8b", step, rank, 0, 0, *range(8))


def origin(directory: pathlib.Path, ranks: int = 2, attempt: str = "attempt") -> Origin:
    return Origin(str(directory), "job", attempt, ranks, 0, "mindspore 2.10.0")


class Rank:
    """Its node memory, with a snapshot of each of these steps."""

    def __init__(self, rank: int, where: Origin, *steps: int) -> None:
        self.rank, self.arenas = rank, Arenas.create()
        rest = flat_memory.describe(where, {"batches": "7"}, flat_memory.encode_layout(LAYOUT))
        arena = self.arenas.make(4096)
        assert arena.memory is not None
        self.writer = Repeated(arena.memory, flat_memory.STATE, 40, rest, None)
        for step in steps:
            self.take(step)

    def restart(self, where: Origin) -> None:
        """Go on in this memory as a process that follows."""
        arena = self.arenas.all()[-1]
        assert arena.memory is not None
        rest = flat_memory.describe(where, {"batches": "7"}, flat_memory.encode_layout(LAYOUT))
        last = next(iter(arena.versions()), None)
        self.writer = Repeated(arena.memory, flat_memory.STATE, 40, rest, last)

    def take(self, step: int) -> None:
        def fill(room: memoryview) -> None:
            room[:] = content(step, self.rank)

        self.writer.write(step, 0, fill)


@pytest.fixture
def made() -> Iterator[list[Rank]]:
    found: list[Rank] = []
    yield found
    for rank in found:
        rank.arenas.close()


def held(*ranks: Rank) -> dict[int, Arenas]:
    return {one.rank: one.arenas for one in ranks}


def test_a_snapshot_is_what_was_written_and_two_are_kept(tmp_path, made: list[Rank]) -> None:
    made.append(Rank(1, origin(tmp_path), 3, 4, 5))
    assert made[0].arenas.versions() == (4, 5)
    where, state = flat_memory.open_snapshot(made[0].arenas, 4)
    assert where == origin(tmp_path)
    assert (state.layout, state.notes) == (LAYOUT, {"batches": "7"})
    assert bytes(state.data) == content(4, 1)
    with pytest.raises(ArenaError, match="no snapshot of step 3"):
        flat_memory.open_snapshot(made[0].arenas, 3)


def test_a_writer_that_follows_overwrites_the_older_one(tmp_path, made: list[Rank]) -> None:
    one = Rank(0, origin(tmp_path), 3, 4)
    made.append(one)
    arena = one.arenas.all()[0]
    assert arena.memory is not None
    rest = flat_memory.describe(origin(tmp_path), {}, flat_memory.encode_layout(LAYOUT))
    one.writer = Repeated(arena.memory, flat_memory.STATE, 40, rest, arena.versions()[0])
    one.take(5)
    assert one.arenas.versions() == (4, 5)


def test_a_death_in_the_middle_of_a_copy_costs_that_snapshot_alone(
    tmp_path, made: list[Rank]
) -> None:
    made.append(Rank(0, origin(tmp_path), 3, 4))

    def dies(room: memoryview) -> None:
        room[:8] = bytes(8)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        made[0].writer.write(5, 0, dies)
    assert made[0].arenas.versions() == (4,)


def test_two_ranks_with_different_steps_save_the_one_that_both_have(
    tmp_path, made: list[Rank]
) -> None:
    where = origin(tmp_path)
    made += [Rank(0, where, 3, 4), Rank(1, where, 4, 5)]
    saved = flat_memory.save(held(*made), "SIGTERM", FakeClock(), 1.0)
    assert saved is not None
    (found,) = folder.scan(tmp_path, "job", is_full=True).valid
    assert (saved.step, saved.path) == (4, found.path)
    assert found.manifest.torch == "mindspore 2.10.0"
    assert found.manifest.kind is Kind.DUMP
    for rank in (0, 1):
        state = flat.read(found, rank)
        assert (state.layout, bytes(state.data)) == (LAYOUT, content(4, rank))
        assert state.notes == {"batches": "7", "step": "4", "job": "job"}
    again = flat_memory.save(held(*made), "SIGTERM", FakeClock(), 1.0)
    assert again is not None
    assert (again.step, again.path) == (4, found.path)
    assert len(folder.scan(tmp_path, "job").valid) == 1


def test_ranks_without_a_common_step_save_nothing(tmp_path, made: list[Rank]) -> None:
    where = origin(tmp_path)
    made += [Rank(0, where, 3, 4), Rank(1, where, 8, 9)]
    assert flat_memory.save(held(*made), "SIGTERM", FakeClock(), 1.0) is None
    assert not list(tmp_path.iterdir())


def publish(
    directory: pathlib.Path, version: int, ranks: int, kind: Kind = Kind.PERIODIC,
    keep: int | None = None,
) -> pathlib.Path:  # fmt: skip
    draft = Draft(directory, "job", kind, version, f"{ranks}", tuple(range(ranks)), 0, ranks)
    for rank in draft.writers:
        flat.write(draft, rank, Flat(LAYOUT, {}, memoryview(content(version, rank))))
    return flat.publish(draft, "mindspore 2.10.0", keep)


def damage(checkpoint: pathlib.Path) -> None:
    path = checkpoint / flat.file_name(0)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("version", [4, 30_000])
def test_a_checkpoint_of_another_number_of_ranks_is_not_taken_for_this_job_s(
    tmp_path, made: list[Rank], version: int
) -> None:
    publish(tmp_path, version, ranks=4)
    where = origin(tmp_path)
    made += [Rank(0, where, 4), Rank(1, where, 4)]
    saved = flat_memory.save(held(*made), "SIGTERM", FakeClock(), 1.0)
    assert saved is not None
    assert saved.path is not None
    found = folder.check(saved.path, "job", is_full=True).manifest
    assert (saved.step, found.version, found.world_size) == (4, 4, 2)


@pytest.mark.parametrize(
    ("version", "name"), [(4, "dump-000000000004-2"), (9, "dump-000000000004")]
)
def test_a_damaged_checkpoint_does_not_stand_for_the_state(
    tmp_path, made: list[Rank], version: int, name: str
) -> None:
    damage(publish(tmp_path, version, ranks=2, kind=Kind.DUMP))
    where = origin(tmp_path)
    made += [Rank(0, where, 4), Rank(1, where, 4)]
    saved = flat_memory.save(held(*made), "SIGTERM", FakeClock(), 1.0)
    assert saved == flat_memory.Saved(4, tmp_path / name)
    assert not folder.problems(tmp_path / name, is_full=True)


def test_a_checkpoint_of_a_later_step_does_not_stand_for_the_state(
    tmp_path, made: list[Rank]
) -> None:
    publish(tmp_path, 9, ranks=2)
    where = origin(tmp_path)
    made += [Rank(0, where, 4), Rank(1, where, 4)]
    saved = flat_memory.save(held(*made), "SIGTERM", FakeClock(), 1.0)
    assert saved == flat_memory.Saved(4, tmp_path / "dump-000000000004")


def test_a_process_that_is_not_alone_writes_its_part_in_any_case(
    tmp_path, made: list[Rank]
) -> None:
    where = origin(tmp_path)
    made += [Rank(0, where, 4, 5), Rank(1, where, 3, 4)]
    publish(tmp_path, 4, ranks=2)
    flat_memory.save(held(made[1]), "SIGTERM", FakeClock(), 1.0)
    saved = flat_memory.save(held(made[0]), "SIGTERM", FakeClock(), 1.0)  # it has step 5 as well
    assert saved == flat_memory.Saved(4, tmp_path / "dump-000000000004")


def test_checkpoints_of_another_number_of_ranks_do_not_count_among_those_that_are_kept(
    tmp_path,
) -> None:
    others = [publish(tmp_path, version, ranks=4) for version in (10_000, 20_000, 30_000)]
    older = publish(tmp_path, 5, ranks=4)
    own = [publish(tmp_path, version, ranks=2, keep=2) for version in (10, 20, 30)]
    assert {one.path for one in folder.scan(tmp_path, "job").valid} == {*others, older, *own[1:]}


def test_checkpoints_of_torch_and_flat_ones_do_not_count_for_each_other(tmp_path) -> None:
    flat_ones = [publish(tmp_path, version, ranks=2) for version in (1, 2, 3)]
    assert not folder.retain(tmp_path, "job", 1, up_to=9)
    assert folder.retain(tmp_path, "job", 2, up_to=9, flat_ranks=2) == flat_ones[:1]


def test_one_that_is_damaged_and_newer_does_not_take_the_place_of_a_new_one(tmp_path) -> None:
    damaged = publish(tmp_path, 30, ranks=2)
    damage(damaged)
    own = [publish(tmp_path, version, ranks=2, keep=1) for version in (10, 20)]
    assert {one.path for one in folder.scan(tmp_path, "job").valid} == {damaged, own[1]}
    again = publish(tmp_path, 30, ranks=2, keep=1)
    assert {one.path for one in folder.scan(tmp_path, "job").valid} == {again}


def test_processes_that_hold_a_rank_each_meet_at_the_newest_complete_step(
    tmp_path, made: list[Rank]
) -> None:
    where = origin(tmp_path)
    made += [Rank(0, where, 3, 4), Rank(1, where, 4, 5)]
    other = flat_memory.save(held(made[1]), "SIGTERM", FakeClock(), 1.0)
    assert other is not None
    assert other.path is None
    saved = flat_memory.save(held(made[0]), "SIGTERM", FakeClock(), 1.0)
    assert saved is not None
    assert saved.step == 4
    (found,) = folder.scan(tmp_path, "job", is_full=True).valid
    assert found.manifest.version == 4


@pytest.mark.parametrize(
    ("method", "step", "is_before"),
    [("hand_over", 5, False), ("join", 4, True), ("join", 4, False), ("hand_over", 4, True)],
)
def test_an_older_step_that_is_removed_because_the_newest_is_whole_is_no_failure(
    tmp_path, made: list[Rank], monkeypatch: pytest.MonkeyPatch, method: str, step: int,
    *, is_before: bool,
) -> None:  # fmt: skip
    """The publisher has waited for nothing but this rank's part of the newest one."""
    where = origin(tmp_path)
    made += [Rank(0, where, 4, 5), Rank(1, where, 4, 5)]
    original, published = getattr(Draft, method), []

    def publish_meanwhile(draft: Draft, rank: int, *others: bytes) -> None:
        is_it = (rank, draft.version) == (1, step) and not published
        if not (is_it and is_before):
            original(draft, rank, *others)
        if is_it:
            published.append(flat_memory.save(held(made[0]), "SIGTERM", FakeClock(), 0.0))
        if is_it and is_before:
            original(draft, rank, *others)

    monkeypatch.setattr(Draft, method, publish_meanwhile)
    saved = flat_memory.save(held(made[1]), "SIGTERM", FakeClock(), 1.0)
    assert saved == flat_memory.Saved(5, None)
    assert published == [flat_memory.Saved(5, tmp_path / "dump-000000000005")]
    assert not folder.problems(tmp_path / "dump-000000000005", is_full=True)
    assert [path.name for path in tmp_path.iterdir()] == ["dump-000000000005"]


def test_an_older_step_for_which_there_is_no_room_is_a_failure(
    tmp_path, made: list[Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody has published the newest one: it may never be whole."""
    made.append(Rank(1, origin(tmp_path), 4, 5))
    original = Draft.join

    def has_no_room(draft: Draft, rank: int) -> None:
        original(draft, rank)
        if draft.version == 4:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Draft, "join", has_no_room)
    with pytest.raises(CheckpointError, match="could not be written: No space left on device"):
        flat_memory.save(held(made[0]), "SIGTERM", FakeClock(), 1.0)


@pytest.mark.parametrize("further", [0, 1])
def test_processes_meet_at_a_step_of_before_a_restart(
    tmp_path, made: list[Rank], further: int
) -> None:
    """One has committed a step since, which the other one is still in."""
    made += [Rank(rank, origin(tmp_path), 3, 4) for rank in (0, 1)]
    made[further].restart(origin(tmp_path, attempt="restarted"))
    made[further].take(5)
    flat_memory.save(held(made[1]), "SIGTERM", FakeClock(), 1.0)
    saved = flat_memory.save(held(made[0]), "SIGTERM", FakeClock(), 0.0)
    assert saved == flat_memory.Saved(4, tmp_path / "dump-000000000004")
    assert not folder.problems(tmp_path / "dump-000000000004", is_full=True)


class Two:
    """How rank 0 agrees with rank 1, which has these steps, in memory and on the disk."""

    rank, world_size = 0, 2

    def __init__(self, memory: list[int], disk: list[int]) -> None:
        self.memory, self.disk = memory, disk

    def gather(self, own: list[int]) -> list[list[int]]:
        if len(own) == 1:
            return [own, [1]]
        other = [-1] * len(own)
        other[: len(self.memory)] = self.memory
        other[4 : 4 + len(self.disk)] = self.disk
        return [own, other]


@pytest.mark.parametrize(
    ("memory", "disk", "step", "left"),
    [([4, 3], [4], 4, (3, 4)), ([], [4], 4, (3,)), ([], [], 0, ())],
)
def test_a_snapshot_that_some_ranks_take_anew_is_taken_anew_by_all(
    tmp_path, made: list[Rank], memory: list[int], disk: list[int], step: int, left: tuple[int, ...]
) -> None:
    """Else parts of one step would be of two attempts, and never come together."""
    made.append(Rank(0, origin(tmp_path), 3, 4))
    if disk:
        publish(tmp_path, 4, ranks=2)
    found = restoring.find(made[0].arenas, tmp_path, "job", cast("Any", Two(memory, disk)))
    if step and not memory:
        assert found.where == f"{tmp_path}/step-000000000004 of job job"
    made[0].arenas.forget_after(found.kept_until)
    assert (found.step, made[0].arenas.versions()) == (step, left)


def test_a_rank_that_does_not_come_is_named_and_nothing_is_published(
    tmp_path, made: list[Rank]
) -> None:
    made.append(Rank(0, origin(tmp_path), 3, 4))
    with pytest.raises(CheckpointError, match=re.escape("by step: {4: [1], 3: [1]}")):
        flat_memory.save(held(*made), "SIGTERM", FakeClock(), 0.0)
    assert not folder.scan(tmp_path, "job").valid


def test_a_full_disk_is_said_and_what_was_there_stays(tmp_path, made: list[Rank]) -> None:
    with disks.small_disk(tmp_path / "disk", 64):
        where = origin(tmp_path / "disk", 1)
        made.append(Rank(0, where, 1))
        assert flat_memory.save(held(*made), "first", FakeClock(), 1.0) is not None
        filler = tmp_path / "disk" / "filler"
        with pytest.raises(OSError) as raised, open(filler, "wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        assert raised.value.errno == errno.ENOSPC
        made[0].take(2)
        with pytest.raises(CheckpointError, match="could not be written: No space left on device"):
            flat_memory.save(held(*made), "second", FakeClock(), 1.0)
        (found,) = folder.scan(tmp_path / "disk", "job", is_full=True).valid
        assert found.manifest.version == 1
        assert {path.name for path in (tmp_path / "disk").iterdir()} == {found.path.name, "filler"}


@pytest.fixture
def checkpoint(tmp_path, made: list[Rank]) -> folder.Checkpoint:
    made.append(Rank(0, origin(tmp_path, 1), 4))
    flat_memory.save(held(*made), "", FakeClock(), 1.0)
    (found,) = folder.scan(tmp_path, "job").valid
    return found


def test_the_file_is_that_of_safetensors(checkpoint: folder.Checkpoint) -> None:
    data = (checkpoint.path / flat.file_name(0)).read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    head = json.loads(data[8 : 8 + length])
    assert (8 + length) % 8 == 0
    assert head["a"] == {"dtype": "F64", "shape": [2, 2], "data_offsets": [0, 32]}
    assert data[8 + length :] == content(4, 0)
    assert np.frombuffer(data[8 + length :][:8])[0] == 4


@pytest.mark.parametrize("at", [0, 9, -1])
def test_each_byte_is_verified_before_it_is_used(checkpoint: folder.Checkpoint, at: int) -> None:
    path = checkpoint.path / flat.file_name(0)
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptCheckpointError, match="its content has changed"):
        flat.read(checkpoint, 0)


def test_a_rank_that_has_written_nothing_is_told_who_has(checkpoint: folder.Checkpoint) -> None:
    with pytest.raises(CorruptCheckpointError, match=r"written by mindspore 2.10.0 with 1 ranks"):
        flat.read(checkpoint, 3)


def test_a_torch_job_of_the_same_name_passes_over_it(checkpoint: folder.Checkpoint) -> None:
    found = folder.scan(checkpoint.path.parent, "job", is_flat=False)
    assert not found.valid
    assert found.passed_over == [(checkpoint.path, "is a checkpoint of mindspore 2.10.0")]


def test_a_manifest_with_files_of_both_kinds_is_refused(checkpoint: folder.Checkpoint) -> None:
    one = checkpoint.manifest.files[0]
    mixed = (one, manifest.FileEntry(manifest.METADATA_NAME, 1, one.sha256))
    broken = manifest.encode(dataclasses.replace(checkpoint.manifest, files=mixed))
    with pytest.raises(CorruptCheckpointError, match="wrong value for files"):
        manifest.decode(broken)


def test_the_command_shows_it_without_torch(checkpoint: folder.Checkpoint) -> None:
    code = "import sys; sys.modules['torch'] = None; from taskd.dump import main; "
    code += "sys.exit(main(sys.argv[1:]))"
    said = subprocess.run(
        [sys.executable, "-c", code, "show", str(checkpoint.path)], capture_output=True, text=True,
        check=True, env={**os.environ},
    ).stdout  # fmt: skip
    assert re.search(r"(?m)^framework: +mindspore 2.10.0$", said)
    assert "a  [2, 2]  F64" in said


def test_a_rank_that_fails_after_the_publisher_gave_up_leaves_nothing(tmp_path) -> None:
    draft = Draft(tmp_path, "job", Kind.PERIODIC, 4, "x", (0, 1), 0, 2)

    def pieces() -> Iterator[memoryview]:
        draft.withdraw()
        raise OSError(errno.ENOSPC, "No space left on device")
        yield

    with pytest.raises(CheckpointError, match="could not be written: No space left on device"):
        flat.write(draft, 1, Flat(LAYOUT, {}, memoryview(b"")), pieces())
    assert not list(tmp_path.iterdir())


def test_a_writer_that_is_no_writer_s_part_is_withdrawn(tmp_path) -> None:
    draft = Draft(tmp_path, "job", Kind.PERIODIC, 4, "x", (0, 1), 0, 2)
    flat.write(draft, 0, Flat(LAYOUT, {}, memoryview(content(4, 0))))
    with pytest.raises(CheckpointError, match="no part of rank 1"):
        flat.publish(draft, "x 1")
    assert not list(tmp_path.iterdir())
