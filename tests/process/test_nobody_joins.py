"""A manager that nobody joins ends by itself, however it was started."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from tests.process import harness
from tests.process.harness import wait_until

if TYPE_CHECKING:
    import pathlib


def test_a_manager_that_nobody_joins_ends(tmp_path: pathlib.Path) -> None:
    with harness.job(tmp_path, TASKD_JOIN_TIMEOUT="1") as job:
        finished = job.start_manager().wait(60)
        assert finished.returncode == 1
        assert "the manager ends: nobody has joined it within 1 s (TASKD_JOIN_" in finished.output


def test_a_manager_ends_soon_after_the_script_that_started_it(tmp_path: pathlib.Path) -> None:
    """As where torchrun cannot be found: the script is gone before the manager is ready."""
    with harness.job(tmp_path, TASKD_JOIN_TIMEOUT="6") as job:
        script = f"{sys.executable} {harness.ROOT / 'manager.py'} & exit 127"
        shell = harness.Output(["bash", "-c", script], job.env, tmp_path / "shell.out", tmp_path)
        try:
            assert shell.wait(60).returncode == 127
            said = "within 1 s of the end of the process that started it"
            wait_until(job, lambda: said in shell.text)
            wait_until(job, lambda: not job.leftovers())
        finally:
            shell.end()
