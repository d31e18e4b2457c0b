"""A node that is cut off while it has a fault, in a job that replaces nodes, does not go on alone.

The others wait for it, or for another one in its place; so it waits, too, and is taken back.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from typing import TYPE_CHECKING

import pytest

from testbed.hosts import INTERFACE
from tests.process import harness
from tests.process.harness import wait_for_step, wait_until
from tests.process.test_recovery import reference as reference  # noqa: PLC0414

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Iterator

    from testbed.hosts import Hosts

pytestmark = pytest.mark.slow

LIMIT_S = 90
STEPS = {"STEPS": "60"}
FAULT_TIMEOUT_S = 6


@contextlib.contextmanager
def two_hosts(directory: pathlib.Path, **env: str) -> Iterator[tuple[harness.Job, Hosts]]:
    """Two nodes of two ranks on a host each, in a job that replaces nodes and has begun."""
    with (
        harness.hosts(directory, 2) as hosts,
        harness.job(
            directory / "job",
            GLOO_SOCKET_IFNAME=INTERFACE,
            TASKD_FAULT_TIMEOUT=str(FAULT_TIMEOUT_S),
            TASKD_RECOVER_STRATEGY="recover",
            SLEEP_S="0.05",
            HOLD_AT="50",
            **STEPS | env,
        ) as job,
    ):
        job.start_manager(host=hosts[0])
        for node_rank, host in enumerate(hosts):
            job.start_node("train.py", node_rank, 2, host)
        for agent in job.agents:
            agent.wait_text("joined the manager at", LIMIT_S)
        wait_for_step(job, 5)
        yield job, hosts


def kill_rank(job: harness.Job, rank: int) -> None:
    """SIGKILL to the process that it has now."""
    pid = next(fact["pid"] for fact in reversed(job.facts("entered")) if fact["rank"] == rank)
    os.kill(pid, signal.SIGKILL)


def test_a_rank_dies_while_its_node_is_cut_off(tmp_path: pathlib.Path, reference) -> None:
    with two_hosts(tmp_path) as (job, hosts):
        hosts[1].cut()
        threading.Event().wait(1)
        kill_rank(job, 2)
        threading.Event().wait(8)
        assert hosts[1].counts()["lost_out"] > 0
        hosts[1].heal()
        job.tell()
        codes = [agent.wait(LIMIT_S).returncode for agent in job.agents]
        assert codes == [0, 0], job.story()
        assert job.digests() == reference(**STEPS)
        assert [record["strategy"] for record in job.recoveries()] == ["recover"]
        assert "Going on as plain torchrun" not in job.agents[1].text
        wait_until(job, lambda: not job.leftovers())


@pytest.mark.extended(
    "nearest: test_nodes_that_see_that_the_manager_is_dead_fall_back_together; "
    "tests/simulation/test_partitions.py: test_in_every_pattern_the_larger_part_goes_on_*"
)
def test_nobody_comes_back_before_the_others_have_given_up(tmp_path: pathlib.Path) -> None:
    """Each node ends, and says why; the one that is cut off what to do, too."""
    with two_hosts(tmp_path, TASKD_WAIT_RESCHEDULE_TIMEOUT="2") as (job, hosts):
        hosts[1].cut()
        kill_rank(job, 2)
        here, there = [agent.wait(LIMIT_S) for agent in job.agents]
        assert (here.returncode, there.returncode) == (1, 1), job.story()
        assert "nobody took its place within 2 s (node 1)" in here.last_line
        assert "rank 2 ended with SIGKILL" in there.last_line
        assert "this node was cut off from the manager for longer" in there.last_line
        assert "start this torchrun again" in there.last_line
        assert "Going on as plain torchrun" not in there.output
        wait_until(job, lambda: not job.leftovers())


def test_nodes_that_see_that_the_manager_is_dead_fall_back_together(
    tmp_path: pathlib.Path, reference
) -> None:
    """Its host says that nobody listens there: none is cut off, and none is waited for."""
    with two_hosts(tmp_path) as (job, _):
        assert job.manager is not None
        os.kill(job.manager.process.pid, signal.SIGKILL)
        job.tell()
        kill_rank(job, 2)
        codes = [agent.wait(LIMIT_S).returncode for agent in job.agents]
        assert codes == [0, 0], job.story()
        assert job.digests() == reference(**STEPS)
        for agent in job.agents:
            assert "Going on as plain torchrun" in agent.text
