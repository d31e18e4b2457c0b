"""What process tests rely on: whoever ends a process has ended all of its group."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.process import harness
from tests.process.test_floods import until

if TYPE_CHECKING:
    import pathlib

pytestmark = pytest.mark.slow

SCRIPT = "for _ in $(seq 40); do sleep 600 & done; echo there; wait"


def test_when_a_process_was_ended_nobody_of_its_group_is_left(tmp_path: pathlib.Path) -> None:
    mark = str(tmp_path)
    env = harness.environment(**{harness.MARK_ENV: mark})
    for turn in range(3):
        output = harness.Output(["sh", "-c", SCRIPT], env, tmp_path / f"out-{turn}", tmp_path)
        output.wait_text("there", 20)
        until(lambda: len(harness.marked(mark)) == 41, "they have not started")
        output.end()
        assert harness.marked(mark) == set()
