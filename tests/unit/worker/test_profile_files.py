"""Where the profile of a process is written, and what of it is removed again."""

from __future__ import annotations

import os
import stat
import time
from typing import TYPE_CHECKING

import pytest

from taskd.worker.profiling import files as profile_files
from taskd.worker.profiling.files import ProfileFiles, open_folder, part_of_path

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Iterator

LIMIT_S = 30.0


@pytest.fixture
def files(tmp_path: pathlib.Path) -> Iterator[ProfileFiles]:
    made = ProfileFiles(tmp_path / "profiles", "job", 0, lambda: b"head\n")
    yield made
    made.close()


def test_modes_do_not_depend_on_the_umask(tmp_path: pathlib.Path, files: ProfileFiles) -> None:
    former = os.umask(0o077)
    try:
        files.open()
    finally:
        os.umask(former)
    folder = tmp_path / "profiles" / "job" / "0"
    (file,) = folder.iterdir()
    assert abs(int(file.name) - time.time()) < LIMIT_S
    assert stat.S_IMODE(file.stat().st_mode) == 0o644
    for directory in (folder, folder.parent, folder.parent.parent):
        assert stat.S_IMODE(directory.stat().st_mode) == 0o755


def test_the_next_file_after_10_mib(tmp_path: pathlib.Path, files: ProfileFiles) -> None:
    files.open()
    chunk = b"x" * (1 << 20)
    begun = [files.write(chunk) for _ in range(25)]
    assert sum(begun) == 2
    sizes = [
        path.stat().st_size
        for path in sorted((tmp_path / "profiles/job/0").iterdir(), key=lambda path: int(path.name))
    ]
    assert len(sizes) == 3
    assert all(size <= profile_files.MAX_FILE_BYTES for size in sizes)
    assert sum(sizes) == 25 * (1 << 20) + 3 * len(b"head\n")


def test_a_folder_that_was_removed_meanwhile_is_made_again(
    tmp_path: pathlib.Path, files: ProfileFiles
) -> None:
    files.open()
    for path in (tmp_path / "profiles/job/0").iterdir():
        path.unlink()
    (tmp_path / "profiles/job/0").rmdir()
    assert files.write(b"line\n")
    (file,) = (tmp_path / "profiles/job/0").iterdir()
    assert file.read_bytes() == b"head\nline\n"


@pytest.mark.parametrize("part", ["", "job", "job/0"])
def test_a_symbolic_link_from_the_base_on_is_refused(
    tmp_path: pathlib.Path, files: ProfileFiles, part: str
) -> None:
    (tmp_path / "elsewhere").mkdir()
    link = tmp_path / "profiles" / part
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match=r"Not a directory|Too many levels"):
        files.open()
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_symbolic_link_in_place_of_a_file_is_not_followed(
    tmp_path: pathlib.Path, files: ProfileFiles
) -> None:
    os.close(open_folder(tmp_path / "profiles", "job", "0"))
    now = int(time.time())
    for second in range(now - 1, now + 60):
        (tmp_path / "profiles/job/0" / str(second)).symlink_to(tmp_path / "victim")
    files.open()
    assert not (tmp_path / "victim").exists()


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("a/../../b", "a_.._.._b"),
        ("..", "_"),
        ("", "_"),
        (".", "_"),
        ("ä b\n", "ä_b_"),
        ("x" * 999, "x" * 200),
    ],
)
def test_a_job_s_name_cannot_lead_out_of_the_folder(name: str, part: str) -> None:
    assert part_of_path(name) == part


def fill(folder: pathlib.Path, count: int, size: int = 1 << 20, first: int = 1000) -> None:
    folder.mkdir(parents=True)
    for second in range(first, first + count):
        (folder / str(second)).write_bytes(b"\0" * size)


def names(folder: pathlib.Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_above_the_limit_a_rank_removes_the_oldest_fifth_of_its_own_files_in_each_job(
    tmp_path: pathlib.Path, files: ProfileFiles
) -> None:
    base = tmp_path / "profiles"
    fill(base / "job/0", 11)
    fill(base / "job/1", 11)
    fill(base / "old/0", 4)
    fill(base / "few/0", 3)
    (base / "job/0/parallel_group.json").write_text("{}")
    (base / "job/0/1000.txt").write_text("mine")
    (base / "job/0/999").symlink_to(tmp_path)
    assert files.trim(30) == 0
    assert files.trim(28) == 3
    assert names(base / "job/0") == sorted(
        [*map(str, range(1002, 1011)), "parallel_group.json", "1000.txt", "999"]
    )
    assert len(names(base / "job/1")) == 11
    assert names(base / "old/0") == ["1001", "1002", "1003"]
    assert len(names(base / "few/0")) == 3
    while files.trim(1):
        pass
    assert len([name for name in names(base / "job/0") if name.isdigit() and name != "999"]) == 3
    assert "parallel_group.json" in names(base / "job/0")


def test_the_file_that_is_being_written_is_never_removed(
    tmp_path: pathlib.Path, files: ProfileFiles
) -> None:
    fill(tmp_path / "profiles/job/0", 4, first=int(time.time()) + 1000)
    files.open()
    files.write(b"x" * 1000)
    own = os.path.basename(files.path)
    assert own == min(names(tmp_path / "profiles/job/0"), key=int)
    assert files.trim(0) == 0
    assert own in names(tmp_path / "profiles/job/0")
