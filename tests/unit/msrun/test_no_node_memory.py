"""taskd.mindspore's checkpoints where a rank has no node memory, or not what it should have."""

from __future__ import annotations

import errno
import logging
import struct
import time
from typing import TYPE_CHECKING, Any

import pytest

from taskd.checkpoint import files, flat, folder
from taskd.checkpoint.flat import Layout
from taskd.checkpoint.flat_memory import Origin
from taskd.errors import ArenaError
from taskd.mindspore import periodic
from taskd.mindspore.memory import Memory
from taskd.mindspore.periodic import Periodic
from taskd.native.arenas import Arenas

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Iterator

NOTES = {"batches": "7"}


class Numbers:
    """What `taskd.mindspore.content.Content` is to a network."""

    layout = (Layout("a", "F64", (2,), 0, 16), Layout("b", "F64", (1,), 16, 24))
    size_bytes = 24

    def __init__(self, rank: int) -> None:
        self.rank, self.step = rank, 0

    @property
    def bytes(self) -> bytes:
        return struct.pack("=3d", self.rank, 0, self.step)

    def copy_into(self, target: Any) -> None:
        target[:] = self.bytes

    def pieces(self) -> Iterator[memoryview]:
        data = memoryview(self.bytes)
        yield data[:16]
        yield data[16:]


class Rank:
    """One of two."""

    def __init__(self, rank: int, directory: pathlib.Path) -> None:
        self.rank, self.numbers, self.arenas = rank, Numbers(rank), Arenas.create()
        self.origin = Origin(str(directory), "job", "attempt", 2, 0, "mindspore 2.10.0")
        self.memory = Memory(self.arenas, self.numbers)  # type: ignore[arg-type]
        self.periodic = Periodic(rank, self.memory, self.origin, 3)

    def begin(self, step: int) -> None:
        """Commit this step, which is to become a checkpoint."""
        self.numbers.step = step
        is_kept = self.memory.take(step, self.origin, NOTES)
        self.periodic.save(step, NOTES, is_kept=is_kept)

    def have_no_memory(self) -> None:
        def make(size: int) -> None:
            raise ArenaError(f"no node memory for {size} bytes")

        self.arenas.make = make  # type: ignore[method-assign,assignment]


def no_room(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def waited_for(caplog: pytest.LogCaptureFixture) -> str:
    """What is said, as soon as something is."""
    while not caplog.text:
        time.sleep(0.01)
    return caplog.text


@pytest.fixture
def ranks(tmp_path: pathlib.Path) -> Iterator[list[Rank]]:
    found = [Rank(rank, tmp_path) for rank in (0, 1)]
    yield found
    for one in found:
        one.periodic.wait()
        one.arenas.close()


@pytest.mark.parametrize("without", [[1], [0], [0, 1]])
def test_a_rank_without_it_writes_its_part_from_the_parameters(
    tmp_path, ranks: list[Rank], without: list[int], caplog
) -> None:
    for rank in without:
        ranks[rank].have_no_memory()
    for step in (4, 8):
        for one in reversed(ranks):
            one.begin(step)
            if one.rank in without:
                one.numbers.step = -1  # the next step writes into the same memory
    for one in ranks:
        one.periodic.wait()
    newest, older = folder.scan(tmp_path, "job", is_full=True).valid
    for checkpoint, step in ((newest, 8), (older, 4)):
        for rank in (0, 1):
            state = flat.read(checkpoint, rank)
            assert (state.layout, state.notes) == (Numbers.layout, NOTES)
            assert bytes(state.data) == struct.pack("=3d", rank, 0, step)
    said = [one.message for one in caplog.records if "no snapshots from step 4 on" in one.message]
    assert len(said) == len(without)


@pytest.mark.timeout(60)
def test_a_snapshot_that_is_not_there_ends_the_checkpoint_at_once(
    tmp_path, ranks: list[Rank], caplog
) -> None:
    ranks[1].begin(4)
    ranks[1].periodic.wait()
    ranks[1].memory.arenas.forget_after(-1)
    ranks[1].periodic.save(8, NOTES, is_kept=True)
    ranks[1].periodic.wait()
    with caplog.at_level(logging.WARNING):
        ranks[0].begin(8)
        ranks[0].periodic.wait()
    assert "rank 0: the checkpoint of step 8 could not be saved, the previous ones stay: " in (
        caplog.text
    )
    assert "rank 1: there is no snapshot of step 8" in caplog.text
    assert not list(tmp_path.glob("*step-000000000008*"))


@pytest.mark.timeout(60)
def test_an_error_that_nobody_expects_does_not_let_the_others_wait(
    tmp_path, ranks: list[Rank], caplog
) -> None:
    ranks[1].have_no_memory()

    def pieces() -> Iterator[memoryview]:
        raise RuntimeError("the device is gone")
        yield

    ranks[1].numbers.pieces = pieces  # type: ignore[method-assign]
    with pytest.raises(RuntimeError):
        ranks[1].begin(8)
    ranks[0].begin(8)
    ranks[0].periodic.wait()
    assert "RuntimeError('the device is gone')" in caplog.text
    assert not folder.scan(tmp_path, "job").valid


@pytest.mark.timeout(60)
@pytest.mark.parametrize("is_kept", [True, False])
def test_a_publisher_that_fails_before_the_others_begin_leaves_nothing(
    tmp_path, ranks: list[Rank], caplog, monkeypatch, is_kept: bool
) -> None:
    with monkeypatch.context() as patch:
        if not is_kept:
            patch.setattr(files, "write_new", no_room)
        ranks[0].periodic.save(8, NOTES, is_kept=is_kept)
    assert "rank 0: the checkpoint of step 8 could not be saved" in waited_for(caplog)
    ranks[1].begin(8)
    for one in ranks:
        one.periodic.wait()
    assert not list(tmp_path.iterdir())


def test_a_publisher_that_fails_does_not_wait_for_ever(
    tmp_path, ranks: list[Rank], monkeypatch
) -> None:
    monkeypatch.setattr(periodic, "_FAILED_S", 0.2)
    ranks[0].periodic.save(8, NOTES, is_kept=True)
    ranks[0].periodic.wait()
    assert not list(tmp_path.iterdir())
