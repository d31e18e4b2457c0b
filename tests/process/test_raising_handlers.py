"""Signal handlers of the script that raise where the script does not run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.process import harness

if TYPE_CHECKING:
    import pathlib

pytestmark = pytest.mark.slow


def test_what_they_raise_between_two_entries_costs_no_process(tmp_path: pathlib.Path) -> None:
    with harness.job(tmp_path, FAULTS="0@5:step") as job:
        finished = job.run("raising_handlers.py", nproc=3)
        assert finished.returncode == 0, job.story()
        assert (job.facts_dir / "fault-0").exists()
        assert len(job.facts("started")) == 4, "rank 0 was replaced, and nobody else"
        (record,) = job.recoveries()
        assert record["strategy"] == "recover-in-place", record
        again = [fact for fact in job.facts("entered") if fact["calls"]]
        assert sorted(fact["rank"] for fact in again) == [1, 2]
        for fact in again:
            assert {17, 14} <= set(fact["calls"]), "SIGCHLD while it parks, SIGALRM while it waits"
        assert len(job.facts("ended")) == 3
        assert all(fact["is_own"] for what in ("returns", "ended") for fact in job.facts(what))
        for rank in (1, 2):
            for name in ("SIGCHLD", "SIGALRM"):
                said = (
                    f" WARNING taskd: rank {rank}: a signal handler of the script has raised "
                    "between two entries of the recoverable function, and that is dropped: "
                    f"RuntimeError: signal {name} has come"
                )
                assert finished.output.count(said) == 1, finished.output
