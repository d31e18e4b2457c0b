"""The profile of one process.

Which lines, in which files, within which limits, and what happens when they cannot be written.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import threading
import time
from traceback import format_stack
from typing import TYPE_CHECKING

import pytest

from taskd.native.black_box import BlackBox, Phase
from taskd.worker.life import Life
from taskd.worker.profiling import files as profile_files
from taskd.worker.profiling import marks
from taskd.worker.profiling import profiler as profiling
from taskd.worker.profiling.profiler import Profiler
from tests.disks import small_disk
from tests.unit.worker.rings import Ring

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Iterator

LIMIT_S = 30.0


def _stacks() -> str:
    frames = sys._current_frames().items()
    return "\n".join(f"{thread}:\n{''.join(format_stack(frame))}" for thread, frame in frames)


def until(fact, what: str = "") -> None:
    deadline = time.monotonic() + LIMIT_S
    while not fact():
        assert time.monotonic() < deadline, f"waited in vain for {what or fact}\n{_stacks()}"
        time.sleep(0.002)


class Fixture:
    """A profiler of a life with a real black box, and what it said."""

    def __init__(self, directory: pathlib.Path) -> None:
        self.base = directory / "profiles"
        self.box = BlackBox.create()
        self.life = Life(rank=3, world_size=4, incarnation=0, box=self.box)
        self.said: list[int] = []
        self.profiler = Profiler(
            self.life.profiling, self.box, 3, "a/job", 1, str(directory), self.said.append
        )

    def switch(self, code: int) -> int:
        """Its answer."""
        before = len(self.said)
        self.profiler.switch(code)
        until(lambda: len(self.said) > before, f"an answer to {code}")
        return self.said[-1]

    @property
    def folder(self) -> pathlib.Path:
        return self.base / "a_job" / "3"

    def lines(self) -> list[dict]:
        files = (
            sorted(self.folder.iterdir(), key=lambda path: int(path.name))
            if self.folder.exists()
            else []
        )
        return [json.loads(line) for path in files for line in path.read_text().splitlines()]

    def marks(self) -> list[tuple]:
        return [
            (line["Name"], {2: "start", 4: "end"}[line["Flag"]], line["Id"])
            for line in self.lines()
            if "Clock" not in line
        ]

    def close(self) -> None:
        thread = self.profiler._thread
        self.profiler.close()
        if thread is not None:
            thread.join(LIMIT_S)
            assert not thread.is_alive()
        self.box.close()


@pytest.fixture
def fixture(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fixture]:
    monkeypatch.setenv("TASKD_PROFILING_PATH", str(tmp_path / "profiles"))
    made = Fixture(tmp_path)
    yield made
    made.close()


# ---------------------------------------------------------------- marks


def test_off_there_is_no_thread_no_file_and_nothing_in_the_life(fixture: Fixture) -> None:
    fixture.life.mark(Phase.FORWARD)
    assert fixture.life.profiling.profile is None
    assert fixture.box.phase is Phase.FORWARD
    assert fixture.profiler._thread is None
    assert not fixture.base.exists()


def test_phases_become_ranges_with_one_id_for_both_ends(fixture: Fixture) -> None:
    assert fixture.switch(710) == 1410
    life = fixture.life
    assert life.profiling.profile is not None
    for version in (1, 2):
        for phase in (Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER):
            life.mark(phase)
        life.profiling.profile.step(version)
        life.mark(Phase.STEP)
    life.mark(Phase.CHECKPOINT)
    life.mark(Phase.STEP)
    assert fixture.switch(700) == 1400
    assert life.profiling.profile is None
    assert fixture.marks() == [
        ("DataLoader", "start", 1),
        ("DataLoader", "end", 1),
        ("FP", "start", 2),
        ("FP", "end", 2),
        ("Step", "start", 3),
        ("DataLoader", "start", 4),
        ("DataLoader", "end", 4),
        ("FP", "start", 5),
        ("FP", "end", 5),
        ("Step", "end", 3),
        ("Step", "start", 6),
        ("SaveCheckpoint", "start", 7),
        ("SaveCheckpoint", "end", 7),
    ]
    times = [line["Timestamp"] for line in fixture.lines()]
    assert times == sorted(times)
    assert abs(times[-1] - time.time_ns()) < LIMIT_S * 1e9


def test_a_line_has_the_fields_of_the_contract(fixture: Fixture) -> None:
    fixture.switch(710)
    fixture.life.mark(Phase.FORWARD)
    fixture.switch(700)
    head, line = fixture.lines()
    assert set(line) == {
        "Kind",
        "Flag",
        "SourceKind",
        "Timestamp",
        "Id",
        "MsptiObjectId",
        "Name",
        "Domain",
    }
    assert line["MsptiObjectId"] == {
        "Pt": {"ProcessId": os.getpid(), "ThreadId": os.getpid()},
        "Ds": {"DeviceId": 1, "StreamId": 0},
    }
    assert (line["Kind"], line["Flag"], line["SourceKind"], line["Name"], line["Domain"]) == (
        1,
        2,
        0,
        "FP",
        "default",
    )
    assert set(line) < set(head)
    assert (head["Clock"]["Job"], head["Clock"]["Rank"]) == ("a/job", 3)
    assert abs(head["Clock"]["OffsetNs"] - (time.time_ns() - time.monotonic_ns())) < 1e9


def test_what_an_interrupt_cuts_off_has_no_end(fixture: Fixture) -> None:
    fixture.switch(710)
    fixture.life.profiling.profile.step(1)
    for phase in (
        Phase.FORWARD,
        Phase.PAUSED,
        Phase.ENTERED,
        Phase.STEP,
        Phase.FORWARD,
        Phase.BACKWARD,
    ):
        fixture.life.mark(phase)
    fixture.life.profiling.profile.step(2)
    fixture.switch(700)
    assert fixture.marks() == [
        ("Step", "start", 1),
        ("FP", "start", 2),
        ("Step", "start", 3),
        ("FP", "start", 4),
        ("FP", "end", 4),
        ("Step", "end", 3),
        ("Step", "start", 5),
    ]


def test_on_off_on_is_two_files_and_ids_go_on(fixture: Fixture) -> None:
    for _ in range(2):
        assert fixture.switch(710) == 1410
        fixture.life.mark(Phase.FORWARD)
        assert fixture.switch(700) == 1400
    assert len(list(fixture.folder.iterdir())) == 2
    assert fixture.marks() == [("FP", "start", 1), ("FP", "start", 2)]


def test_switching_as_fast_as_one_can_ends_as_the_last_wish_says(fixture: Fixture) -> None:
    for code in itertools.islice(itertools.cycle((710, 700, 711, 701)), 401):
        fixture.profiler.switch(code)
    until(
        lambda: fixture.said and fixture.said[-1] == 1410 and fixture.profiler._answered == 401,
        "the last answer",
    )
    assert fixture.life.profiling.profile is not None
    assert fixture.switch(700) == 1400
    assert fixture.life.profiling.profile is None
    until(lambda: fixture.profiler._thread is None, "the end of the thread")


def test_a_code_that_is_none_is_passed_over(fixture: Fixture) -> None:
    fixture.profiler.switch(702)
    assert fixture.profiler._thread is None
    assert fixture.said == []


def test_what_was_marked_is_written_when_the_process_ends(tmp_path: pathlib.Path) -> None:
    code = (
        "from taskd.worker.life import Life; from taskd.native.black_box import Phase\n"
        "from taskd.worker.profiling import profiler as module\n"
        f"module._END_S = {LIMIT_S}\n"  # a thread that stands still for a second loses them
        "import threading\nlife = Life(rank=0, world_size=1, incarnation=0); said = "
        "threading.Event()\n"
        f"profiler = module.Profiler(life.profiling, None, 0, 'job', 0, {str(tmp_path)!r}, "
        "lambda status: said.set())\n"
        "profiler.switch(710); said.wait(30)\n"
        "life.mark(Phase.FORWARD)\n"
    )
    env = {
        name: value
        for name, value in os.environ.items()
        if name not in ("TASKD_PROFILING_PATH", "GROUP_BASE_DIR")
    }
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, env=env, cwd=tmp_path)
    (file,) = (tmp_path / "taskd_profiling" / "job" / "0").iterdir()
    assert '"FP"' in file.read_text()


def test_marks_beyond_the_limit_are_dropped_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(marks, "MAX_MARKS", 5)
    profile = marks.Profile()
    for version in range(7):
        profile.mark(Phase.FORWARD, 1)
        profile.step(version)
    assert len(profile.marks) == 5
    assert profile.dropped == 9


def test_the_limit_holds_while_marks_come_in(
    fixture: Fixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profile_files, "MAX_FILE_BYTES", 100_000)
    monkeypatch.setattr(profiling, "BUFFER_BYTES", 20_000)
    fixture.life.profiling.limit_mb = 1
    fixture.switch(710)
    for _ in range(20):
        for _ in range(500):
            fixture.life.mark(Phase.FORWARD)
            fixture.life.mark(Phase.BACKWARD)
        profile = fixture.life.profiling.profile
        fixture.profiler._wake.set()
        until(lambda profile=profile: not profile.marks, "the marks to be taken")
    fixture.switch(700)
    sizes = [path.stat().st_size for path in fixture.folder.iterdir()]
    assert 0 < sum(sizes) < 1.3 * 1024 * 1024
    assert fixture.lines()[-1]["Id"] == 10_000


# ---------------------------------------------------------------- when it cannot be written


def test_a_folder_that_cannot_be_made_is_an_exception_and_one_line(
    tmp_path, monkeypatch, caplog
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("TASKD_PROFILING_PATH", str(tmp_path / "file" / "profiles"))
    fixture = Fixture(tmp_path)
    for _ in range(3):
        assert fixture.switch(710) == 1420
        assert fixture.life.profiling.profile is None
    assert fixture.switch(711) == 1422
    assert (
        len([record for record in caplog.records if "profiling does not work" in record.message])
        == 1
    )
    (tmp_path / "file").unlink()
    assert fixture.switch(710) == 1410, "the manager asks again, and now it works"
    assert fixture.switch(700) == 1400
    fixture.close()


def test_a_full_disk_is_an_exception_and_the_lines_before_it_are_whole(
    fixture: Fixture, monkeypatch, caplog
) -> None:
    monkeypatch.setattr(profiling, "BUFFER_BYTES", 20_000)
    with small_disk(fixture.base, 256):
        assert fixture.switch(710) == 1410
        profile = fixture.life.profiling.profile
        until_full = itertools.count()
        while fixture.life.profiling.profile is not None:
            assert next(until_full) < 1_000_000
            fixture.life.mark(Phase.FORWARD)
            fixture.life.mark(Phase.BACKWARD)
            if len(profile.marks) > 200:
                fixture.profiler._wake.set()
                time.sleep(0.001)
        until(lambda: fixture.said[-1] == 1420, "the status")
        assert len([record for record in caplog.records if "No space left" in record.message]) == 1
        fixture.life.mark(Phase.FORWARD)
        assert len(fixture.lines()) > 100
        for path in fixture.folder.iterdir():
            path.unlink()
        assert fixture.switch(710) == 1410
        assert fixture.switch(700) == 1400


def test_a_read_only_disk_is_an_exception(fixture: Fixture) -> None:
    with small_disk(fixture.base, 256, "ro"):
        assert fixture.switch(711) == 1422
        assert fixture.life.profiling.profile is None
        assert fixture.switch(700) == 1400


def test_no_thread_can_be_started(fixture: Fixture, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    fixture.profiler.switch(710)
    assert fixture.said == [1420]
    monkeypatch.undo()
    os.environ["TASKD_PROFILING_PATH"] = str(fixture.base)
    try:
        assert fixture.switch(710) == 1410
        assert fixture.switch(700) == 1400
    finally:
        del os.environ["TASKD_PROFILING_PATH"]


# ---------------------------------------------------------------- collectives


def test_communication_is_written_with_what_is_known_of_it(fixture: Fixture) -> None:
    ring = Ring(fixture.box)
    assert fixture.switch(711) == 1411
    index = ring.call(enter=1000)
    until(lambda: index in fixture.profiler._encoder._calls, "the beginning to be seen")
    ring.leave(index, 1000, 5000)
    until(lambda: index not in fixture.profiler._encoder._calls, "the end to be seen")
    fixture.switch(700)
    begun, ended = (line for line in fixture.lines() if line["Domain"] == "communication")
    assert (begun["Name"], begun["Flag"], ended["Flag"], begun["Id"]) == (
        "ncclAllReduce",
        2,
        4,
        ended["Id"],
    )
    assert ended["Timestamp"] - begun["Timestamp"] == 4000
    assert begun["Call"] == {
        "Communicator": f"{0xAB:016x}",
        "Number": 1,
        "Bytes": 4096,
        "DType": 7,
        "Peer": None,
    }


def test_communication_alone_leaves_the_main_thread_in_peace(fixture: Fixture) -> None:
    assert fixture.switch(701) == 1401
    assert fixture.life.profiling.profile is None
    assert fixture.switch(711) == 1411
    assert fixture.life.profiling.profile is not None
    assert fixture.switch(701) == 1401
    assert fixture.life.profiling.profile is None


@pytest.mark.parametrize("backend", ["nccl", "hccl", "cpu:gloo,cuda:nccl"])
def test_a_device_backend_needs_the_library_preloaded(
    fixture: Fixture, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    monkeypatch.setattr(profiling, "_backend", lambda: backend)
    monkeypatch.setattr(profiling.library, "require_preloaded", lambda feature: False)
    assert fixture.switch(711) == 1412
    assert fixture.life.profiling.profile is not None
    assert fixture.switch(701) == 1402
    monkeypatch.setattr(profiling.library, "require_preloaded", lambda feature: True)
    assert fixture.switch(701) == 1401
    assert fixture.switch(700) == 1400


def test_a_backend_that_becomes_known_later_changes_the_status(
    fixture: Fixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiling.library, "require_preloaded", lambda feature: False)
    assert fixture.switch(711) == 1411
    monkeypatch.setattr(profiling, "_backend", lambda: "nccl")
    until(lambda: fixture.said[-1] == 1412, "the status")


# ---------------------------------------------------------------- settings


def test_the_limit_is_that_of_init_taskd_worker(
    fixture: Fixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from taskd import api
    from taskd.worker import life

    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    life.set_current(fixture.life)
    try:
        assert fixture.life.profiling.limit_mb == 5000
        assert api.init_taskd_worker(3, 77)
        assert fixture.life.profiling.limit_mb == 77
        assert api.destroy_taskd_worker()
    finally:
        life.set_current(None)
