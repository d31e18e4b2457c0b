"""Real jobs whose script, or its folder, is away while a process dies: remote disks blink."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest

from tests.process import harness
from tests.process.harness import wait_until

if TYPE_CHECKING:
    import pathlib

pytestmark = pytest.mark.slow

UNMODIFIED = """
import time
import torch.distributed as dist
from testbed.script import fact, is_told

dist.init_process_group("gloo")
fact("begun")
while not is_told("told"):
    time.sleep(0.01)
"""


def pids(job: harness.Job, what: str) -> dict[int, list[int]]:
    """By rank, in the order in which its processes came so far."""
    found: dict[int, list[int]] = {}
    for fact in job.facts(what):
        found.setdefault(fact["rank"], []).append(fact["pid"])
    return found


def be_away_for_two_starts(
    job: harness.Job, gone: pathlib.Path, victim: int, order: str
) -> harness.Output:
    """Kill `victim` while `gone` is away, which comes back when the third start is ordered."""
    assert job.manager is not None
    away = gone.rename(gone.with_suffix(".away"))
    os.kill(victim, signal.SIGKILL)
    manager = job.manager
    wait_until(job, lambda: manager.text.count(order) == 3)
    away.rename(gone)
    return job.agents[0]


def test_a_process_is_replaced_when_the_script_is_there_again(tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "scripts"
    folder.mkdir()
    script = folder / "job.py"
    script.write_bytes((harness.SCRIPTS / "train.py").read_bytes())
    with harness.job(tmp_path, SLEEP_S="0.1", STEPS="40") as job:
        job.start_manager()
        job.start_agent(str(script), nproc=2)
        wait_until(job, lambda: len(pids(job, "committed")) == 2)
        victim = pids(job, "entered")[1][0]
        finished = be_away_for_two_starts(job, folder, victim, "-> ReplaceWorker").wait(90)
        assert finished.returncode == 0, finished.output[-6000:]
        # The third one is looked at when it is ordered, which may be before the script is back,
        # and begins later.
        assert finished.output.count(f"the script {script} is not a readable file") in {2, 3}
        (record,) = job.recoveries()
        assert [fault["kind"] for fault in record["faults"]] == ["killed", "exited", "exited"]
        assert (record["strategy"], record["steps_redone"]) == ("recover-in-place", 0)
        assert len(set(pids(job, "entered")[0])) == 1
        assert len(set(job.digests().values())) == 1
        assert job.leftovers() == set()


def test_an_unmodified_script_starts_when_it_is_there_again(tmp_path: pathlib.Path) -> None:
    """Either rank may be the first to fail; the other one waits with it the third time."""
    script = tmp_path / "job.py"
    script.write_text(UNMODIFIED)
    with harness.job(tmp_path) as job:
        job.start_manager()
        job.start_agent(str(script), nproc=2)
        first = wait_until(job, lambda: len(job.facts("begun")) == 2 and pids(job, "begun"))
        agent = be_away_for_two_starts(job, script, first[1][0], "-> RestartGroup")
        wait_until(job, lambda: len(job.facts("begun")) == 4)
        job.tell()
        finished = agent.wait(60)
        assert finished.returncode == 0, finished.output[-6000:]
        assert "is not a readable file" in finished.output
        assert job.manager is not None
        assert "delay_s=4" in job.manager.text
        assert [record["restarts_used"] for record in job.recoveries()] == [1, 2, 3]
        assert job.leftovers() == set()
