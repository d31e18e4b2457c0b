"""SIGKILL at many moments of writing, publishing and deleting.

What had been completed is there, and nothing half.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest
from checkpoints import save

SCRIPT = pathlib.Path(__file__).parent / "scripts" / "crash.py"
LIMIT_S = 280


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [25, pytest.param(100, marks=pytest.mark.extended("[25]"))])
def test_no_moment_of_a_death_costs_a_completed_checkpoint(tmp_path, rounds: int) -> None:
    directory = tmp_path / "checkpoints"
    done = subprocess.run(
        [sys.executable, SCRIPT, directory, "7", str(rounds)],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    seen = json.loads(done.stdout)
    assert seen["rounds"] == rounds
    assert seen["newest"] > rounds / 4
    # The deaths were where they hurt: in the middle of a draft, not only between two.
    assert seen["left_drafts"] > rounds / 4, seen
    save(directory, seen["newest"] + 1, keep=2)
    names = sorted(os.listdir(directory))
    assert len(names) == 2, names
    assert not [name for name in names if name.startswith(".")]
