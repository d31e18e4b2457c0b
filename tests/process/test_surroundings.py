"""Real jobs that lack what taskd works with: a death costs one process all the same.

An agent loses, one after the other, its working directory, its forkserver, its free descriptors;
and a job never has libtaskd.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.process import harness
from tests.process.harness import wait_for_step, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.slow

SPARED, VICTIM = 0, 1
HURT_AT = (3, 6, 9)  # steps


def lives(job: harness.Job, rank: int) -> list[int]:
    """The processes that this rank has had."""
    entries = [fact["pid"] for fact in job.facts("entered") if fact["rank"] == rank]
    return list(dict.fromkeys(entries))


def kill_victim(job: harness.Job) -> int:
    """Its process at present. Returns how many it has had."""
    had = lives(job, VICTIM)
    os.kill(had[-1], signal.SIGKILL)
    return len(had)


def go_on(job: harness.Job, step: int, before: int) -> None:
    """Once the victim has had more processes than before."""
    wait_until(job, lambda: len(lives(job, VICTIM)) > before)
    job.tell(step)


def forkservers(job: harness.Job) -> list[int]:
    found = []
    for pid in job.leftovers():
        with contextlib.suppress(FileNotFoundError):
            if Path(f"/proc/{pid}/comm").read_text(encoding="utf-8").startswith("taskd-forkserve"):
                found.append(pid)
    return found


@contextlib.contextmanager
def no_free_descriptor(pid: int) -> Iterator[None]:
    """Its limit is the lowest number that is free."""
    used = {int(name) for name in os.listdir(f"/proc/{pid}/fd")}
    lowest = next(number for number in range(len(used) + 1) if number not in used)
    soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))


def plain_digests(directory: Path) -> dict[int, str]:
    """Of the same training without taskd."""
    directory.mkdir()
    script = str(harness.SCRIPTS / "train.py")
    harness.run_plainly(directory, script, nproc=2, FACTS=str(directory))
    return {
        fact["rank"]: fact["digest"]
        for fact in harness.facts_in(directory)
        if fact["what"] == "returned"
    }


def test_a_death_costs_one_process_whatever_its_agent_has_lost(tmp_path: Path) -> None:
    folder = tmp_path / "working"
    folder.mkdir()
    held = ",".join(map(str, HURT_AT))
    with harness.job(tmp_path / "job", HOLD_AT=held) as job:
        manager = job.start_manager()
        agent = job.start_agent("train.py", nproc=2, cwd=folder)

        wait_for_step(job, HURT_AT[0])
        folder.rmdir()
        go_on(job, HURT_AT[0], kill_victim(job))

        wait_for_step(job, HURT_AT[1])
        (stopped,) = forkservers(job)
        os.kill(stopped, signal.SIGSTOP)
        go_on(job, HURT_AT[1], kill_victim(job))
        wait_until(job, lambda: stopped not in job.leftovers())

        wait_for_step(job, HURT_AT[2])
        with no_free_descriptor(agent.process.pid):
            before = kill_victim(job)
            manager.wait_text("Too many open files", 60)
        go_on(job, HURT_AT[2], before)

        finished = agent.wait(90)
        assert finished.returncode == 0, finished.output[-6000:]
        assert forkservers(job) == [], "the one that came in the place of another ends with it"
        assert (len(lives(job, SPARED)), len(lives(job, VICTIM))) == (1, 4)
        records = job.recoveries()
        assert len(records) == len(HURT_AT)
        for record in records:
            assert (record["strategy"], record["steps_redone"]) == ("recover-in-place", 0)
            assert record["faults"][0]["kind"] == "killed"
        failed = [fault for fault in records[-1]["faults"] if fault["kind"] == "start failed"]
        assert failed
        assert all("Too many open files" in fault["detail"] for fault in failed)
        assert job.digests() == plain_digests(tmp_path / "plain")
        assert job.leftovers() == set()


def test_without_libtaskd_a_killed_rank_is_replaced_in_place(tmp_path: Path) -> None:
    with harness.job(
        tmp_path / "job", TASKD_NATIVE="off", FAULTS=f"{VICTIM}@5:forward:kill"
    ) as job:
        job.start_manager()
        finished = job.start_agent("train.py", nproc=2, warm=False).wait(90)
        assert finished.returncode == 0, finished.output[-6000:]
        said = "libtaskd is switched off by TASKD_NATIVE"
        assert finished.output.count(said) == 1
        assert said in (job.log_dir / "agent-0.log").read_text(encoding="utf-8")
        assert len(job.facts("fault")) == 1
        assert (len(lives(job, SPARED)), len(lives(job, VICTIM))) == (1, 2)
        (record,) = job.recoveries()
        assert (record["strategy"], record["steps_redone"]) == ("recover-in-place", 0)
        # on a busy machine the other one has lost its connection long before the death is seen
        deaths = [fault for fault in record["faults"] if fault["kind"] == "killed"]
        assert [(fault["rank"], fault["detail"]) for fault in deaths] == [(VICTIM, "SIGKILL")]
        assert job.digests() == plain_digests(tmp_path / "plain")
        assert job.leftovers() == set()
