"""All processes start anew, and one of the former ones is slow to end: its rank starts late."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.process import harness

if TYPE_CHECKING:
    import pathlib

pytestmark = pytest.mark.slow


def test_a_rank_that_starts_late_meets_the_others_in_the_next_recovery(
    tmp_path: pathlib.Path,
) -> None:
    """It is at the gate of that, and its environment is that of the new start."""
    with harness.job(tmp_path) as job:
        finished = job.run("late_start.py", nproc=3)
        assert finished.returncode == 0, job.story()
        assert {fact["rank"] for fact in job.facts("first")} == {0, 1, 2}
        (fault,) = job.facts("fault")
        (late,) = (fact for fact in job.facts("again") if fact["rank"] == 2)
        assert fault["rank"] == 1
        assert fault["time"] < late["time"], "its start has waited for the process before"
        done = job.facts("done")
        assert sorted(fact["rank"] for fact in done) == [0, 1, 2]
        assert len({str(fact["weights"]) for fact in done}) == 1
        assert job.recoveries()[-1]["strategy"] == "recover-in-place"
        assert "-> RestartGroup" in job.story()
