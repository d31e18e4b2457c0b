"""libtaskd ends the waits of gloo's threads: a collective that nobody joins times out at once."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from taskd.native import library
from tests.process import harness

if TYPE_CHECKING:
    import pathlib

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(library.load() is None, reason="libtaskd is not built"),
]


def test_a_collective_that_nobody_joins_ends_at_once(tmp_path: pathlib.Path) -> None:
    began = time.monotonic()
    ranks = [
        harness.Output(
            [sys.executable, str(harness.SCRIPTS / "lost_wait.py"), str(rank), str(tmp_path)],
            harness.environment(),
            tmp_path / f"rank{rank}.out",
            tmp_path,
            warm=harness.TORCHRUNS,
        )
        for rank in range(2)
    ]
    try:
        ended = [rank.wait(100) for rank in ranks]
    finally:
        for rank in ranks:
            rank.end()
    assert [rank.returncode for rank in ended] == [0, 0]
    output = ended[0].output
    assert output.startswith("available"), output
    assert "Timed out waiting" in output, output
    assert time.monotonic() - began < 100  # the group's own timeout is half an hour


def test_a_library_that_is_not_loaded_is_refused() -> None:
    """In a process of its own: one that has hooked a library already keeps that."""
    code = "from taskd.native import library; library.load().waits_hook('libnothere.so')"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env=harness.environment(),
    )
    assert "NativeLibraryError: taskd_waits_hook failed: No such file" in done.stderr
