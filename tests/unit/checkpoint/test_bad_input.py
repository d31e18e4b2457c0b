"""Damaged, foreign and hostile files, real ones.

What is wrong is named, the checkpoint before is chosen, and nothing is deleted.
"""

from __future__ import annotations

import os
import pickle
import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch
from checkpoints import (
    assert_holds,
    draft_of,
    remounted_read_only,
    replaced,
    save,
    signed,
    state_of,
    tree,
)

from taskd.checkpoint import folder, manifest
from taskd.checkpoint.load import contents, load
from taskd.checkpoint.names import Kind
from taskd.checkpoint.publish import publish
from taskd.checkpoint.save import write
from taskd.errors import CheckpointError, CorruptCheckpointError
from tests.disks import small_disk

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Callable

DATA = "__1_0.distcp"


def flip(path: pathlib.Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 4
    path.write_bytes(data)


def cut_short(path: pathlib.Path) -> None:
    os.truncate(path / DATA, os.path.getsize(path / DATA) - 1)


def of_a_later_format(path: pathlib.Path) -> None:
    text = (path / "taskd.json").read_text()
    assert '"format": 1,' in text
    (path / "taskd.json").write_text(text.replace('"format": 1,', '"format": 2,'))


def replaced_by_a_link(path: pathlib.Path) -> None:
    moved = path.parent / "moved"
    path.rename(moved)
    path.symlink_to(moved)


def with_a_link_inside(path: pathlib.Path) -> None:
    (path / DATA).rename(path.parent / "data")
    (path / DATA).symlink_to(path.parent / "data")


def with_a_pipe_inside(path: pathlib.Path) -> None:
    (path / DATA).unlink()
    os.mkfifo(path / DATA)


def renamed(path: pathlib.Path) -> None:
    """What holds version 20 is said to hold 21."""
    shutil.copytree(path, path.parent / "step-000000000021")
    shutil.rmtree(path)


# What a look at names, sizes and the manifest finds.
QUICK: list[tuple[Callable[[pathlib.Path], Any], str]] = [
    (cut_short, rf"{DATA}: has \d+ bytes, \d+ were written"),
    (lambda path: (path / DATA).unlink(), f"{DATA}: is missing"),
    (lambda path: (path / ".metadata").unlink(), r"\.metadata: is missing"),
    (lambda path: (path / "taskd.json").unlink(), "taskd.json: is missing"),
    (lambda path: flip(path / "taskd.json", 200), "taskd.json: is damaged"),
    (lambda path: signed(path, job="another"), "belongs to job another"),
    (of_a_later_format, "taskd.json: has format 2; this version of taskd reads format 1"),
    (replaced_by_a_link, "is a symbolic link"),
    (with_a_link_inside, f"{DATA}: is a symbolic link"),
    (with_a_pipe_inside, f"{DATA}: is no regular file"),
    (renamed, "its manifest is that of version 20, periodic"),
]  # fmt: skip


@pytest.mark.parametrize(("damage", "reason"), QUICK)
def test_the_one_before_is_chosen_and_nothing_is_deleted(tmp_path, damage, reason) -> None:
    before, damaged = save(tmp_path, 10, writers=(0, 1)), save(tmp_path, 20, writers=(0, 1))
    damage(damaged)
    was = tree(tmp_path)
    for is_full in (False, True):
        chosen, passed_over = folder.newest_valid(tmp_path, "job", is_full=is_full)
        assert chosen is not None
        assert chosen.path == before
        assert len(passed_over) == 1
    import re

    assert re.search(reason, passed_over[0][1]), passed_over
    with pytest.raises(CorruptCheckpointError, match=reason):
        folder.check(passed_over[0][0], "job")
    assert_holds(before, 10, (0, 1))
    assert tree(tmp_path) == was


@pytest.mark.parametrize("name", ["__0_0.distcp", DATA, ".metadata"])
def test_one_flipped_bit_is_found_in_full(tmp_path, name) -> None:
    before, damaged = save(tmp_path, 10, writers=(0, 1)), save(tmp_path, 20, writers=(0, 1))
    pristine = (damaged / name).read_bytes()
    for position in {0, 1, len(pristine) // 3, len(pristine) // 2, len(pristine) - 1}:
        (damaged / name).write_bytes(pristine)
        flip(damaged / name, position)
        was = tree(tmp_path)
        target = {"weight": torch.zeros(300, 17), "bias": torch.zeros(17, dtype=torch.bfloat16)}
        with pytest.raises(CorruptCheckpointError, match=f"{name}: its content has changed"):
            load(damaged, target)
        assert not any(tensor.any() for tensor in target.values())
        chosen, passed_over = folder.newest_valid(tmp_path, "job", is_full=True)
        assert chosen is not None
        assert chosen.path == before
        assert [path for path, _ in passed_over] == [damaged]
        assert name in passed_over[0][1]
        assert tree(tmp_path) == was


@pytest.mark.parametrize(
    ("mode", "owner", "said"),
    [
        (0o755, None, None),
        (0o775, None, None),  # a group that shares its checkpoints
        (0o777, None, "can be written by every user (mode 0777)"),
        (0o1777, None, "can be written by every user (mode 1777)"),
        (0o700, 12345, "belongs to user 12345"),
    ],
)
@pytest.mark.parametrize("which", ["directory", "checkpoint"])
def test_a_folder_that_others_own_or_can_write_is_told_of(
    tmp_path, which, mode, owner, said
) -> None:
    path = save(tmp_path, 1)
    changed = tmp_path if which == "directory" else path
    changed.chmod(mode)
    if owner is not None:
        if os.geteuid() != 0:
            pytest.skip("only root gives files away")
        os.chown(changed, owner, -1)
    found = folder.exposure(tmp_path, path, tmp_path / "missing")
    assert (found is None) == (said is None), found
    assert said is None or found.startswith(f"{changed} {said}: ")
    assert folder.check(path, "job").path == path


def test_with_nothing_valid_nothing_is_chosen(tmp_path) -> None:
    assert folder.newest_valid(tmp_path / "missing", "job") == (None, [])
    path = save(tmp_path, 1)
    (path / "__0_0.distcp").unlink()
    chosen, passed_over = folder.newest_valid(tmp_path, "job")
    assert chosen is None
    assert len(passed_over) == 1
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="file: cannot be read: Not a directory"):
        folder.scan(tmp_path / "file", "job")


def test_two_jobs_in_one_folder_do_not_meet(tmp_path) -> None:
    for version in (10, 20, 30):
        for job in ("one", "two"):
            save(tmp_path, version, keep=1, job=job)
    save(tmp_path, 40, keep=1, job="two")
    for job, version in (("one", 30), ("two", 40)):
        chosen, passed_over = folder.newest_valid(tmp_path, job, is_full=True)
        assert chosen is not None
        assert (chosen.manifest.job, chosen.manifest.version) == (job, version)
        assert [reason.startswith("belongs to job") for _, reason in passed_over] == [True]
        assert_holds(chosen.path, version)


def test_a_full_disk_costs_the_new_checkpoint_only(tmp_path) -> None:
    disk = tmp_path / "disk"
    with small_disk(disk, 1024):
        before = save(disk, 10)
        was = tree(disk)
        large = {**state_of(20), "large": torch.zeros(300_000)}
        with pytest.raises(
            CheckpointError,
            match=r"job job: checkpoint step-000000000020.*rank 0: "
            r".*could not be written: No space left on "
            r"device",
        ):
            write(draft_of(disk, 20), 0, large)
        assert tree(disk) == was
        # Of two writers the second finds the disk full: it tells the first, which removes its part
        # too.
        draft = draft_of(disk, 20, writers=(0, 1))
        write(draft, 0, {"weight": state_of(20)["weight"]})
        with pytest.raises(CheckpointError, match=r"rank 1: .*No space left"):
            write(draft, 1, {"large": torch.zeros(600_000), "weight": state_of(20)["weight"]})
        assert not list(draft.path.glob("__1_*"))
        with pytest.raises(CheckpointError, match=r"rank 1: .*No space left"):
            publish(draft)
        assert tree(disk) == was
        # The disk is full when it is published.
        draft = draft_of(disk, 20)
        write(draft, 0, state_of(20))
        filler = disk / "filler"
        with filler.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
            while True:
                file.write(bytes(4096))
        with pytest.raises(CheckpointError, match="could not be written: No space left on device"):
            publish(draft)
        filler.unlink()
        assert tree(disk) == was
        chosen, _ = folder.newest_valid(disk, "job", is_full=True)
        assert chosen is not None
        assert chosen.path == before
        assert_holds(save(disk, 30), 30)


def test_a_publisher_that_cannot_write_leaves_the_draft_of_a_dump_to_the_others(tmp_path) -> None:
    """They would fail in their turn, and tell the manager that instead of the reason."""
    with small_disk(tmp_path / "disk", 64):
        draft = draft_of(tmp_path / "disk", 20, writers=(0, 1), kind=Kind.DUMP)
        draft.join(1)
        with pytest.raises(CheckpointError, match=r"rank 0: .*No space left on device"):
            write(draft, 0, {"large": torch.zeros(300_000)})
        assert draft.path.is_dir()
        assert not list(draft.path.glob("__0_*"))
        draft.withdraw()
        assert tree(tmp_path / "disk") == {}


def test_a_read_only_folder_is_read_and_not_written(tmp_path) -> None:
    disk = tmp_path / "disk"
    with small_disk(disk, 1024):
        before = save(disk, 10)
        draft = draft_of(disk, 15)
        write(draft, 0, state_of(15))
        remounted_read_only(disk)
        was = tree(disk)
        with pytest.raises(
            CheckpointError,
            match=r"rank 0: .*\.step-000000000020.*could not be "
            r"written: Read-only file system",
        ):
            write(draft_of(disk, 20), 0, state_of(20))
        with pytest.raises(CheckpointError, match="Read-only file system"):
            publish(draft)
        chosen, _ = folder.newest_valid(disk, "job", is_full=True)
        assert chosen is not None
        assert chosen.path == before
        assert_holds(before, 10)
        assert tree(disk) == was


def test_a_directory_that_cannot_be_made_is_named(tmp_path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        CheckpointError,
        match=r"rank 0: .*file.*could not be written: Not a "
        r"directory",
    ):
        save(tmp_path / "file" / "checkpoints", 1)


# ---------------------------------------------------------------- pickled code


class Evil:
    """Makes a file when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return os.mkdir, (self.path,)


def stored_at(path: pathlib.Path, name: str) -> tuple[pathlib.Path, Any]:
    from taskd.checkpoint import metadata

    storage = metadata.read(path, manifest.read(path)).storage_data
    (place,) = (info for index, info in storage.items() if index.fqn == name)
    return path / place.relative_path, place


def put_into(path: pathlib.Path, name: str, data: bytes) -> None:
    """Replace what is stored under a name, with offsets, sizes and checksums that are right."""
    file, place = stored_at(path, name)
    metadata = pickle.loads((path / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        if info.relative_path == file.name and info.offset == place.offset:
            info.offset, info.length = os.path.getsize(file), len(data)
    replaced(path, file.name, file.read_bytes() + data)
    replaced(path, ".metadata", pickle.dumps(metadata))


def test_the_evil_object_is_one(tmp_path) -> None:
    pickle.loads(pickle.dumps(Evil(str(tmp_path / "proof"))))
    assert (tmp_path / "proof").exists()


@pytest.mark.parametrize("place", [
    lambda evil: evil,
    lambda evil: {"state_dict_metadata": evil},
    lambda evil: ("Metadata", [evil]),
])  # fmt: skip
def test_pickled_code_in_the_metadata_is_not_run(tmp_path, place) -> None:
    before, path = save(tmp_path, 10), save(tmp_path, 20)
    proof = tmp_path / "proof"
    replaced(path, ".metadata", pickle.dumps(place(Evil(str(proof)))))
    for call in (lambda: contents(path), lambda: load(path, {})):
        with pytest.raises(
            CorruptCheckpointError,
            match=r"\.metadata: contains pickled code: "
            r"refused \(posix.mkdir\)",
        ):
            call()
    assert not proof.exists()
    assert_holds(before, 10)


@pytest.mark.parametrize("name", ["schedule", "ranks/0/random", "bias"])
def test_pickled_code_in_a_value_or_a_tensor_is_not_run(tmp_path, name) -> None:
    import io

    path = save(tmp_path, 20)
    proof = tmp_path / "proof"
    buffer = io.BytesIO()
    torch.save(Evil(str(proof)), buffer)
    for data in (buffer.getvalue(), pickle.dumps(Evil(str(proof)))):
        put_into(path, name, data)
        file, _ = stored_at(path, name)
        with pytest.raises(
            CorruptCheckpointError, match=f"{file.name}: {name} contains pickled code: refused"
        ):
            load(path, {"bias": torch.zeros(17, dtype=torch.bfloat16)})
        assert not proof.exists()


@pytest.mark.parametrize(
    "name",
    [
        "os.system",
        "builtins.eval",
        "torch.load",
        "torch.nn.Module",
        "torch.hub.load",
        "torch._C",
    ],
)
def test_only_the_classes_of_the_metadata_are_admitted(tmp_path, name) -> None:
    path = save(tmp_path, 20)
    module, _, attribute = name.rpartition(".")
    replaced(
        path,
        ".metadata",
        b"\x80\x04\x8c"
        + bytes([len(module)])
        + module.encode()
        + b"\x8c"
        + bytes([len(attribute)])
        + attribute.encode()
        + b"\x93.",
    )
    with pytest.raises(CorruptCheckpointError, match="contains pickled code: refused"):
        contents(path)


def changed_metadata(path: pathlib.Path, change: Callable[[Any], Any]) -> None:
    metadata = pickle.loads((path / ".metadata").read_bytes())
    change(metadata)
    replaced(path, ".metadata", pickle.dumps(metadata))


def every_place(metadata: Any, **fields: Any) -> None:
    for info in metadata.storage_data.values():
        vars(info).update(fields)


@pytest.mark.parametrize("change", [
    lambda metadata: every_place(metadata, relative_path="../secret"),
    lambda metadata: every_place(metadata, relative_path="/etc/passwd"),
    lambda metadata: every_place(metadata, relative_path=5),
    lambda metadata: every_place(metadata, offset=-1),
    lambda metadata: every_place(metadata, length=1 << 60),
    lambda metadata: every_place(metadata, offset="1"),
    lambda metadata: every_place(metadata, transform_descriptors=["zstd"]),
    lambda metadata: metadata.storage_data.clear(),
    lambda metadata: setattr(metadata, "storage_data", None),
    lambda metadata: setattr(metadata, "state_dict_metadata", [1]),
    lambda metadata: metadata.state_dict_metadata.update(weight=5),
    lambda metadata: setattr(metadata.state_dict_metadata["weight"], "size", (300, 17)),
    lambda metadata: setattr(metadata.state_dict_metadata["weight"], "chunks", [None]),
    lambda metadata: setattr(metadata.state_dict_metadata["weight"].chunks[0], "sizes",
    torch.Size([300, 18])),
    lambda metadata: setattr(metadata.state_dict_metadata["weight"].chunks[0], "offsets",
    torch.Size([-1, 0])),
    lambda metadata: setattr(metadata.state_dict_metadata["weight"].properties, "dtype", "float32"),
])  # fmt: skip
def test_metadata_that_cannot_be_true_is_refused(tmp_path, change) -> None:
    path = save(tmp_path, 20)
    changed_metadata(path, change)
    with pytest.raises(CorruptCheckpointError, match=r"\.metadata: is damaged"):
        contents(path)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x80\x04.",
        b"\x80\x04K\x01.",
        b"garbage",
        b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7f",
        pickle.dumps([1]),
    ],
)
def test_metadata_that_is_no_metadata_is_refused(tmp_path, data) -> None:
    path = save(tmp_path, 20)
    replaced(path, ".metadata", data)
    with pytest.raises(CorruptCheckpointError, match=r"\.metadata: is damaged"):
        contents(path)


def test_a_tensor_with_holes_is_not_loaded(tmp_path) -> None:
    path = save(tmp_path, 20, kind=Kind.DUMP, writers=(0, 1))
    changed_metadata(path, lambda metadata: metadata.state_dict_metadata["weight"].chunks.pop())
    with pytest.raises(CorruptCheckpointError, match="weight: its pieces do not cover"):
        load(path, {"weight": torch.zeros(300, 17)})


def test_a_tensor_that_is_another_than_the_metadata_says_is_refused(tmp_path) -> None:
    path = save(tmp_path, 20)
    from taskd.checkpoint import values

    for stranger in (torch.ones(16, dtype=torch.bfloat16), torch.ones(17), [1]):
        put_into(path, "bias", values.pack("x", stranger))
        with pytest.raises(CorruptCheckpointError, match="bias"):
            load(path, {"bias": torch.zeros(17, dtype=torch.bfloat16)})


# ---------------------------------------------------------------- parts


@pytest.mark.parametrize("data", [b"", b"[]", b'{"rank": 1}', (b'{"rank": 1, "entries": [1], '
                                                              b'"files": [], "problem": ""}'),
                                  (b'{"rank": 2, "entries": [], "files": [], '
                                  b'"problem": ""}')])  # fmt: skip
def test_a_damaged_part_is_not_published(tmp_path, data) -> None:
    draft = draft_of(tmp_path, 1, writers=(0, 1))
    for rank in draft.writers:
        write(draft, rank, state_of(1))
    draft.part_path(1).write_bytes(data)
    with pytest.raises(CheckpointError, match=r"rank-1.json: (is damaged|was written by rank 2)"):
        publish(draft)
    assert os.listdir(tmp_path) == []


def test_a_data_file_that_was_cut_before_it_was_published_is_noticed(tmp_path) -> None:
    draft = draft_of(tmp_path, 1)
    write(draft, 0, state_of(1))
    os.truncate(draft.path / "__0_0.distcp", 100)
    with pytest.raises(CorruptCheckpointError, match=r"__0_0\.distcp: has 100 bytes"):
        publish(draft)
    assert os.listdir(tmp_path) == []
