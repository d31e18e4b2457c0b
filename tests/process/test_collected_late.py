"""A process that ends while the thread that listens to its agent is busy in torch's code."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.process import harness

if TYPE_CHECKING:
    import pathlib

pytestmark = pytest.mark.slow


def test_a_process_that_has_done_its_part_does_not_crash_at_its_end(tmp_path: pathlib.Path) -> None:
    with harness.job(tmp_path) as job:
        finished = job.run("collected_late.py", nproc=1)
        assert "ends while garbage is collected" in finished.output
        assert finished.returncode == 0, job.story()
        assert job.recoveries() == []
