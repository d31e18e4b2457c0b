"""An interrupt in the middle of a context manager of torch costs nothing of the next entry."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.process import harness

if TYPE_CHECKING:
    import pathlib

pytestmark = pytest.mark.slow


def test_gradients_and_weights_of_autocast_are_those_of_a_run_without_a_fault(
    tmp_path: pathlib.Path,
) -> None:
    digests = []
    for fault in ("0", "1"):
        directory = tmp_path / fault
        directory.mkdir()
        with harness.job(directory, FAULT=fault) as job:
            finished = job.run("modes.py", nproc=2)
            assert finished.returncode == 0, finished.output
            assert len(job.facts("fault")) == len(job.facts("left")) == int(fault)
            assert len(job.facts("entered")) == 2 + int(fault)  # rank 0 keeps its process
            strategies = [record["strategy"] for record in job.recoveries()]
            assert strategies == ["recover-in-place"] * int(fault)
            digests.append({fact["digest"] for fact in job.facts("returned")})
    assert len(digests[0]) == 1
    assert digests[0] == digests[1]
