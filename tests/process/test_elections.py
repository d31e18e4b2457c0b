"""The host of the manager is lost: the other agents elect where the next one starts."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest

from taskd import keys
from testbed.hosts import INTERFACE
from tests.process import harness
from tests.process.test_recovery import (
    reference,  # noqa: F401
    wait_for_step,
)

if TYPE_CHECKING:
    import pathlib

pytestmark = pytest.mark.slow

LIMIT_S = 60
NODES = 4


def _start(job: harness.Job, node_rank: int, **env: str) -> harness.Output:
    options = (
        f"--nnodes={NODES}",
        f"--node-rank={node_rank}",
        "--master-addr=127.0.0.1",
        f"--master-port={job.master_port}",
    )
    return job.start_agent("train.py", nproc=1, options=options, **env)


@pytest.mark.parametrize("has_secret", [False, True])
def test_the_manager_is_lost_with_its_node(
    tmp_path: pathlib.Path,
    reference,  # noqa: F811
    has_secret: bool,
) -> None:
    """Node 0 is killed with the manager: a spare takes its place, in the same step."""
    env = {}
    if has_secret:
        assert keys.main(["new", "--out", str(tmp_path / "secret")]) == 0
        env["TASKD_SECRET_FILE"] = str(tmp_path / "secret")
    with harness.job(
        tmp_path,
        TASKD_RECOVER_STRATEGY="recover",
        TASKD_MANAGER="auto",
        TASKD_FAULT_TIMEOUT="6",
        STEPS="80",
        SLEEP_S="0.05",
        **env,
    ) as job:
        manager = job.start_manager()
        agents = [_start(job, node_rank) for node_rank in range(NODES)]
        spare = _start(job, NODES, TASKD_SPARE="1")
        manager.wait_text("(1 wait now)", LIMIT_S)
        wait_for_step(job, 8)
        for process in (manager.process, agents[0].process):
            os.kill(process.pid, signal.SIGKILL)
        outputs = [agent.wait(LIMIT_S) for agent in (*agents[1:], spare)]
        assert [output.returncode for output in outputs] == [0] * 4, job.story()
        records = job.recoveries()
        assert [record["strategy"] for record in records] == ["recover"]
        assert records[0]["steps_redone"] == 0
        assert job.digests() == reference(STEPS="80")
        pids = {(fact["rank"], fact["pid"]) for fact in job.facts("entered")}
        assert len(pids) == NODES + 1, "rank 0 is another process, and nobody else is"
        assert job.leftovers() == set()


@pytest.mark.extended  # the partitions are played in tests/simulation/test_partitions.py
def test_a_host_that_is_cut_off_with_the_manager_does_not_go_on(
    tmp_path: pathlib.Path,
    reference,  # noqa: F811
) -> None:
    """The other part does, with a spare; when the network heals, the former part ends."""
    steps = {"STEPS": "100"}
    with (
        harness.hosts(tmp_path, 4) as hosts,
        harness.job(
            tmp_path / "job",
            GLOO_SOCKET_IFNAME=INTERFACE,
            TASKD_RECOVER_STRATEGY="recover",
            TASKD_MANAGER="auto",
            TASKD_FAULT_TIMEOUT="6",
            SLEEP_S="0.05",
            **steps,
        ) as job,
    ):
        manager = job.start_manager(host=hosts[0])
        for node_rank in range(3):
            job.start_node("train.py", node_rank, 3, hosts[node_rank], nproc=1)
        spare = job.start_node("train.py", 3, 3, hosts[3], nproc=1, TASKD_SPARE="1")
        manager.wait_text("(1 wait now)", LIMIT_S)
        wait_for_step(job, 8)
        hosts[0].cut()
        outputs = [agent.wait(LIMIT_S) for agent in (*job.agents[1:3], spare)]
        assert [output.returncode for output in outputs] == [0] * 3, job.story()
        assert job.digests() == reference(nproc=3, **steps)
        assert [record["strategy"] for record in job.recoveries()] == ["recover"]
        assert hosts[0].counts()["lost_out"] > 0
        assert "more than half of the agents are out of reach" in manager.text
        assert job.agents[0].process.poll() is None, "it waits for the others"
