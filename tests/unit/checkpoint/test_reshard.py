"""Saved by a world of 4, loaded by 1, 2 and 8.

FSDP2, HSDP, tensor-parallel and replicated, bit by bit.
"""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest

SCRIPT = pathlib.Path(__file__).parent / "scripts" / "reshard.py"
LIMIT_S = 200


def run(*arguments: object) -> None:
    done = subprocess.run(
        [sys.executable, SCRIPT, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_saved_by_four_loaded_by_any_number(tmp_path) -> None:
    run("save", tmp_path, 4)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "dump-000000000002",
        "step-000000000001",
    ]
    for world in (1, 2, 8):
        run("load", tmp_path, world)
