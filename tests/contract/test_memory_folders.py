"""Folders for snapshots that cannot be used, or not by this user, and what is left behind."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pathlib
import subprocess
import sys

import pytest

from taskd.worker.life import Saving
from testbed.proc import open_files
from tests.contract.memory_agents import Agent, agents_in, folder, quick
from tests.native.arenas import patterned

__all__ = ["folder", "quick"]

NOBODY = 65534
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="needs root: another user's folder")


def _file(folder: pathlib.Path) -> pathlib.Path:
    (folder / "file").touch()
    return folder / "file"


def _link(folder: pathlib.Path) -> pathlib.Path:
    (folder / "true").mkdir()
    (folder / "link").symlink_to(folder / "true")
    return folder / "link"


def _on_disk(_: pathlib.Path) -> pathlib.Path:
    return pathlib.Path(__file__).parent


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda folder: folder / "none", "it is not there"),
        (_file, "it is no folder, or a symbolic link"),
        (_link, "it is no folder, or a symbolic link"),
        (_on_disk, "not on a tmpfs"),
    ],
    ids=["missing", "file", "link", "disk"],
)
def test_arenas_are_as_without_one_and_that_is_said_once(
    folder: pathlib.Path, caplog: pytest.LogCaptureFixture, make, why: str
) -> None:
    agent = Agent(make(folder), "first", "former").snapshot(9)
    assert agent.versions == [(9,), (9,)]
    (line,) = (one.getMessage() for one in caplog.records if one.levelname == "WARNING")
    assert line.startswith("node 1: snapshots are kept as without TASKD_NODE_MEMORY=")
    assert why in line
    assert line.endswith("It must be a folder on a tmpfs in which this user may write")
    agent.end()


def test_a_place_that_others_may_write_to_is_not_used(
    folder: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = Agent(folder, "first").snapshot(9)
    first.die()
    (place,) = folder.glob("taskd-*")
    place.chmod(0o770)
    second = Agent(folder, "second", "first")
    assert second.has_taken_over == [False, False]
    assert "belongs to another user, or is open to others" in caplog.text
    second.snapshot(3).end()
    assert agents_in(folder) == ["first"]


def test_a_place_that_is_a_link_is_not_used(
    folder: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    Agent(folder, "first").die()
    (place,) = folder.glob("taskd-*")
    place.rename(folder / "elsewhere")
    place.symlink_to(folder / "elsewhere")
    second = Agent(folder, "second", "first").snapshot(3)
    assert second.versions == [(3,), (3,)]
    assert "snapshots are kept as without" in caplog.text
    second.end()


@needs_root
@pytest.mark.parametrize("what", ["folder", "place", "agent"])
def test_what_belongs_to_another_user_is_not_used(
    folder: pathlib.Path, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    Agent(folder, "first").snapshot(9).die()
    (place,) = folder.glob("taskd-*")
    theirs = {"folder": folder, "place": place, "agent": place / "first"}[what]
    os.chown(theirs, NOBODY, NOBODY)
    second = Agent(folder, "second", "first").snapshot(3)
    assert second.versions == [(3,), (3,)]
    assert "belongs to another user" in caplog.text
    second.end()
    assert (place / "first").is_dir()


@needs_root
def test_a_folder_in_which_this_user_may_not_write(folder: pathlib.Path) -> None:
    folder.chmod(0o755)
    code = (
        "import os, sys; sys.path[:0] = sys.argv[2:]\n"
        "import logging; logging.basicConfig(stream=sys.stdout)\n"
        "from tests.contract.memory_agents import Agent\n"
        f"os.setuid({NOBODY})\n"
        "assert Agent(sys.argv[1], 'first').snapshot(3).versions == [(3,), (3,)]\n"
    )
    command = [sys.executable, "-c", code, str(folder), *sys.path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "Permission denied. It must be a folder on a tmpfs in which this user may write" in (
        done.stdout
    )


@needs_root
def test_a_folder_that_is_full(folder: pathlib.Path) -> None:
    """What fits is used; what does not is refused before anything is lost."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        agent = Agent(folder, "first")
        agent.arenas[0].make(8_000_000)
        with pytest.raises(Exception, match="the mount behind TASKD_NODE_MEMORY leaves"):
            agent.arenas[1].make(8_000_000)
        agent.end()
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_without_a_descriptor_the_error_is_the_callers(
    folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with memory that has no name: the worker cannot be started now, and is later."""
    agent = Agent(folder, "first")
    before = open_files(str(folder))
    assert before

    def none(*_: object) -> int:
        raise OSError("Too many open files")

    monkeypatch.setattr(os, "memfd_create", none)
    monkeypatch.setattr(fcntl, "flock", none)
    with pytest.raises(OSError, match="Too many open files"):
        agent.folder.arenas(5, "")
    assert open_files(str(folder)) == before
    monkeypatch.undo()
    agent.end()


def test_no_descriptor_is_left_behind(folder: pathlib.Path) -> None:
    for former in ("", "first", "none"):
        agent = Agent(folder, "second", former).snapshot(9)
        assert open_files(str(folder))
        agent.end()
        agent.folder.close()
    with contextlib.suppress(OSError):
        Agent(folder / "none", "third").end()
    assert open_files(str(folder)) == []


def test_a_worker_verifies_what_it_takes_over_once(folder: pathlib.Path) -> None:
    """Before it says what it has; what its own agent has made it does not read through."""
    first = Agent(folder, "first").snapshot(6, 9)
    arena = first.arenas[0].find(9)
    assert arena is not None
    data = patterned(9)["tensor.3"]
    at = os.pread(arena.fd, os.fstat(arena.fd).st_size, 0).index(data)
    os.pwrite(arena.fd, b"?", at)
    own = Saving(first.arenas[0])
    assert (own.verify(), own.versions()) == ([], (6, 9))
    left = Saving(first.arenas[0], is_unverified=True)
    (problem,) = left.verify()
    assert "tensor.3" in problem
    assert (left.verify(), left.versions()) == ([], (6,))
    first.end()
