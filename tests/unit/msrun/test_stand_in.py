"""The agent inside msrun, driven by a launcher with msrun's call-backs, their values and processes.

Real processes, a real manager; MindSpore alone is not there (tests/mindspore has it).
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import re
import select
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from taskd.checkpoint import flat, folder
from taskd.checkpoint.draft import Draft
from taskd.checkpoint.names import Kind
from testbed.processes import free_port

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[2]
LIMIT_S = 120.0
pytestmark = pytest.mark.slow


class Job:
    """One launcher and all that it starts. No step from the sixth on before there is a manager.

    Without one the first death ends the job.
    """

    def __init__(self, path: pathlib.Path, **environment: str) -> None:
        self.path = path
        self.environment = {
            **os.environ, "PYTHONPATH": str(ROOT), "TASKD_PORT": str(free_port()),
            "TASKD_LOG_PATH": str(path / "log"), "MINDX_TASK_ID": "stand-in", "STEPS": "30",
            "GATE": str(path / "go"), **environment,
        }  # fmt: skip
        self.process: subprocess.Popen[str] | None = None
        self.output = ""

    def start(self, way: str = "agent", workers: int = 2) -> Job:
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "launcher.py"), way, str(workers), str(self.path)],
            env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            cwd=self.path,
        )  # fmt: skip
        agent_log = self.path / "log" / "agent-0.log"
        self._wait(lambda: agent_log.exists() and "joined the manager" in agent_log.read_text())
        (self.path / "go").touch()
        return self

    def end(self) -> int:
        """Its exit code. All that it has printed is in `output`."""
        assert self.process is not None
        self.output, _ = self.process.communicate(timeout=LIMIT_S)
        return self.process.returncode

    def wait_for_step(self, rank: int, step: int) -> None:
        """Until this rank has committed that step."""
        self._wait(lambda: self.step_of(rank) >= step)

    def _wait(self, is_so: Callable[[], bool]) -> None:
        assert self.process is not None
        pidfd = os.pidfd_open(self.process.pid)
        try:
            while not is_so():
                assert not select.select([pidfd], [], [], 0.02)[0], "it ended too soon"
        finally:
            os.close(pidfd)

    def step_of(self, rank: int) -> int:
        with contextlib.suppress(OSError, ValueError):
            return int((self.path / f"step-{rank}").read_text())
        return 0

    def worker_pids(self) -> list[int]:
        found = []
        for name in os.listdir("/proc"):
            with contextlib.suppress(OSError, ValueError):
                words = pathlib.Path(f"/proc/{int(name)}/cmdline").read_bytes().split(b"\0")
                if str(HERE / "worker.py").encode() in words and str(self.path).encode() in words:
                    found.append(int(name))
        return sorted(found)

    def scheduler_pids(self) -> list[int]:
        return [int(line) for line in (self.path / "schedulers").read_text().split()]

    @property
    def records(self) -> list[dict]:
        path = self.path / "log" / "recoveries.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def said(self, rank: int) -> str:
        """What all lives of this rank have printed, the first one first."""
        names = sorted(
            self.path.glob(f"worker_{rank}.log.*"), key=lambda path: int(path.suffix[1:])
        )
        return "".join(path.read_text() for path in (*names, self.path / f"worker_{rank}.log"))


@pytest.fixture
def job(tmp_path: pathlib.Path) -> Iterator[Job]:
    """Nothing of it is left at the end."""
    one = Job(tmp_path)
    yield one
    if one.process is not None and one.process.poll() is None:
        one.process.kill()
        one.process.communicate()
    left = one.worker_pids()
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left, "workers were left"
    if one.process is not None:
        assert not [pid for pid in one.scheduler_pids() if is_alive(pid)], "a scheduler was left"


def is_alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@pytest.mark.parametrize("way", ["agent", "plugin"])
def test_a_job_without_a_fault_ends_as_msrun_does(job: Job, way: str) -> None:
    assert job.start(way).end() == 0, job.output
    for rank in (0, 1):
        assert f"rank {rank} ended at 30 with 30" in job.said(rank)
    assert not job.records
    assert "the job has succeeded" in job.output


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("1@12:kill", "rank 1 killed (SIGKILL) in step 1"),
        ("0@12:exit", "rank 0 exited (exit 7) in step 1"),
        ("1@12:raise", "ValueError: the script's own"),
    ],
)
def test_all_start_anew_and_find_what_they_had(job: Job, fault: str, told: str) -> None:
    job.environment["FAULTS"] = fault
    assert job.start().end() == 0, job.output
    assert (job.path / f"struck-{fault}").exists()
    (record,) = job.records
    assert (record["strategy"], record["restarts_used"], record["code"]) == ("restart", 1, 0)
    assert told in job.output
    for rank in (0, 1):
        said = job.said(rank)
        began = re.findall(rf"rank {rank} goes on after step (\d+) with (\d+)", said)
        assert began[0] == ("0", "0")
        assert began[1][0] == began[1][1] != "0"
        assert f"rank {rank} ended at 30 with 30" in said
    first, second = job.scheduler_pids()
    assert first != second
    assert record["version"] is not None
    assert record["steps_redone"] <= 1


def test_a_rank_that_is_stopped_is_found_by_the_heartbeat_of_the_library(job: Job) -> None:
    job.environment.update(FAULTS="1@12:stop", TASKD_FAULT_TIMEOUT="3")
    assert job.start().end() == 0, job.output
    (record,) = job.records
    assert record["faults"][0]["kind"] == "hang", record
    assert "stopped by a signal" in record["faults"][0]["detail"]


def test_the_budget_ends_the_job_and_what_it_had_is_saved(job: Job) -> None:
    job.environment.update(FAULTS="1@12:kill,0@20:kill", TASKD_MAX_RESTARTS="1")
    assert job.start().end() == 2, job.output
    assert "restart budget spent: 1 of 1 restarts used" in job.output
    (found,) = folder.scan(job.path / "saved", "stand-in").valid
    last = job.output.splitlines()[-1]
    assert last.endswith(f"; step {found.manifest.version} is saved in {found.path}")
    for rank in (0, 1):
        assert bytes(flat.read(found, rank).data[:8]) == as_bytes(found.manifest.version)


def publish_of_three_ranks(directory: pathlib.Path, version: int) -> pathlib.Path:
    """A checkpoint of a job of the same name that had another number of ranks."""
    draft = Draft(directory, "stand-in", Kind.PERIODIC, version, "three", (0, 1, 2), 0, 3)
    for rank in draft.writers:
        flat.write(draft, rank, flat.Flat((), {}, memoryview(b"")))
    return flat.publish(draft, "x 1")


@pytest.mark.parametrize("whom", ["msrun", "workers", "one worker", "all"])
def test_sigterm_saves_the_last_step_that_all_have(job: Job, whom: str) -> None:
    job.environment["STEPS"] = "100000"
    other = publish_of_three_ranks(job.path / "saved", 90_000)
    job.start()
    for rank in (0, 1):
        job.wait_for_step(rank, 10)
    assert job.process is not None
    workers = job.worker_pids()
    targets = {"msrun": [], "workers": workers, "one worker": workers[:1], "all": workers}[whom]
    targets += [job.process.pid] if whom in ("msrun", "all") else []
    for number in (signal.SIGSTOP, signal.SIGTERM, signal.SIGCONT):  # all have it before one ends
        for pid in targets:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
    assert job.end() == 2, job.output
    assert "is to end (SIGTERM" in job.output
    valid = folder.scan(job.path / "saved", "stand-in", is_full=True).valid
    (found,) = [one for one in valid if one.path != other]
    said = f"; step {found.manifest.version} is saved in {found.path}"
    assert job.output.splitlines()[-1].endswith(said)
    assert found.manifest.version >= 10
    assert found.manifest.writers == (0, 1)
    for rank in (0, 1):
        assert bytes(flat.read(found, rank).data[:8]) == as_bytes(found.manifest.version)
    assert [record["strategy"] for record in job.records] == ["exit"]


def test_a_job_that_is_given_up_while_its_group_restarts_ends(job: Job) -> None:
    # Rank 0 is stopped, so that SIGTERM does not end it: until it is killed its successor is not
    # ordered, and that of rank 1 waits for it.
    job.environment.update(STEPS="100000", TASKD_GRACE_S="10")
    job.start()
    for rank in (0, 1):
        job.wait_for_step(rank, 5)
    first, second = job.worker_pids()  # in the order of their starts
    (scheduler,) = [os.pidfd_open(pid) for pid in job.scheduler_pids()]
    os.kill(first, signal.SIGSTOP)
    os.kill(second, signal.SIGKILL)
    assert select.select([scheduler], [], [], LIMIT_S)[0]  # the restart has been ordered
    os.close(scheduler)
    assert job.process is not None
    job.process.send_signal(signal.SIGTERM)
    assert job.end() == 2, job.output
    (found,) = folder.scan(job.path / "saved", "stand-in", is_full=True).valid
    assert found.manifest.version >= 4
    assert len(job.scheduler_pids()) == 1, "it came too late: the group had been started anew"


def as_bytes(step: int) -> bytes:
    import struct

    return struct.pack("=d", step)


def test_without_a_call_back_nothing_is_started() -> None:
    from taskd.python.framework.agent.ms_mgr.msrun_plugin import MSRunPlugin

    plugin = MSRunPlugin()
    plugin.register_callbacks("MONITOR", print)
    with pytest.raises(Exception, match="mindspore hasn't fully registered all callbacks"):
        plugin.start()


def test_an_agent_that_is_killed_takes_its_workers_along(job: Job) -> None:
    job.environment["STEPS"] = "100000"
    job.start()
    job.wait_for_step(0, 3)
    job.wait_for_step(1, 3)
    pidfds = [os.pidfd_open(pid) for pid in job.worker_pids()]
    assert job.process is not None
    job.process.kill()
    assert job.end() == -signal.SIGKILL
    for pidfd in pidfds:
        assert select.select([pidfd], [], [], LIMIT_S)[0]
        os.close(pidfd)
    for pid in job.scheduler_pids():  # nobody is left who could end it
        pidfd = os.pidfd_open(pid)
        os.kill(pid, signal.SIGKILL)
        assert select.select([pidfd], [], [], LIMIT_S)[0]
        os.close(pidfd)
