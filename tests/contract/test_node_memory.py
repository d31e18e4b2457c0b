"""Snapshots that outlive their agent: real files, locks and processes.

An agent of node 1 was lost; another one has its place, on the same host or with the same volume.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from taskd.testing.clock import FakeClock
from testbed.proc import open_files
from tests.contract.memory_agents import KEPT_S, Agent, agents_in, files_in, folder, quick
from tests.native.arenas import patterned

if TYPE_CHECKING:
    import pathlib

__all__ = ["folder", "quick"]

_HOLDER = """
import os, sys
fd = int(sys.argv[1])
print("ready", flush=True)
sys.stdin.read()
"""


# ---------------------------------------------------------------- the same host


def test_the_next_agent_has_what_the_lost_one_has_left(folder: pathlib.Path) -> None:
    Agent(folder, "first").snapshot(3, 6, 9).die()
    second = Agent(folder, "second", "first")
    assert second.has_taken_over == [True, True]
    assert second.versions == [(6, 9), (6, 9)]
    for local_rank in range(2):
        assert second.arenas[local_rank].verify() == []
        assert second.content(local_rank, 9) == patterned(9 + local_rank)
    assert agents_in(folder) == ["second"]
    second.snapshot(12)
    second.die()
    third = Agent(folder, "third", "second")
    assert third.versions == [(9, 12), (9, 12)]
    third.end()
    assert list(folder.iterdir()) == []


def test_nothing_of_an_older_one_is_used_and_it_is_removed(folder: pathlib.Path) -> None:
    Agent(folder, "first").snapshot(9).die()
    third = Agent(folder, "third", "second")  # "second" was on another host
    assert (third.has_taken_over, third.versions) == ([False, False], [(), ()])
    assert agents_in(folder) == ["third"]
    third.end()


def test_a_job_that_begins_removes_what_its_place_had(folder: pathlib.Path) -> None:
    Agent(folder, "first").snapshot(9).die()
    second = Agent(folder, "second")
    assert (second.has_taken_over, second.versions) == ([False, False], [(), ()])
    assert agents_in(folder) == ["second"]
    second.end()


def test_a_replaced_pod_has_nothing(folder: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("one", "two"):
        (folder / name).mkdir()
    Agent(folder / "one", "first").snapshot(9).die()
    second = Agent(folder / "two", "second", "first")
    assert (second.has_taken_over, second.versions) == ([False, False], [(), ()])
    assert "nothing of the agent that was lost (first) is in the node memory here" in caplog.text
    second.end()


@pytest.mark.parametrize("name", ["../private", "..", ".", "/etc", "a/b", "first\n"])
def test_a_name_that_is_none_is_nobodys(folder: pathlib.Path, name: str) -> None:
    """What the manager says may come from a stranger."""
    (folder / "private").mkdir(mode=0o700)
    (folder / "private" / "key").touch()
    second = Agent(folder, "second", name).snapshot(3)
    assert second.has_taken_over == [False, False]
    second.end()
    assert files_in(folder) == ["key"]


def test_a_folder_that_is_removed_while_it_is_made_is_made_again(
    folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By another torchrun of the place, which finds it empty."""
    before, removals = os.mkdir, ["second", "taskd"]

    def made(name: str, *arguments: int, dir_fd: int) -> None:
        before(name, *arguments, dir_fd=dir_fd)
        if removals and name.startswith(removals[-1]):
            removals.pop()
            os.rmdir(name, dir_fd=dir_fd)

    monkeypatch.setattr(os, "mkdir", made)
    second = Agent(folder, "second").snapshot(3)
    assert removals == []
    assert len(files_in(folder)) == 6
    second.end()
    assert open_files(str(folder)) == []


def test_another_place_or_job_has_other_folders(folder: pathlib.Path) -> None:
    Agent(folder, "first").snapshot(9).die()
    for other in (
        Agent(folder, "second", "first", node_rank=0),
        Agent(folder, "second", "first", job="other"),
    ):
        assert other.versions == [(), ()]
        other.end()
    second = Agent(folder, "second", "first")
    assert second.versions == [(9,), (9,)]
    second.end()


def test_ranks_that_start_anew_have_new_files(folder: pathlib.Path) -> None:
    """All processes were replaced, and what was is not to be believed."""
    Agent(folder, "first").snapshot(9).die()
    second = Agent(folder, "second", "first")
    for local_rank in range(2):
        second.arenas[local_rank].close()
        second.folder.discard(local_rank)
        second.arenas[local_rank], is_left = second.folder.arenas(local_rank, "first")
        assert not is_left
    assert second.versions == [(), ()]
    assert len(files_in(folder)) == 6
    second.snapshot(3).die()
    third = Agent(folder, "third", "second")
    assert third.versions == [(3,), (3,)]
    third.end()


def test_a_damaged_snapshot_is_as_good_as_none(folder: pathlib.Path) -> None:
    first = Agent(folder, "first").snapshot(6, 9)
    data = patterned(9)["tensor.0"]
    arena = first.arenas[0].find(9)
    assert arena is not None
    at = os.pread(arena.fd, os.fstat(arena.fd).st_size, 0).index(data)
    os.pwrite(arena.fd, b"?", at + 1_000_000)
    first.die()
    second = Agent(folder, "second", "first")
    (problem,) = second.arenas[0].verify()
    assert "version 9" in problem and "tensor.0" in problem
    assert second.versions == [(6,), (6, 9)]
    second.end()


def test_files_that_are_missing_or_cut_are_as_good_as_none(folder: pathlib.Path) -> None:
    Agent(folder, "first").snapshot(9).die()
    (own,) = folder.glob("taskd-*/first")
    (own / "0-1-0").unlink()
    os.truncate(own / "1-2-0", 5000)
    second = Agent(folder, "second", "first")
    assert second.versions == [(), ()]
    assert "was cut" in second.arenas[1].verify()[0]
    second.snapshot(3)
    assert second.versions == [(3,), (3,)]
    second.end()


# ---------------------------------------------------------------- who lives


def test_a_living_agent_keeps_its_folder(
    folder: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It was cut off, and the manager has lost it: two torchruns with one index on a host."""
    first = Agent(folder, "first").snapshot(9)
    second = Agent(folder, "second", "first")
    assert (second.has_taken_over, second.versions) == ([False, False], [(), ()])
    assert "does not use the node memory of the agent that was lost (first): that agent still " in (
        caplog.text
    )
    third = Agent(folder, "third")
    assert agents_in(folder) == ["first", "second", "third"]
    assert first.versions == [(9,), (9,)]
    for one in (first, second, third):
        one.end()
    assert list(folder.iterdir()) == []


def test_a_worker_that_outlives_its_agent_keeps_its_files_from_others(
    folder: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It was stopped when its life pipe closed: it may go on to write at any time."""
    first = Agent(folder, "first").snapshot(9)
    descriptor = first.arenas[0].descriptors[0]
    command = [sys.executable, "-c", _HOLDER, str(descriptor)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[descriptor]
    ) as worker:
        assert worker.stdout is not None
        assert worker.stdout.readline() == b"ready\n"
        first.die()
        second = Agent(folder, "second", "first")
        assert (second.has_taken_over, second.versions) == ([False, True], [(), (9,)])
        assert "local rank 0" in caplog.text
        assert "a process of that agent still has 0-1-0 open" in caplog.text
        worker.kill()
    second.snapshot(12)
    assert second.versions == [(12,), (9, 12)]
    second.end()


def test_an_agent_that_is_killed_leaves_it_to_the_next(folder: pathlib.Path) -> None:
    """With SIGKILL, and by another process: the kernel drops the locks."""
    code = (
        "import sys; sys.path[:0] = sys.argv[3:]\n"
        "from tests.contract.memory_agents import Agent\n"
        "agent = Agent(sys.argv[1], sys.argv[2]).snapshot(6, 9)\n"
        "print('ready', flush=True)\n"
        "sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", code, str(folder), "first", *sys.path]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGKILL)
    second = Agent(folder, "second", "first")
    assert second.versions == [(6, 9), (6, 9)]
    assert second.content(1, 6) == patterned(7)
    second.end()


# ---------------------------------------------------------------- what is left is removed


def test_other_places_are_removed_when_their_job_waits_no_more(
    folder: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = FakeClock()
    other = Agent(folder, "other", job="other", clock=clock)
    clock.advance(10 * KEPT_S)
    other.folder.give_sign()
    other.die()
    clock.advance(KEPT_S + 59)
    Agent(folder, "first", clock=clock).end()
    assert agents_in(folder) == ["other"]
    assert "node memory of a dead agent (other) is kept for another 1 s" in caplog.text
    clock.advance(2)
    Agent(folder, "second", clock=clock).end()
    assert list(folder.iterdir()) == []


def test_one_that_lives_is_not_removed_however_long_it_is_silent(folder: pathlib.Path) -> None:
    clock = FakeClock()
    other = Agent(folder, "other", job="other", clock=clock)
    clock.advance(10 * KEPT_S)
    Agent(folder, "first", clock=clock).end()
    assert agents_in(folder) == ["other"]
    other.end()


def test_one_that_died_before_its_first_sign_is_given_that_time(folder: pathlib.Path) -> None:
    clock = FakeClock()
    Agent(folder, "other", job="other", clock=clock).die()
    (left,) = folder.glob("taskd-*/other")
    os.utime(left)  # by the clock of people
    Agent(folder, "first", clock=clock).end()
    clock.advance(KEPT_S + 1)
    assert agents_in(folder) == ["other"]
    Agent(folder, "second", clock=clock).end()
    assert list(folder.iterdir()) == []


def test_what_is_none_of_ours_stays(folder: pathlib.Path) -> None:
    (folder / "mine").mkdir()
    (folder / "taskd-file").touch()
    (folder / "taskd-link").symlink_to(folder / "mine")
    (folder / "mine" / "precious").touch()
    (folder / "taskd-open").mkdir(mode=0o700)
    (folder / "taskd-open" / "shared").mkdir()
    (folder / "taskd-open").chmod(0o777)
    clock = FakeClock()
    clock.advance(10 * KEPT_S)
    Agent(folder, "first", clock=clock).end()
    names = ["mine", "taskd-file", "taskd-link", "taskd-open"]
    assert sorted(path.name for path in folder.iterdir()) == names
    assert files_in(folder) == ["precious", "taskd-file"]
    assert (folder / "taskd-open" / "shared").is_dir()
