"""All torchruns of a job are killed, and started again while the manager still waits for them."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest

from tests.process import harness
from tests.process.harness import wait_for_step, wait_until
from tests.process.test_cut_off import kill_rank
from tests.process.test_recovery import reference as reference  # noqa: PLC0414

if TYPE_CHECKING:
    import pathlib

pytestmark = pytest.mark.slow

LIMIT_S = 90
STEPS = {"STEPS": "40"}
HELD = "30"


def start(job: harness.Job, node_rank: int) -> harness.Output:
    options = (
        "--nnodes=2",
        f"--node-rank={node_rank}",
        "--master-addr=127.0.0.1",
        f"--master-port={job.master_port}",
    )
    return job.start_agent("train.py", nproc=2, options=options)


def test_two_nodes_are_started_again_within_the_lease_of_their_manager(
    tmp_path: pathlib.Path, reference
) -> None:
    """The first asks the old manager, and hears who votes in the job that is over.

    The next manager serves both as a job that has just begun: a rank that dies is replaced.
    """
    with harness.job(
        tmp_path,
        TASKD_RECOVER_STRATEGY="recover",
        TASKD_FAULT_TIMEOUT="6",
        TASKD_MANAGER="auto",
        SLEEP_S="0.05",
        HOLD_AT=HELD,
        **STEPS,
    ) as job:
        former = job.start_manager()
        for agent in [start(job, node_rank) for node_rank in range(2)]:
            agent.wait_text("joined the manager at", LIMIT_S)
        wait_for_step(job, 5)
        former.wait_text("-> KeepRoster", LIMIT_S)
        for agent in job.agents:
            os.kill(agent.process.pid, signal.SIGKILL)
            agent.wait(LIMIT_S)
        agents = [start(job, node_rank) for node_rank in range(2)]
        former.wait_text("(1 wait now)", LIMIT_S)
        former.wait(LIMIT_S)
        manager = job.start_manager()
        for node_rank, agent in enumerate(agents):
            manager.wait_text(f"node {node_rank} of 2 registered", LIMIT_S)
            agent.wait_text(f"as node {node_rank}", LIMIT_S)
        wait_until(job, lambda: len(held(job)) == 4)
        kill_rank(job, 2)
        job.tell()
        codes = [agent.wait(LIMIT_S).returncode for agent in agents]
        assert codes == [0, 0], job.story()
        assert job.digests() == reference(**STEPS)
        assert [record["strategy"] for record in job.recoveries()][-1:] == ["recover-in-place"]
        assert manager.wait(LIMIT_S).returncode == 0


def held(job: harness.Job) -> set[int]:
    """Ranks whose present process has come to the step at which all are held."""
    present = {fact["rank"]: fact["pid"] for fact in job.facts("entered")}
    return {
        fact["rank"]
        for fact in job.facts("committed")
        if fact["pid"] == present[fact["rank"]] and fact["step"] >= int(HELD) - 1
    }
