"""A writer dies while a dump is written: all is written anew, and what was written goes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from checkpoints import draft_of, names

from taskd.checkpoint import folder
from taskd.checkpoint.names import Kind
from taskd.checkpoint.publish import publish
from taskd.checkpoint.save import write
from taskd.errors import CheckpointError
from tests.disks import small_disk

if TYPE_CHECKING:
    import pathlib

    from taskd.checkpoint.draft import Draft

MIB = 1 << 20
STATE = {"weight": torch.arange(MIB, dtype=torch.float32)}  # 4 MiB


def void(directory: pathlib.Path) -> Draft:
    """The first attempt, in which rank 2 dies."""
    return draft_of(directory, 7, kind=Kind.DUMP, attempt="1-1", writers=(0, 1, 2), world_size=3)


def anew(directory: pathlib.Path, writers: tuple[int, ...] = (0, 1)) -> Draft:
    return draft_of(directory, 7, kind=Kind.DUMP, attempt="2-2", writers=writers, world_size=3)


def obey(rank: int, former: Draft, draft: Draft) -> None:
    """What a writer does when it is ordered to write `draft`."""
    former.give_way(rank, draft)
    write(draft, rank, STATE)


def test_a_disk_with_room_for_one_is_enough(tmp_path: pathlib.Path) -> None:
    with small_disk(tmp_path / "disk", 5 << 10):
        former, draft = void(tmp_path / "disk"), anew(tmp_path / "disk")
        for rank in former.writers:
            write(former, rank, STATE)
        obey(0, former, draft)
        obey(1, former, draft)
        publish(draft)
        (found,) = folder.scan(tmp_path / "disk", "job", is_full=True).valid
        assert names(tmp_path / "disk") == [found.path.name]


def test_even_if_one_still_writes_when_another_one_begins_anew(tmp_path: pathlib.Path) -> None:
    with small_disk(tmp_path / "disk", 5 << 10):
        former, draft = void(tmp_path / "disk"), anew(tmp_path / "disk")
        for rank in (0, 2):
            write(former, rank, STATE)
        (former.path / "rank-2.json").unlink()  # it died before
        former.join(1)  # as `write` begins
        obey(0, former, draft)
        left = names(former.path)
        assert [name for name in left if not name.startswith(("publisher", "writer"))] == [
            "rank-0.json"
        ]
        (former.path / next(name for name in left if name.startswith("writer-1"))).unlink()
        write(former, 1, STATE)  # and ends as if nothing had happened
        assert former.missing() == [2]
        with pytest.raises(CheckpointError, match="no part of rank 2"):
            publish(former)  # which nobody orders


def test_the_last_one_that_is_done_with_it_removes_it(tmp_path: pathlib.Path) -> None:
    former, draft = void(tmp_path), anew(tmp_path)
    write(former, 0, STATE)
    obey(0, former, draft)
    write(former, 1, STATE)  # it was ordered so before
    assert former.path.exists()
    obey(1, former, draft)
    assert names(tmp_path) == [draft.path.name]
    assert draft.missing() == []


def test_one_that_has_not_begun_to_write_it_finds_it_in_place(tmp_path: pathlib.Path) -> None:
    former, draft = void(tmp_path), anew(tmp_path)
    write(former, 0, STATE)
    former.give_way(0, draft)
    assert former.path.exists()
    write(draft, 0, STATE)
    obey(1, former, draft)  # the order came too late for it to write the void one
    assert not former.path.exists()


@pytest.mark.parametrize("is_first", [False, True])
def test_a_void_one_that_is_being_published_is_whole_or_gone(
    tmp_path: pathlib.Path, *, is_first: bool
) -> None:
    """The writer has died when all had written: the publisher may not have heard of it."""
    former, draft = void(tmp_path), anew(tmp_path)
    for rank in former.writers:
        write(former, rank, STATE)
    if is_first:
        publish(former)
        former.give_way(1, draft)
        (found,) = folder.scan(tmp_path, "job", is_full=True).valid
        assert names(tmp_path) == [found.path.name]
        return
    former.give_way(1, draft)
    with pytest.raises(CheckpointError, match="cannot be read"):
        publish(former)
    assert names(tmp_path) == []


def test_what_dead_ranks_have_left_goes_with_it(tmp_path: pathlib.Path) -> None:
    """Nobody else removes it: whether a process of another host is gone is never certain."""
    former, draft = void(tmp_path), anew(tmp_path, writers=(1,))
    for rank in (1, 2):
        write(former, rank, STATE)
    for name in ("publisher-0-other.host:1:1:1", ".metadata.tmp"):
        (former.path / name).write_bytes(b"")
    obey(1, former, draft)
    assert names(tmp_path) == [draft.path.name]


def test_one_that_cannot_be_removed_is_said_and_costs_nothing(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(path: pathlib.Path, *_: Any) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    former, draft = void(tmp_path), anew(tmp_path)
    write(former, 0, STATE)
    with monkeypatch.context() as patch:
        patch.setattr("taskd.checkpoint.files.remove", refuse)
        obey(0, former, draft)
    assert f"{former.path} could not be removed: " in caplog.text
    assert draft.missing() == [1]
