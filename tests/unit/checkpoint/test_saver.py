"""Savers: each rank writes its part in a thread, and one of them publishes."""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING

import pytest
import torch
from checkpoints import assert_holds, draft_of, gone_owner, names, save, state_of, tree

from taskd.checkpoint.pieces import Held
from taskd.checkpoint.saver import Saver
from taskd.errors import CheckpointError
from tests.disks import small_disk

if TYPE_CHECKING:
    import pathlib

LIMIT_S = 60


def saver(directory: pathlib.Path, rank: int, writers: tuple[int, ...], **changed) -> Saver:
    fields = {
        "job": "job",
        "attempt": "first",
        "generation": 0,
        "world_size": len(writers),
        "every": 10,
        "keep": 2,
    }
    return Saver(directory, rank=rank, writers=writers, **{**fields, **changed})


def test_savers_of_several_ranks_meet_in_the_folder(tmp_path) -> None:
    savers = [saver(tmp_path, rank, (0, 1, 2)) for rank in range(3)]
    assert [version for version in range(35) if savers[0].is_due(version)] == [10, 20, 30]
    for version in (10, 20, 30):
        for rank in (2, 0, 1):
            savers[rank].save(
                version, state_of(version), {f"ranks/{rank}/random": bytes([rank, version])}
            )
    assert all(one.wait(LIMIT_S) for one in savers)
    assert [one.problem for one in savers] == [""] * 3
    assert savers[0].published == tmp_path / "step-000000000030"
    assert names(tmp_path) == ["step-000000000020", "step-000000000030"]
    assert_holds(tmp_path / "step-000000000030", 30, (0, 1, 2))


@pytest.mark.parametrize("refuses", [False, True])
def test_what_a_writer_begins_when_the_publisher_has_failed_does_not_stay(
    tmp_path, refuses: bool
) -> None:
    """On a full disk it would take what room there is, at each try more of it."""
    disk = tmp_path / "disk"
    with small_disk(disk, 1024):
        save(disk, 10)
        was = tree(disk)
        savers = [saver(disk, rank, (0, 1, 2)) for rank in range(3)]
        if refuses:
            savers[0].refuse(20, "there is nothing")
        else:
            savers[0].save(20, {"large": Held(torch.zeros(600_000), (0,))})
        wait_until(lambda: savers[0].problem or list(disk.glob(".step*/rank-0.json")))
        for one in savers[1:]:
            one.save(20, state_of(20))
        assert all(one.wait(LIMIT_S) for one in savers)
        assert savers[0].problem
        assert tree(disk) == was
        for rank, one in enumerate(savers):
            one.save(30, state_of(30), {f"ranks/{rank}/random": bytes([rank, 30])})
        assert all(one.wait(LIMIT_S) for one in savers)
        assert_holds(disk / "step-000000000030", 30, (0, 1, 2))


def test_what_was_left_of_an_attempt_is_removed_before_the_next_one_needs_the_room(
    tmp_path,
) -> None:
    disk = tmp_path / "disk"
    with small_disk(disk, 1024):
        first = saver(disk, 0, (0, 1))
        first.save(10, {"large": torch.zeros(200_000)})
        wait_until(lambda: list(disk.glob(".step*/rank-0.json")))
        first.abandon()
        assert first.wait(LIMIT_S)
        late = saver(disk, 1, (0, 1))  # begins when all is over
        late.save(10, {"large": Held(torch.zeros(100_000), (1,))})
        assert late.wait(LIMIT_S)
        assert len(list(disk.glob(".step*"))) == 1
        second = saver(disk, 0, (0, 1)), late
        for one in second:
            one.save(20, {"large": torch.zeros(200_000)})
        assert all(one.wait(LIMIT_S) for one in second)
        assert [one.problem for one in second] == ["", ""]
        assert names(disk) == ["step-000000000020"]


def wait_until(said) -> None:
    """Until it says something true."""
    deadline = time.monotonic() + LIMIT_S
    while not said():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_publisher_does_not_wait_for_the_dead(tmp_path, caplog) -> None:
    first = saver(tmp_path, 0, (0, 1))
    first.save(10, state_of(10))
    assert not first.wait(0.2)
    first.abandon()
    assert first.wait(LIMIT_S)
    assert "given up: no part of rank 1" in first.problem
    assert "the checkpoint of version 10 could not be saved" in caplog.text
    assert names(tmp_path) == []
    late = saver(tmp_path, 0, (0, 1), limit_s=0)
    late.save(20, state_of(20))
    assert late.wait(LIMIT_S)
    assert "no part of rank 1" in late.problem


def test_what_the_living_wrote_for_a_publisher_that_died_is_deleted_with_the_next_checkpoint(
    tmp_path,
) -> None:
    writers = [saver(tmp_path, rank, (0, 1, 2)) for rank in (1, 2)]
    for writer in writers:
        writer.save(10, state_of(10))
    assert all(writer.wait(LIMIT_S) for writer in writers)
    (draft,) = tmp_path.iterdir()
    (draft / f"writer-9-{gone_owner()}").touch()
    savers = [saver(tmp_path, rank, (0, 1, 2), attempt="second") for rank in range(3)]
    for one in savers:
        one.save(20, state_of(20))
    assert all(one.wait(LIMIT_S) for one in savers)
    assert os.listdir(tmp_path) == ["step-000000000020"]


def test_what_one_process_has_left_is_kept_for_another_that_has_not(tmp_path) -> None:
    first = saver(tmp_path, 1, (0, 1, 2))
    first.save(10, state_of(10))
    assert first.wait(LIMIT_S)
    former = draft_of(tmp_path, 10, attempt="first").path
    second = [saver(tmp_path, rank, (0, 1), attempt="second") for rank in range(2)]
    (former / "writer-2-unreadable").touch()
    for one in second:
        one.save(20, state_of(20))
    assert all(one.wait(LIMIT_S) for one in second)
    assert sorted(name for name in os.listdir(former) if name.startswith(("writer", "left"))) == [
        "left-1",
        "writer-2-unreadable",
    ]


def test_an_error_of_one_rank_reaches_the_publisher(tmp_path) -> None:
    savers = [saver(tmp_path, rank, (0, 1)) for rank in range(2)]
    savers[1].save(10, {"w": torch.ones(3), "bad": torch.ones(2, device="meta")})
    savers[0].save(10, {"w": torch.ones(3)})
    assert all(one.wait(LIMIT_S) for one in savers)
    assert "rank 1: bad is on the meta device" in savers[0].problem
    assert "bad is on the meta device" in savers[1].problem
    assert names(tmp_path) == []
    assert not [thread for thread in threading.enumerate() if thread.name == "taskd-saver"]


def test_wrong_settings_of_a_saver_are_refused(tmp_path) -> None:
    for changed in ({"every": 0}, {"keep": 0}):
        with pytest.raises(CheckpointError, match="expected at least 1"):
            saver(tmp_path, 0, (0,), **changed)
