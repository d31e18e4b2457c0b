"""Ranks that have declared that they are recoverable and have not come to their function.

Slow ones, and some that never will.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from typing import TYPE_CHECKING

import pytest

from tests.process import harness
from tests.process.test_half_open import pass_on

if TYPE_CHECKING:
    import pathlib

pytestmark = pytest.mark.slow


def pids(job: harness.Job, what: str) -> dict[int, set[int]]:
    """Processes of each rank that noted `what`."""
    found: dict[int, set[int]] = {}
    for fact in job.facts(what):
        found.setdefault(fact["rank"], set()).add(fact["pid"])
    return found


def run(job: harness.Job, nproc: int) -> harness.Finished:
    """Its fault comes when the node has its manager: it does not wait long for one to come."""
    job.start_manager()
    agent = job.start_agent("entering.py", nproc=nproc)
    agent.wait_text("joined the manager at", 60)
    job.tell()
    return agent.wait(90)


def test_a_rank_that_sets_up_for_longer_than_the_fault_timeout_is_left_alone(
    tmp_path: pathlib.Path,
) -> None:
    with harness.job(tmp_path, CASE="slow", TASKD_FAULT_TIMEOUT="8", SETUP_S="12") as job:
        finished = run(job, nproc=3)
        assert finished.returncode == 0, finished.output
        assert len(job.facts("fault")) == 1
        assert {rank: len(found) for rank, found in pids(job, "began").items()} == {
            0: 1,
            1: 2,
            2: 1,
        }
        assert sorted(pids(job, "done")) == [0, 1, 2]


def test_a_script_may_decorate_a_function_and_not_call_it(tmp_path: pathlib.Path) -> None:
    with harness.job(tmp_path, CASE="evaluate") as job:
        finished = job.run("entering.py", nproc=2)
        assert finished.returncode == 0, finished.output
        assert {rank: len(found) for rank, found in pids(job, "began").items()} == {0: 1, 1: 1}
        assert job.manager is not None
        assert job.manager.wait(20).returncode == 0, job.manager.text
        assert job.recoveries() == []


def test_a_job_that_ends_before_its_manager_is_reached_tells_it(tmp_path: pathlib.Path) -> None:
    """The network takes longer than the job: its manager would wait for somebody to join it."""
    with harness.job(tmp_path, CASE="evaluate") as job, contextlib.ExitStack() as stack:
        manager = job.start_manager()
        manager.wait_text("listens on", 60)
        between = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        address = f"127.0.0.1:{between.getsockname()[1]}"
        agent = job.start_agent("entering.py", nproc=2, TASKD_MANAGER_ADDR=address)
        client = stack.enter_context(between.accept()[0])
        harness.wait_until(job, lambda: sorted(pids(job, "began")) == [0, 1])
        workers = {pid for found in pids(job, "began").values() for pid in found}
        harness.wait_until(job, lambda: not any(os.path.exists(f"/proc/{pid}") for pid in workers))
        server = stack.enter_context(socket.create_connection(("127.0.0.1", job.port)))
        for ends in ((client, server), (server, client)):
            threading.Thread(target=pass_on, args=ends, daemon=True).start()
        assert agent.wait(60).returncode == 0, agent.text
        assert "joined the manager at" not in agent.text
        assert manager.wait(20).returncode == 0, manager.text
        assert "node 0 left: succeeded" in manager.text


def test_a_rank_that_leaves_before_its_function_is_wanted_back(tmp_path: pathlib.Path) -> None:
    with harness.job(tmp_path, CASE="one leaves") as job:
        finished = run(job, nproc=3)
        assert finished.returncode == 0, finished.output
        assert len(job.facts("fault")) == 1
        assert sorted(pids(job, "done")) == [0, 1, 2]
        (record,) = job.recoveries()
        assert [(fault["rank"], fault["kind"]) for fault in record["faults"]] == [
            (1, "exited early")
        ]
