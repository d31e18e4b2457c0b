"""Profiling of a real job.

Switched on and off while it trains, with a rank that is replaced meanwhile, and where it cannot
write.
"""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from taskd import profiling, trace
from tests.process import harness
from tests.process.test_recovery import reference  # noqa: F401
from tests.unit.test_trace import check_format
from tests.unit.worker.test_profiling import small_disk

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Callable

pytestmark = pytest.mark.slow

LIMIT_S = 60.0
STEPS = "100"


def until(fact: Callable[[], object], job: harness.Job) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not fact():
        assert time.monotonic() < deadline, job.story()
        time.sleep(0.02)


def committed(job: harness.Job) -> int:
    """The newest step that every rank has committed."""
    newest = {fact["rank"]: fact["step"] for fact in job.facts("committed")}
    return min(newest.values()) if len(newest) == 4 else 0


def lives(job: harness.Job, rank: int) -> list[int]:
    """The processes of a rank that have entered the function, the first one first."""
    return [fact["pid"] for fact in job.facts("entered") if fact["rank"] == rank]


def marks(folder: pathlib.Path) -> list[dict]:
    return [
        json.loads(line)
        for path in sorted(folder.iterdir(), key=lambda path: int(path.name))
        for line in path.read_text().splitlines(keepends=True)
        if line.endswith("\n")
    ]


def profiled(folder: pathlib.Path) -> set[int]:
    """The processes that have begun a profile."""
    found = marks(folder) if folder.exists() else []
    return {mark["MsptiObjectId"]["Pt"]["ProcessId"] for mark in found}


@pytest.fixture
def base(tmp_path: pathlib.Path) -> pathlib.Path:
    return tmp_path / "profiles"


@pytest.fixture
def settings(tmp_path: pathlib.Path, base: pathlib.Path) -> dict[str, str]:
    return {
        "STEPS": STEPS,
        "SLEEP_S": "0.05",
        "TASKD_PROFILING_SWITCH": str(tmp_path / "a" / "switch"),
        "TASKD_PROFILING_PATH": str(base),
    }


def command(job: harness.Job, *words: str) -> None:
    assert profiling.main([*words, "--path", job.env["TASKD_PROFILING_SWITCH"]]) == 0


def test_on_and_off_while_the_job_trains(tmp_path, base, settings, reference) -> None:  # noqa: F811
    # Held until it is on, and until it is off.
    with harness.job(tmp_path, **settings, HOLD_AT="20,90") as job:
        manager, agent = job.start_manager(), job.start_agent("train.py")
        until(lambda: committed(job) > 5, job)
        assert not base.exists()
        command(job, "on")
        manager.wait_text("profiling of 4 ranks: default on, communication off", LIMIT_S)
        first = committed(job)
        command(job, "on", "CommunicationOperator")
        manager.wait_text("profiling of 4 ranks: default on, communication on", LIMIT_S)
        job.tell(20)
        until(lambda: committed(job) > first + 25, job)
        command(job, "off")
        manager.wait_text("profiling of 4 ranks: default off, communication off", LIMIT_S)
        sizes = {path: path.stat().st_size for path in base.glob("test-job/*/*")}
        last = committed(job)
        job.tell()
        until(lambda: committed(job) > last + 5, job)
        finished = agent.wait(LIMIT_S)
        assert finished.returncode == 0, finished.output[-4000:]
        assert job.digests() == reference(STEPS=STEPS)
        assert {path: path.stat().st_size for path in base.glob("test-job/*/*")} == sizes, (
            "nothing is written when it is off"
        )
        assert manager.wait(20).returncode == 0
        assert job.leftovers() == set()
    assert sorted(path.name for path in (base / "test-job").iterdir()) == ["0", "1", "2", "3"]
    for rank in range(4):
        folder = base / "test-job" / str(rank)
        assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o644}
        steps = [mark for mark in marks(folder) if mark["Name"] == "Step"]
        assert len(steps) > 40
        versions = [mark["Version"] for mark in steps if "Version" in mark]
        assert versions == list(range(versions[0], versions[0] + len(versions)))
    merger = trace.write_trace(base / "test-job", tmp_path / "trace.json")
    document = json.loads((tmp_path / "trace.json").read_text())
    check_format(document)
    assert merger.events > 4 * 20
    assert {event["pid"] for event in document["traceEvents"] if event["ph"] == "X"} == set(
        range(4)
    )
    assert set(+merger.skipped) <= {"ranges without an end"}
    # All-reduces keep the ranks in step: a commit that is seconds from its peers would mean clocks
    # that do not agree.
    commits: dict[int, list[float]] = {}
    for event in document["traceEvents"]:
        if event["ph"] == "X" and event["name"] == "Step":
            commits.setdefault(event["args"]["version"], []).append(event["ts"])
    spread = sorted(max(ts) - min(ts) for ts in commits.values() if len(ts) == 4)
    assert len(spread) > 10
    assert spread[len(spread) // 2] < 1e6


def test_a_replaced_rank_goes_on_being_profiled(tmp_path, base, settings, reference) -> None:  # noqa: F811
    settings |= {"STEPS": "120", "SLEEP_S": "0", "HOLD_AT": "50"}
    with harness.job(tmp_path, **settings, FAULTS="2@40:forward:kill") as job:
        command(job, "on")  # before anybody is there: whoever comes is told
        manager, agent = job.start_manager(), job.start_agent("train.py")
        until(lambda: len(lives(job, 2)) == 2, job)
        new = lives(job, 2)[-1]
        manager.wait_text("profiling of 4 ranks: default on", LIMIT_S)
        until(lambda: new in profiled(base / "test-job" / "2"), job)
        job.tell()
        finished = agent.wait(LIMIT_S)
        assert finished.returncode == 0, finished.output[-4000:]
        assert len(job.facts("fault")) == 1
        assert job.digests() == reference(STEPS="120")
    found = marks(base / "test-job" / "2")
    own = [mark for mark in found if mark["MsptiObjectId"]["Pt"]["ProcessId"] == new]
    assert len(own) > 60, "the replacement's steps"
    merger = trace.write_trace(base, tmp_path / "trace.json")
    check_format(json.loads((tmp_path / "trace.json").read_text()))
    assert merger.events > 4 * 100


def test_a_job_whose_profiles_cannot_be_written_trains_on(
    tmp_path,
    base,
    settings,
    reference,  # noqa: F811
) -> None:
    settings |= {"STEPS": "120", "HOLD_AT": "100"}
    with small_disk(base, 64, "ro"), harness.job(tmp_path, **settings) as job:
        command(job, "on", "CommunicationOperator")
        manager, agent = job.start_manager(), job.start_agent("train.py")
        manager.wait_text("exception on ranks 0, 1, 2, 3", LIMIT_S)
        assert (
            "profiling does not work everywhere: default exception, communication exception"
        ) in manager.text
        job.tell()
        finished = agent.wait(LIMIT_S)
        assert finished.returncode == 0, finished.output[-4000:]
        assert job.digests() == reference(STEPS="120")
        for rank in range(4):
            assert finished.output.count(f"rank {rank}: profiling does not work: {base}") == 1
        assert "Read-only file system" in finished.output
        assert list(base.iterdir()) == []


# ---------------------------------------------------------------- groups


def run_groups(directory: pathlib.Path, *arguments: str, **env: str) -> str:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node=2",
            str(harness.SCRIPTS / "groups.py"),
            *arguments,
        ],
        env=harness.environment(MINDX_TASK_ID="a job", **env),
        cwd=directory,
        check=True,
        timeout=120,
        capture_output=True,
        text=True,
    )
    assert done.stdout.count("went on") == 2
    return done.stdout + done.stderr


def test_the_groups_of_each_rank_are_written(tmp_path: pathlib.Path) -> None:
    run_groups(tmp_path, "before", GROUP_BASE_DIR=str(tmp_path / "groups"))
    for rank in range(2):
        path = tmp_path / "groups" / "a_job" / str(rank) / "parallel_group.json"
        assert os.listdir(path.parent) == ["parallel_group.json"]
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o755
        groups = json.loads(path.read_text())
        found = {
            group["group_name"]: (group["group_rank"], group["global_ranks"])
            for group in groups.values()
        }
        assert found == {"default_pg": (rank, [0, 1]), "both": (rank, [0, 1])} | (
            {"alone": (0, [0])} if rank == 0 else {}
        )
        assert len(groups) == len(found)


@pytest.mark.parametrize("where", ["", "a_job", "a_job/0", "a_job/0/parallel_group.json"])
def test_a_symbolic_link_is_refused_and_the_script_goes_on(
    tmp_path: pathlib.Path, where: str
) -> None:
    (tmp_path / "elsewhere").mkdir()
    link = tmp_path / "groups" / where
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(
        tmp_path / "elsewhere" if "json" not in where else tmp_path / "elsewhere" / "victim"
    )
    said = run_groups(tmp_path, GROUP_BASE_DIR=str(tmp_path / "groups"))
    assert "dump_group_info: nothing was written" in said
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_the_commands_are_programs(tmp_path: pathlib.Path) -> None:
    env = harness.environment(TASKD_PROFILING_SWITCH=str(tmp_path / "switch"))
    done = subprocess.run(
        [sys.executable, "-m", "taskd.profiling", "on"],
        env=env,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout.splitlines()[1] == "710: default on, communication off"
    assert profiling.main(["status", "--path", str(tmp_path / "switch")]) == 0
    done = subprocess.run(
        [sys.executable, "-m", "taskd.trace", str(tmp_path)],
        env=env,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 1
    assert "holds no profile" in done.stderr
