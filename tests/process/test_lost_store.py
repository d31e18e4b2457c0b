"""The host of the store at which ranks meet dies while they are on their way to it."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest

from testbed.hosts import INTERFACE
from tests.process import harness
from tests.process.harness import wait_for_step, wait_until
from tests.process.test_recovery import reference as reference  # noqa: PLC0414

if TYPE_CHECKING:
    import pathlib

pytestmark = pytest.mark.slow

LIMIT_S = 90
STEPS = {"STEPS": "40"}


def test_a_survivor_leaves_its_way_to_a_store_that_is_gone(
    tmp_path: pathlib.Path, reference
) -> None:
    """Three nodes of one rank and a spare. Rank 2 dies, then the host of rank 0 and the store.

    Rank 1 connects to a host that answers nothing by then: it must leave that, with its state.
    """
    env = {
        "TASKD_RECOVER_STRATEGY": "recover",
        "TASKD_FAULT_TIMEOUT": "9",
        "GLOO_SOCKET_IFNAME": INTERFACE,
        "FAULTS": "1@0:entry-2:told-go-on",  # it goes to the store when the host is gone
        "HOLD_AT": "20",
        **STEPS,
    }
    with harness.hosts(tmp_path, 4) as hosts, harness.job(tmp_path / "job", **env) as job:
        first, second, third, spare = hosts
        job.env["TASKD_MANAGER_ADDR"] = second.address
        manager = job.start_manager(host=second)
        agents = [
            job.start_node("train.py", node_rank, 3, host, nproc=1)
            for node_rank, host in enumerate((first, second, third))
        ]
        for agent in agents:
            agent.wait_text("joined the manager at", LIMIT_S)
        agents.append(job.start_node("train.py", 3, 3, spare, nproc=1, TASKD_SPARE="1"))
        manager.wait_text("(1 wait now)", LIMIT_S)
        wait_for_step(job, 20)
        pids = {fact["rank"]: fact["pid"] for fact in job.facts("entered")}
        os.kill(pids[2], signal.SIGKILL)
        wait_until(job, lambda: (1, 2) in entries(job))
        assert first.kill()
        job.tell()
        for agent in agents[1:]:
            assert agent.wait(LIMIT_S).returncode == 0, job.story()
        assert len(job.facts("fault")) == 1
        assert job.digests() == reference(nproc=3, **STEPS)
        assert {fact["pid"] for fact in job.facts("entered") if fact["rank"] == 1} == {pids[1]}
        records = job.recoveries()
        assert records[-1]["strategy"] == "recover"
        assert [record["steps_redone"] for record in records] == [0] * len(records)
        wait_until(job, lambda: not job.leftovers())


def entries(job: harness.Job) -> set[tuple[int, int]]:
    """Which rank has come how often into its function, in one process."""
    return {(fact["rank"], fact["entry"]) for fact in job.facts("entered")}
