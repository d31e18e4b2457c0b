"""A manager that nobody joins ends by itself, however it was started."""

from __future__ import annotations

import os
import select
import sys
from typing import TYPE_CHECKING

from tests.process import harness

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
        script = f"{sys.executable} {harness.ROOT / 'manager.py'} & echo $! ; exit 127"
        shell = harness.Output(["bash", "-c", script], job.env, tmp_path / "shell.out", tmp_path)
        try:
            assert shell.wait(60).returncode == 127
            pid = next(line for line in shell.text.splitlines() if line.isdigit())
            pidfd = os.pidfd_open(int(pid))  # it lives for a second at least
            ended, _, _ = select.select([pidfd], [], [], 60)
            os.close(pidfd)
            assert ended
        finally:
            shell.end()
        assert "within 1 s of the end of the process that started it" in shell.text
