"""Real jobs that come no further, whatever fails each time: they say so, and end."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from taskd.core.policy.stagnation import DEATH_LIMIT, OWN_LIMIT
from tests.process import harness

if TYPE_CHECKING:
    import pathlib

pytestmark = pytest.mark.slow

LIMIT_S = 120


def warnings(job: harness.Job) -> list[int]:
    """After how many recoveries the manager has said that the job gets no further."""
    assert job.manager is not None
    said = re.findall(
        r" WARNING .* the job gets no further: no new step since step 4 in (\d+) recoveries: ",
        job.manager.text,
    )
    return [int(number) for number in said]


def test_exceptions_that_differ_each_time_end_the_job(tmp_path: pathlib.Path) -> None:
    """Each has another text, and comes from another place, so that none of them came back."""
    faults = [
        f"1@4:{place}:{how}"
        for place in ("step", "forward", "backward")
        for how in ("raise", "raise-differently")
    ]
    assert len(faults) == OWN_LIMIT
    with harness.job(tmp_path, FAULTS=";".join(faults)) as job:
        finished = job.run(nproc=2, timeout_s=LIMIT_S)
        assert [fact["spec"] for fact in job.facts("fault")] == faults
        assert finished.returncode != 0
        assert "no new step since step 4 in 6 recoveries" in finished.last_line
        assert "Traceback" in finished.output
        assert job.manager is not None
        assert job.manager.wait(20).returncode == 1
        assert warnings(job) == [3]
        assert len(job.recoveries()) == OWN_LIMIT
        assert all(record["not_completed"] for record in job.recoveries())
        assert job.leftovers() == set()


def test_a_rank_that_is_killed_at_one_step_for_ever_ends_the_job(tmp_path: pathlib.Path) -> None:
    """As by an out-of-memory killer. With more patience: the node may have been short of it."""
    with harness.job(tmp_path, FAULTS="1@4:step:always-kill") as job:
        finished = job.run(nproc=2, timeout_s=LIMIT_S)
        assert len(job.facts("fault")) == DEATH_LIMIT
        assert finished.returncode != 0
        # How the last one ended may not be known yet: it is lost until then.
        killed = f"{DEATH_LIMIT} times killed|{DEATH_LIMIT - 1} times killed, 1 times lost"
        assert re.search(
            f"no new step since step 4 in {DEATH_LIMIT} recoveries: rank 1 ({killed}); last, rank ",
            finished.last_line,
        )
        assert job.manager is not None
        assert job.manager.wait(20).returncode == 1
        assert warnings(job) == [3, 6, 12, 24]
        assert len(job.recoveries()) == DEATH_LIMIT
        assert len({fact["pid"] for fact in job.facts("entered") if fact["rank"] == 0}) == 1
        assert job.leftovers() == set()
