"""A secret that differs on one node, or that one side has not: both sides say so, nothing hangs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.process import harness

if TYPE_CHECKING:
    import pathlib

pytestmark = pytest.mark.slow

LIMIT_S = 60.0


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [("0123456789abcdef", "fedcba9876543210"), ("", "0123456789abcdef"), ("0123456789abcdef", "")],
    ids=["another", "none at the manager", "none at the agent"],
)
def test_training_goes_on_and_the_logs_name_the_secret(
    tmp_path: pathlib.Path, ours: str, theirs: str
) -> None:
    env = []
    for name, secret in (("ours", ours), ("theirs", theirs)):
        path = tmp_path / name
        path.write_text(secret)
        path.chmod(0o600)
        env.append({"TASKD_SECRET_FILE": str(path)} if secret else {})
    with harness.job(tmp_path, TASKD_FAULT_TIMEOUT="6", HOLD_AT="10") as job:
        manager = job.start_manager(**env[0])
        agent = job.start_agent("train.py", nproc=2, **env[1])
        agent.wait_text("no manager answers at", LIMIT_S)
        job.tell()
        finished = agent.wait(LIMIT_S)
        assert finished.returncode == 0, job.story()
        (line,) = [line for line in agent.text.splitlines() if "no manager answers at" in line]
        assert "somebody listens there and ends the connection: another TASKD_SECRET_FILE" in line
        assert "training goes on as with plain torchrun" in line
        manager.wait_text("a connection was not let in: ", LIMIT_S)
        assert "another secret" in manager.text or "broken off" in manager.text
