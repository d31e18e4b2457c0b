"""Writing, publishing and loading, within one process."""

from __future__ import annotations

import contextlib
import logging
import os
import pathlib
import subprocess
import sys

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoints import assert_holds, draft_of, gone_owner, names, save, state_of, tensors_in, tree
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from taskd.checkpoint import files, folder, owners, stream
from taskd.checkpoint.draft import sweep
from taskd.checkpoint.load import contents, load
from taskd.checkpoint.names import Kind, removed_name
from taskd.checkpoint.pieces import Piece
from taskd.checkpoint.publish import publish
from taskd.checkpoint.save import write
from taskd.errors import CheckpointError, CorruptCheckpointError
from tests.disks import undeletable

LIMIT_S = 60


@pytest.mark.parametrize("writers", [(0,), (2, 0, 1)])
def test_what_was_saved_is_loaded(tmp_path, writers) -> None:
    path = save(
        tmp_path / "new" / "folder",
        7,
        writers=writers,
        world_size=4,
        generation=2,
        states=("model",),
    )
    assert_holds(path, 7, writers)
    (found,) = folder.scan(path.parent, "job", is_full=True).valid
    manifest = found.manifest
    assert (
        manifest.version,
        manifest.writers,
        manifest.world_size,
        manifest.generation,
        manifest.states,
    ) == (7, writers, 4, 2, ("model",))
    assert names(path) == [
        ".metadata",
        *sorted(f"__{rank}_0.distcp" for rank in writers),
        "taskd.json",
    ]
    assert contents(path).tensors["bias"] == ((17,), torch.bfloat16)


def test_plain_dcp_reads_it(tmp_path) -> None:
    path = save(tmp_path, 7, writers=(0, 1))
    expected = state_of(7)
    target = {name: torch.zeros_like(tensor) for name, tensor in tensors_in(expected).items()}
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        dcp.load(target, checkpoint_id=path)
    assert all(torch.equal(target[name], expected[name]) for name in target)
    dcp_to_torch_save(path, tmp_path / "one.pt")
    loaded = torch.load(tmp_path / "one.pt", weights_only=True)
    assert torch.equal(loaded["weight"], expected["weight"])
    assert loaded["schedule"] == expected["schedule"]


def test_a_survivor_writes_the_piece_of_a_dead_rank(tmp_path) -> None:
    whole = torch.randn(10, 3)
    draft = draft_of(
        tmp_path, 1, kind=Kind.DUMP, writers=(1, 2), world_size=3, fault="rank 0: SIGKILL"
    )
    write(draft, 1, {"w": Piece((10, 3), (4, 0), whole[4:7])})
    write(draft, 2, {"w": Piece((10, 3), (7, 0), whole[7:])}, {"dead/0": 1})
    write_dead = Piece((10, 3), (0, 0), whole[:4])
    with pytest.raises(CheckpointError, match=r"w is not whole|invalid fill"):
        publish(draft)
    draft = draft_of(
        tmp_path, 1, kind=Kind.DUMP, writers=(1, 2), world_size=3, fault="rank 0: SIGKILL"
    )
    write(draft, 1, {"w": Piece((10, 3), (4, 0), whole[4:7]), "other": write_dead})
    write(draft, 2, {"w": Piece((10, 3), (7, 0), whole[7:])})
    with pytest.raises(CheckpointError, match=r"not whole|invalid fill"):
        publish(draft)
    assert names(tmp_path) == []


def test_two_ranks_may_write_the_same_piece_but_not_overlapping_ones(tmp_path) -> None:
    whole = torch.randn(10, 3)
    draft = draft_of(tmp_path, 1, writers=(0, 1))
    for rank in draft.writers:
        write(draft, rank, {"w": Piece((10, 3), (0, 0), whole)})
    target = {"w": torch.zeros(10, 3)}
    load(publish(draft), target)
    assert torch.equal(target["w"], whole)
    draft = draft_of(tmp_path, 2, writers=(0, 1))
    write(draft, 0, {"w": Piece((10, 3), (0, 0), whole[:5])})
    write(draft, 1, {"w": Piece((10, 3), (4, 0), whole[4:9])})
    with pytest.raises(CheckpointError, match="overlapping"):
        publish(draft)


@pytest.mark.parametrize(("first", "second", "reason"), [
    ({"w": Piece((4,), (0,), torch.ones(2))}, {"w": Piece((5,), (2,), torch.ones(3))},
     "w is .* on rank 1 and .* on another"),
    ({"w": Piece((4,), (0,), torch.ones(2))},
    {"w": Piece((4,), (2,), torch.ones(2, dtype=torch.half))},
    "w is .* on rank 1 and .* on another"),
])  # fmt: skip
def test_pieces_that_do_not_fit_together_are_refused(tmp_path, first, second, reason) -> None:
    draft = draft_of(tmp_path, 1, writers=(0, 1))
    write(draft, 0, first)
    write(draft, 1, second)
    with pytest.raises(CheckpointError, match=reason):
        publish(draft)
    assert names(tmp_path) == []


def test_values_of_one_rank_need_names_of_their_own(tmp_path) -> None:
    draft = draft_of(tmp_path, 1, writers=(0, 1))
    write(draft, 0, {}, {"random": b"0"})
    write(draft, 1, {}, {"random": b"1"})
    with pytest.raises(CheckpointError, match="random was given by two ranks"):
        publish(draft)
    with pytest.raises(CheckpointError, match="give it once"):
        write(draft_of(tmp_path, 2), 0, {"a": 1}, {"a": 1})


def test_what_does_not_fit_is_told_before_anything_is_overwritten(tmp_path) -> None:
    path = save(tmp_path, 3)
    good = torch.zeros(300, 17)
    for target, reason in [
        (
            {"weight": good, "bias": torch.zeros(18, dtype=torch.bfloat16)},
            (
                r"bias has shape \(17,\) "
                r"there, and \(18,\) here"
            ),
        ),
        (
            {"weight": good, "bias": torch.zeros(17)},
            "bias is torch.bfloat16 there, and torch.float32 here",
        ),
        ({"weight": good, "nothing": torch.zeros(1)}, "holds no nothing"),
        ({"weight": good, "schedule": torch.zeros(1)}, "schedule is a plain value"),
    ]:
        with pytest.raises(CheckpointError, match=reason) as caught:
            load(path, target)
        assert not isinstance(caught.value, CorruptCheckpointError)
    assert not good.any()
    with pytest.raises(CheckpointError, match="holds no missing"):
        load(path, {}, ["missing"])
    assert load(path, {}, ["schedule"]) == {"schedule": state_of(3)["schedule"]}


def test_parts_of_a_tensor_are_loaded_into_pieces(tmp_path) -> None:
    path = save(tmp_path, 3, writers=(0, 1, 2))
    expected = state_of(3)["weight"]
    part = Piece((300, 17), (95, 4), torch.zeros(110, 5))
    load(path, {"weight": part}, [])
    assert torch.equal(part.tensor, expected[95:205, 4:9])
    transposed = torch.zeros(17, 300).t()
    load(path, {"weight": transposed}, [])
    assert torch.equal(transposed, expected)


def test_a_name_that_exists_is_not_taken_again(tmp_path) -> None:
    first, second, third = (save(tmp_path, 7, attempt=f"a{number}") for number in range(3))
    assert [path.name for path in (first, second, third)] == [
        "step-000000000007",
        "step-000000000007-2",
        "step-000000000007-3",
    ]
    chosen, _ = folder.newest_valid(tmp_path, "job")
    assert chosen is not None
    assert chosen.path == third
    (tmp_path / "step-000000000008").symlink_to("nowhere")
    assert save(tmp_path, 8).name == "step-000000000008-2"


def test_file_systems_without_the_flag_do_not_overwrite_either(tmp_path, monkeypatch) -> None:
    def unknown(source, target) -> None:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(files, "_renameat2", unknown)
    (tmp_path / "step-000000000007").mkdir()
    (tmp_path / "step-000000000007-2").write_text("a file")
    assert save(tmp_path, 7).name == "step-000000000007-3"
    assert names(tmp_path) == ["step-000000000007", "step-000000000007-2", "step-000000000007-3"]
    assert names(tmp_path / "step-000000000007") == []


# ---------------------------------------------------------------- what is kept


def test_the_newest_periodic_ones_are_kept_and_every_dump(tmp_path) -> None:
    save(tmp_path, 1, kind=Kind.DUMP)
    save(tmp_path, 5, job="another")
    for version in range(2, 7):
        save(tmp_path, version, keep=2)
    assert names(tmp_path) == [
        "dump-000000000001",
        "step-000000000005",
        "step-000000000005-2",
        "step-000000000006",
    ]
    assert_holds(tmp_path / "step-000000000005", 5)
    with pytest.raises(CheckpointError, match="keep 0"):
        folder.retain(tmp_path, "job", 0, up_to=5)


def test_one_of_a_later_step_from_which_the_job_did_not_go_on_costs_no_new_one(tmp_path) -> None:
    later = save(tmp_path, 9, keep=1)
    damaged = later / "__0_0.distcp"
    damaged.write_bytes(bytes(damaged.stat().st_size))
    for version in (4, 5):
        save(tmp_path, version, keep=1)
    assert {one.path.name for one in folder.scan(tmp_path, "job").valid} == {
        "step-000000000005",
        later.name,
    }


def test_what_is_not_whole_or_not_ours_is_neither_counted_nor_deleted(tmp_path) -> None:
    torn = save(tmp_path, 9)
    (torn / "__0_0.distcp").unlink()
    noted = save(tmp_path, 1)
    (noted / "note.txt").write_text("the good one")
    elsewhere = save(tmp_path / "elsewhere", 2)
    (tmp_path / "step-000000000002").symlink_to(elsewhere)
    (tmp_path / "step-000000000003").mkdir()
    (tmp_path / "other").write_text("x")
    before = tree(tmp_path)
    for version in (4, 5):
        save(tmp_path, version, keep=1)
    after = tree(tmp_path)
    assert {name: after[name] for name in before} == before
    assert {name.partition("/")[0] for name in after.keys() - before.keys()} == {
        "step-000000000005"
    }


def abandoned(
    tmp_path: pathlib.Path, version: int, owner: str, role: str = "publisher", **changed
) -> pathlib.Path:
    draft = draft_of(tmp_path, version, attempt=f"old{version}", **changed)
    draft.path.mkdir()
    (draft.path / f"{role}-0-{owner}").touch()
    (draft.path / "__0_0.distcp").write_bytes(b"half of it")
    return draft.path


def test_drafts_of_dead_processes_are_swept_and_no_others(tmp_path) -> None:
    gone = gone_owner()
    boot, rest = gone.split(".", 1)
    swept = [abandoned(tmp_path, 1, gone), abandoned(tmp_path, 2, gone, "writer")]
    both = abandoned(tmp_path, 3, gone)
    (both / f"writer-1-{owners.myself()}").touch()
    swept.append(both)  # nobody can publish it any more
    empty = draft_of(tmp_path, 4, attempt="old").path
    empty.mkdir()
    deleting = tmp_path / removed_name(Kind.PERIODIC, 1, "job", "ab")
    deleting.mkdir()
    (deleting / "taskd.json").touch()
    swept += [empty, deleting]
    kept = [
        abandoned(tmp_path, 5, owners.myself()),  # alive
        abandoned(tmp_path, 6, gone, job="another"),  # not ours
        abandoned(tmp_path, 7, f"{'0' * len(boot)}.{rest}"),  # on a machine that we cannot see
        abandoned(tmp_path, 8, "unreadable"),
    ]
    (noted := abandoned(tmp_path, 9, gone)).joinpath("note.txt").touch()  # somebody's own file
    unowned = draft_of(tmp_path, 10, attempt="old").path
    unowned.mkdir()
    (unowned / "__0_0.distcp").touch()
    target = abandoned(tmp_path / "..", 11, gone, job=f"elsewhere-{tmp_path.name}")
    link = draft_of(tmp_path, 11, attempt="link").path
    link.symlink_to(target)
    kept += [noted, unowned, link]
    path = save(tmp_path, 20)
    assert not [one for one in swept if one.exists()]
    assert all(one.exists() for one in kept)
    assert_holds(path, 20)


def test_a_publisher_sweeps_what_it_gave_up_itself_but_nothing_newer(tmp_path) -> None:
    older, newer = draft_of(tmp_path, 1, writers=(0, 1)), draft_of(tmp_path, 3, writers=(0, 1))
    for draft in (older, newer):
        write(draft, 1, state_of(draft.version))
    published = draft_of(tmp_path, 2)
    write(published, 0, state_of(2))
    publish(published)
    assert not older.path.exists()
    assert newer.path.exists()
    assert sweep(published) == []


def test_this_process_is_alive_and_a_dead_one_is_gone() -> None:
    assert not owners.is_certainly_gone(owners.myself())
    assert owners.is_certainly_gone(gone_owner())
    for text in ("", "x", "1.2.3", "a.1.2.3/../4", owners.myself() + "1x"):
        assert not owners.is_certainly_gone(text)


def test_one_that_has_ended_and_that_nobody_has_reaped_is_gone() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        place = owners.myself().rsplit(".", 2)[0]
        owner = f"{place}.{process.pid}.{owners._start_of(process.pid)}"
        assert not owners.is_certainly_gone(owner)
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert pathlib.Path(f"/proc/{process.pid}/stat").exists()
        assert owners.is_certainly_gone(owner)


def test_one_folder_that_cannot_be_deleted_keeps_no_other(tmp_path, caplog) -> None:
    """Of each kind one, and beside it one that goes. Each is said once; it goes when it can."""
    old = [save(tmp_path, version) for version in (1, 2)]
    given_up = [abandoned(tmp_path, version, gone_owner()) for version in (3, 4)]
    deleting = [tmp_path / removed_name(Kind.PERIODIC, 5, "job", text) for text in ("aa", "bb")]
    for path in deleting:
        path.mkdir()
    stuck = [old[1], given_up[0], deleting[0]]
    with contextlib.ExitStack() as mounts:
        for path in stuck:
            mounts.enter_context(undeletable(path))
        newest = [save(tmp_path, version, keep=1) for version in (20, 30)]
        assert set(tmp_path.iterdir()) == {*stuck, newest[1]}
        said = [record.getMessage() for record in caplog.records]
        assert sorted(said) == sorted(
            f"job job: {path} cannot be deleted and is left: Device or resource busy. Others are "
            "deleted. See who owns it and what is mounted there, or delete it by hand: it takes up "
            "room"
            for path in stuck
        )
    newest.append(save(tmp_path, 40, keep=1))
    assert [*tmp_path.iterdir()] == [newest[2]]


def test_what_can_be_deleted_of_a_folder_is(tmp_path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / "folder" / name).mkdir(parents=True)
    with undeletable(tmp_path / "folder" / "b"):
        with pytest.raises(OSError, match="busy"):
            files.remove_folder(tmp_path / "folder")
        assert names(tmp_path / "folder") == ["b"]


# ---------------------------------------------------------------- telling and waiting


def test_progress_is_told_while_it_takes_long(tmp_path, monkeypatch, caplog) -> None:
    monkeypatch.setattr(stream, "_PROGRESS_S", 0.0)
    with caplog.at_level(logging.INFO):
        write(draft_of(tmp_path, 1), 0, {"w": torch.ones(3_000_000)})
    lines = [
        record.getMessage() for record in caplog.records if "GB written" in record.getMessage()
    ]
    assert lines
    assert "rank 0: 0.01 of 0.01 GB written" in lines[-1]


def test_nothing_is_published_while_a_part_is_missing(tmp_path) -> None:
    draft = draft_of(tmp_path, 1, writers=(0, 1, 2))
    write(draft, 1, state_of(1))
    write(draft, 0, state_of(1))
    assert draft.missing() == [2]
    with pytest.raises(CheckpointError, match="no part of rank 2"):
        publish(draft)
    assert names(tmp_path) == []


def test_a_writer_that_is_none_or_comes_twice_is_refused(tmp_path) -> None:
    draft = draft_of(tmp_path, 1)
    with pytest.raises(CheckpointError, match="rank 3 is none of its writers"):
        write(draft, 3, {})
    for writers in ((), (1, 1)):
        with pytest.raises(CheckpointError, match="expected at least one rank, each once"):
            draft_of(tmp_path, 1, writers=writers)
