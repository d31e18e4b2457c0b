"""SIGTERM to whichever process of a job: where `dump` is allowed, the job is saved and ends.

Platforms signal the first process of a pod, the training processes, or all of them at once.
"""

from __future__ import annotations

import contextlib
import os
import signal
from typing import TYPE_CHECKING

import pytest

from tests.process import harness
from tests.process.test_dump import checkpoints, resumed
from tests.process.test_recovery import reference, wait_for_step  # noqa: F401

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Iterable

    from taskd.checkpoint.folder import Checkpoint

pytestmark = pytest.mark.slow

STRATEGY = "recover-in-place,dump"


def terminate(pids: Iterable[int]) -> set[int]:
    """SIGTERM to all of these. Returns whom it has reached."""
    reached = set()
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
            reached.add(pid)
    return reached


def workers(job: harness.Job) -> dict[int, int]:
    """The newest process of each rank that has noted anything."""
    return {fact["rank"]: fact["pid"] for fact in job.facts()}


def saved(job: harness.Job, finished: harness.Finished) -> Checkpoint:
    """torchrun has ended as after a dump on SIGTERM, of the last step that any rank has begun."""
    assert finished.returncode == 2, job.story()
    assert job.manager is not None
    assert job.manager.wait(20).returncode == 1
    (checkpoint,) = checkpoints(job)
    assert checkpoint.manifest.fault.startswith("node 0 is to end (SIGTERM")
    version = checkpoint.manifest.version
    assert finished.last_line.endswith(f"; step {version} was saved in {checkpoint.path}")
    assert job.leftovers() == set()
    return checkpoint


@pytest.mark.parametrize("ranks", [(2,), (0, 3), (0, 1, 2, 3)])
def test_to_workers_saves_the_step_that_is_under_way(
    tmp_path: pathlib.Path,
    reference,  # noqa: F811
    ranks: tuple[int, ...],
) -> None:
    with harness.job(tmp_path, STEPS="40", SLEEP_S="0.05", TASKD_RECOVER_STRATEGY=STRATEGY) as job:
        job.start_manager()
        agent = job.start_agent("train.py")
        wait_for_step(job, 5)
        pids = workers(job)
        assert len(terminate(pids[rank] for rank in ranks)) == len(ranks)
        checkpoint = saved(job, agent.wait(60))
        assert "is to end (SIGTERM to rank " in agent.text
        assert [record["strategy"] for record in job.recoveries()] == ["dump"]
        resumed(job, checkpoint.manifest.version)
        assert job.digests() == reference(STEPS="40")


def test_to_everything_at_once(tmp_path: pathlib.Path, reference) -> None:  # noqa: F811
    """As scancel does it, or a hook that signals every python: manager and forkserver as well."""
    with harness.job(tmp_path, STEPS="40", SLEEP_S="0.05", TASKD_RECOVER_STRATEGY=STRATEGY) as job:
        manager = job.start_manager()
        agent = job.start_agent("train.py")
        wait_for_step(job, 5)
        reached = terminate(job.leftovers())
        assert {manager.process.pid, agent.process.pid, *workers(job).values()} < reached
        checkpoint = saved(job, agent.wait(60))
        resumed(job, checkpoint.manifest.version)
        assert job.digests() == reference(STEPS="40")


@pytest.mark.parametrize("how", ["flag", "exit", "late-exit", "fork"])
def test_the_own_handler_of_the_script_is_called_and_the_job_is_saved(
    tmp_path: pathlib.Path,
    reference,  # noqa: F811
    how: str,
) -> None:
    """One that notes the signal; one that ends the process; one that is installed in a step."""
    env = {"STEPS": "40", "SLEEP_S": "0.05", "TASKD_RECOVER_STRATEGY": STRATEGY}
    with harness.job(tmp_path, **env, ON_SIGTERM=how) as job:
        job.start_manager()
        agent = job.start_agent("train.py")
        wait_for_step(job, 5)
        terminate(job.leftovers())
        checkpoint = saved(job, agent.wait(60))
        called = {fact["rank"] for fact in job.facts("handler")}
        assert called == (set() if how == "fork" else {0, 1, 2, 3}), job.story()
        resumed(job, checkpoint.manifest.version)
        assert job.digests() == reference(STEPS="40")


def test_without_dump_a_signalled_worker_is_replaced(
    tmp_path: pathlib.Path,
    reference,  # noqa: F811
) -> None:
    with harness.job(tmp_path, STEPS="40", SLEEP_S="0.05") as job:
        job.start_manager()
        agent = job.start_agent("train.py")
        wait_for_step(job, 5)
        terminate([workers(job)[1]])
        assert agent.wait(60).returncode == 0, job.story()
        (record,) = job.recoveries()
        assert record["faults"][0]["detail"] == "SIGTERM"
        assert job.digests() == reference(STEPS="40")


def test_our_own_signal_ends_workers(tmp_path: pathlib.Path) -> None:
    """All of a group that is given up, after another SIGTERM than ours or without one."""
    with harness.job(
        tmp_path, FAULTS="1@5:forward:kill", TASKD_RECOVER_STRATEGY="dump", STEPS="400"
    ) as job:
        finished = job.run()
        assert finished.returncode == 2
        assert job.leftovers() == set()
