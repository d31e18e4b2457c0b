"""A manager that is killed has a record to write: the next one writes it."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest

from tests.process import harness
from tests.process.harness import wait_for_step, wait_until
from tests.process.test_recovery import reference  # noqa: F401

if TYPE_CHECKING:
    import pathlib

pytestmark = pytest.mark.slow

LIMIT_S = 60.0


def test_the_record_of_a_recovery_whose_end_no_manager_has_seen(
    tmp_path: pathlib.Path,
    reference,  # noqa: F811
) -> None:
    """All go on, and are held in the first step when the manager is killed."""
    with harness.job(tmp_path, HOLD_AT="5") as job:
        manager, agent = job.start_manager(), job.start_agent("train.py")
        wait_for_step(job, 5)
        (pid,) = (fact["pid"] for fact in job.facts("entered") if fact["rank"] == 1)
        os.kill(pid, signal.SIGKILL)
        wait_until(job, lambda: _restored(job, 5) == {0, 1, 2, 3})
        os.kill(manager.process.pid, signal.SIGKILL)
        manager.wait(LIMIT_S)
        assert job.recoveries() == []
        manager = job.start_manager()
        manager.wait_text("registered", LIMIT_S)
        job.tell()
        assert agent.wait(LIMIT_S).returncode == 0, job.story()
        assert job.digests() == reference()
        (record,) = job.recoveries()
        assert (record["generation"], record["strategy"]) == (1, "recover-in-place")
        assert [fault["rank"] for fault in record["faults"]] == [1]
        assert "the manager ended before every rank was known" in record["not_completed"]
        assert "the manager before this one was killed" in manager.text
        assert not list(tmp_path.rglob("*unwritten*"))
        wait_until(job, lambda: not job.leftovers())


def _restored(job: harness.Job, version: int) -> set[int]:
    """The ranks that have been told to go on from `version`.

    That the manager has logged the order does not tell that ZeroMQ has sent it.
    """
    return {fact["rank"] for fact in job.facts("restored") if fact["step"] == version}
