"""A restart of all that a fault cuts short: the records say so, and count each step once."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest

from taskd.checkpoint import folder
from tests.process import harness
from tests.process.harness import wait_until

if TYPE_CHECKING:
    import pathlib

pytestmark = pytest.mark.slow


def kill(job: harness.Job, *ranks: int) -> None:
    """The newest processes of these ranks."""
    pids = {fact["rank"]: fact["pid"] for fact in job.facts("restored")}
    for rank in ranks:
        os.kill(pids[rank], signal.SIGKILL)


def test_the_first_step_after_a_restart_never_comes(tmp_path: pathlib.Path) -> None:
    """Both ranks die at step 6, and one of those that go on from step 4 before it has made 5."""
    training = {"SAVE_EVERY": "4"}
    with harness.job(tmp_path / "undisturbed", **training) as job:
        assert job.run(nproc=2).returncode == 0
        reference = job.digests()
    with harness.job(tmp_path / "job", **training, HOLD_AT="4,6") as job:
        job.start_manager()
        agent = job.start_agent("train.py", nproc=2)
        job.tell(4)
        wait_until(job, lambda: [fact["step"] for fact in job.facts("committed")].count(6) == 2)
        saved = tmp_path / "job" / "taskd_checkpoints"
        wait_until(job, lambda: bool(folder.scan(saved, "test-job", is_full=True).valid))
        (job.facts_dir / "told-4").unlink()
        kill(job, 0, 1)
        wait_until(job, lambda: [fact["step"] for fact in job.facts("restored")].count(4) == 2)
        kill(job, 0)
        wait_until(job, lambda: [fact["step"] for fact in job.facts("restored")].count(4) == 4)
        job.tell()
        assert agent.wait(60).returncode == 0, agent.text[-3000:]
        assert job.digests() == reference
        cut_short, last = job.recoveries()
        assert (cut_short["strategy"], cut_short["code"]) == ("restart", 405)
        assert cut_short["not_completed"].startswith(
            "before every rank had made a new step, rank 0 ended"
        )
        assert (cut_short["version"], cut_short["steps_redone"]) == (4, 2)
        assert (last["strategy"], last["code"]) == ("recover-in-place", 0)
        assert (last["version"], last["steps_redone"]) == (4, 0)
        assert last["total_s"] > cut_short["total_s"] > 0
        assert cut_short["time"] < last["time"]
