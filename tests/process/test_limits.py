"""Real jobs under small limits: they train, or say in one line why they cannot start."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.process import harness

if TYPE_CHECKING:
    import pathlib

pytestmark = pytest.mark.slow


def run_under(job: harness.Job, limits: str) -> harness.Finished:
    """Manager and torchrun, both started by a shell that sets limits first."""
    job.start_manager()
    command = [
        "sh",
        "-c",
        f'{limits} && exec "$0" "$@"',
        sys.executable,
        "-m",
        "taskd.run",
        "--nproc-per-node=2",
        str(harness.SCRIPTS / "train.py"),
    ]
    agent = harness.Output(command, job.env, job.directory / "agent.out", job.directory)
    job.agents.append(agent)
    return agent.wait(90)


def test_a_job_trains_and_recovers_without_locked_memory_and_with_few_descriptors(
    tmp_path: pathlib.Path,
) -> None:
    with harness.job(tmp_path, FAULTS="1@5:forward:kill") as job:
        finished = run_under(job, "ulimit -l 0 && ulimit -n 72")
        assert finished.returncode == 0, finished.output
        assert len(job.recoveries()) == 1, finished.output
        assert "Traceback" not in finished.output
        assert len(set(job.digests().values())) == 1
        assert len(job.digests()) == 2


def test_where_no_black_box_can_be_made_one_line_says_why(tmp_path: pathlib.Path) -> None:
    with harness.job(tmp_path) as job:
        finished = run_under(job, "ulimit -f 8000")  # 512 bytes each: below a box, above a log
        assert finished.returncode == 1, finished.output
        assert (
            "taskd: the workers of node 0 could not be started: [Errno 27] no black box, a "
            "file "
            "of 16 MiB in memory: File too large"
        ) in finished.output
        assert "Traceback" not in finished.output
        assert job.facts() == []


def test_a_manager_may_open_as_many_files_as_the_system_lets_it(tmp_path: pathlib.Path) -> None:
    """Each agent takes one."""
    with harness.job(tmp_path) as job:
        limits = 'ulimit -S -n 90 && ulimit -H -n 300 && exec "$0" "$@"'
        command = ["sh", "-c", limits, sys.executable, str(harness.ROOT / "manager.py")]
        out = job.directory / "manager.out"
        job.manager = harness.Output(command, job.env, out, job.directory)
        job.manager.wait_text("listens on", 20)
        text = Path(f"/proc/{job.manager.process.pid}/limits").read_text(encoding="utf-8")
        found = re.search(r"Max open files\s+(\S+)\s+(\S+)", text)
        assert found is not None
        assert found.groups() == ("300", "300")
