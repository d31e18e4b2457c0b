"""Files of the user's own in a checkpoint.

They come with it, all of them, or not at all, and never cost the tensors.
"""

import os

import pytest
from checkpoints import assert_holds, draft_of, state_of, tree

from taskd.checkpoint import folder
from taskd.checkpoint.publish import publish
from taskd.checkpoint.save import write
from taskd.errors import CorruptCheckpointError


def save(directory, *fills, version=7):
    draft = draft_of(directory, version, writers=tuple(range(len(fills))), world_size=len(fills))
    for rank, fill in enumerate(fills):
        write(
            draft, rank, state_of(version), {f"ranks/{rank}/random": bytes([rank, version])}, fill
        )
    return publish(draft)


def writes(*names):
    def fill(path):
        for name in names:
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (path / name).write_bytes(name.encode() * 1000)

    return fill


def fails(path):
    (path / "half").write_bytes(b"half")
    raise ValueError("no more room")


def links(path):
    os.symlink("/etc/passwd", path / "innocent")


def links_folder(path):
    os.symlink("/etc", path / "innocent")


def test_all_ranks_files_come_together(tmp_path):
    path = save(tmp_path, writes("iter/rank0.pt", "latest"), writes("iter/rank1.pt"), writes())
    found = folder.check(path, "job", is_full=True)
    names = {file.name for file in found.manifest.files if file.name.startswith("user/")}
    assert names == {"user/iter/rank0.pt", "user/iter/rank1.pt", "user/latest"}
    assert (path / "user/iter/rank1.pt").read_bytes() == b"iter/rank1.pt" * 1000
    assert {name for name in os.listdir(path) if name.startswith("user")} == {"user"}
    assert_holds(path, 7, (0, 1, 2))
    (path / "user/iter/rank1.pt").write_bytes(b"iter/rank2.pt" * 1000)
    assert folder.problems(path, is_full=True)[0].startswith(
        f"{path}/user/iter/rank1.pt: its content has changed"
    )


@pytest.mark.parametrize(("fills", "why"), [
    ([writes("a"), fails], "rank 1: no more room"),
    ([writes("same"), writes("same")], "user/same was written by two ranks"),
    ([writes("a"), writes("a/b")], "user/a"),
    ([writes("a"), links], "rank 1: innocent is no regular file"),
    ([writes("a"), links_folder], "rank 1: innocent is no regular file"),
    ([writes("a"), writes("/".join(["x" * 200] * 6))], "its name is too long"),
])  # fmt: skip
def test_what_is_not_whole_is_left_out_and_the_tensors_stay(tmp_path, caplog, fills, why):
    path = save(tmp_path, *fills)
    assert "the files of on_dump() are left out" in caplog.text
    assert why in caplog.text
    assert not [name for name in os.listdir(path) if name.startswith("user")]
    folder.check(path, "job", is_full=True)
    assert_holds(path, 7, (0, 1))
    assert tree(tmp_path).keys() == tree(path.parent).keys()


def test_a_link_in_place_of_their_folder_is_written_through_by_nobody(tmp_path, caplog):
    """Somebody who can make names in the directory puts it there while the draft is written."""
    elsewhere, directory = tmp_path / "elsewhere", tmp_path / "checkpoints"
    elsewhere.mkdir()
    draft = draft_of(directory, 7, writers=(0,), world_size=1)
    write(draft, 0, state_of(7), {"ranks/0/random": bytes([0, 7])}, writes("file"))
    (draft.path / "user").symlink_to(elsewhere)
    path = publish(draft)
    assert "the files of on_dump() are left out" in caplog.text
    assert os.listdir(elsewhere) == []
    assert not os.path.lexists(path / "user")
    assert_holds(path, 7, (0,))


@pytest.mark.parametrize("linked", ["user", "user/iter"])
def test_a_link_in_place_of_a_folder_is_not_read_through(tmp_path, linked):
    directory = tmp_path / "checkpoints"
    path = save(directory, writes("iter/file"))
    moved = tmp_path / "moved"
    (path / linked).rename(moved)
    (path / linked).symlink_to(moved)
    for is_full in (False, True):
        (problem,) = folder.problems(path, is_full=is_full)
        assert problem == f"{path}/user/iter/file: is a symbolic link"
    with pytest.raises(CorruptCheckpointError, match="is a symbolic link"):
        folder.check(path, "job")
    chosen, passed_over = folder.newest_valid(directory, "job")
    assert (chosen, len(passed_over)) == (None, 1)


def test_a_draft_that_is_given_up_takes_them_along(tmp_path):
    draft = draft_of(tmp_path, 7, writers=(0, 1), world_size=2)
    write(draft, 0, state_of(7), {}, writes("deep/er/file"))
    draft.withdraw()
    assert os.listdir(tmp_path) == []
