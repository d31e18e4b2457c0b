"""A script that uses the signal by which TaskD interrupts training processes by default."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest

from tests.process import harness

if TYPE_CHECKING:
    import pathlib

pytestmark = pytest.mark.slow

FAULTS = "0@5:step"


@pytest.mark.parametrize("given", ["SIGRTMIN+15", str(signal.SIGRTMIN + 15)])
def test_with_another_signal_the_script_keeps_its_own_and_is_recovered_in_place(
    tmp_path: pathlib.Path, given: str
) -> None:
    with harness.job(tmp_path, TASKD_INTERRUPT_SIGNAL=given, FAULTS=FAULTS) as job:
        finished = job.run("own_signal.py", nproc=2)
        assert finished.returncode == 0, job.story()
        ended = {fact["rank"]: fact for fact in job.facts("returned")}
        assert (job.facts_dir / "fault-0").exists()
        assert len(job.facts("started")) == 3, "rank 0 was replaced, and nobody else"
        for fact in ended.values():
            assert fact["received"] == fact["sent"], "taskd has sent none of these"
            assert fact["is_own"]
        (record,) = job.recoveries()
        assert record["strategy"] == "recover-in-place", record
        assert "has taken signal" not in finished.output


def test_without_it_the_signal_is_missed_and_the_log_says_what_to_set(
    tmp_path: pathlib.Path,
) -> None:
    with harness.job(tmp_path, FAULTS=FAULTS) as job:
        finished = job.run("own_signal.py", nproc=2)
        assert finished.returncode == 0, job.story()
        assert (job.facts_dir / "fault-0").exists()
        assert f"has taken signal {signal.SIGRTMIN + 9} (SIGRTMIN+9)" in finished.output
        assert "Set TASKD_INTERRUPT_SIGNAL to another" in finished.output


def test_a_signal_that_cannot_be_is_refused_before_anything_runs(tmp_path: pathlib.Path) -> None:
    with harness.job(tmp_path, TASKD_INTERRUPT_SIGNAL="SIGUSR1") as job:
        finished = job.run("own_signal.py", nproc=2, manager=False)
        assert finished.returncode != 0
        assert "TASKD_INTERRUPT_SIGNAL='SIGUSR1' is not accepted" in finished.output
        assert job.facts("started") == []
