"""SIGTERM to whichever process of a job: where `dump` is allowed, the job is saved and ends.

Platforms signal the first process of a pod, the training processes, or all of them at once.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
from typing import TYPE_CHECKING

import pytest

from benchmarks import sigterm
from taskd.checkpoint import folder
from tests.process import harness
from tests.process.harness import wait_for_step, wait_until
from tests.process.test_dump import checkpoints, resumed
from tests.process.test_recovery import reference  # noqa: F401

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Iterable

    from taskd.checkpoint.folder import Checkpoint

pytestmark = pytest.mark.slow

STRATEGY = "recover-in-place,dump"
TRAINING = {"STEPS": "40", "SLEEP_S": "0.05", "HOLD_AT": "35"}  # not over before it is signalled


def terminate(pids: Iterable[int]) -> set[int]:
    """SIGTERM to all of these. Returns whom it has reached."""
    reached = set()
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
            reached.add(pid)
    return reached


def everything(job: harness.Job) -> list[int]:
    """The manager first: a job that has nothing to save may be over before all have been told."""
    manager = set() if job.manager is None else {job.manager.process.pid}
    return [*manager, *(job.leftovers() - manager)]


def workers(job: harness.Job) -> dict[int, int]:
    """The newest process of each rank that has noted anything."""
    return {fact["rank"]: fact["pid"] for fact in job.facts()}


def wait_for(job: harness.Job, what: str, count: int) -> None:
    """Until so many ranks have noted this."""
    wait_until(job, lambda: len({fact["rank"] for fact in job.facts(what)}) >= count)


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


@pytest.mark.parametrize(
    "ranks",
    [
        (2,),
        pytest.param((0, 3), marks=pytest.mark.extended("[ranks0]; test_to_everything_at_once")),
        (0, 1, 2, 3),
    ],
)
def test_to_workers_saves_the_step_that_is_under_way(
    tmp_path: pathlib.Path,
    reference,  # noqa: F811
    ranks: tuple[int, ...],
) -> None:
    with harness.job(tmp_path, **TRAINING, TASKD_RECOVER_STRATEGY=STRATEGY) as job:
        job.start_manager()
        agent = job.start_agent("train.py")
        wait_for_step(job, 5)
        pids = workers(job)
        assert len(terminate(pids[rank] for rank in ranks)) == len(ranks)
        job.tell()
        checkpoint = saved(job, agent.wait(60))
        assert "is to end (SIGTERM to rank " in agent.text
        assert [record["strategy"] for record in job.recoveries()] == ["dump"]
        resumed(job, checkpoint.manifest.version)
        assert job.digests() == reference(STEPS="40")


def test_said_again_while_torchrun_ends_it_changes_nothing(tmp_path: pathlib.Path) -> None:
    """As by a platform that signals torchrun, its parent shell, and the shell hands it on."""
    with harness.job(tmp_path, **TRAINING, TASKD_RECOVER_STRATEGY=STRATEGY) as job:
        job.start_manager()
        agent = job.start_agent("train.py")
        wait_for_step(job, 5)
        assert terminate([agent.process.pid])
        job.tell()
        agent.wait_text("has ended: ", 60)
        times = 0
        while agent.process.poll() is None:
            times += len(terminate([agent.process.pid]))
        assert times
        saved(job, agent.wait(60))


def test_to_everything_at_once(tmp_path: pathlib.Path, reference) -> None:  # noqa: F811
    """As scancel does it, or a hook that signals every python: manager and forkserver as well."""
    with harness.job(tmp_path, **TRAINING, TASKD_RECOVER_STRATEGY=STRATEGY) as job:
        manager = job.start_manager()
        agent = job.start_agent("train.py")
        wait_for_step(job, 5)
        reached = terminate(everything(job))
        job.tell()
        assert {manager.process.pid, agent.process.pid, *workers(job).values()} < reached
        checkpoint = saved(job, agent.wait(60))
        resumed(job, checkpoint.manifest.version)
        assert job.digests() == reference(STEPS="40")


def test_to_everything_at_a_moment_of_the_benchmark(tmp_path: pathlib.Path) -> None:
    """With sharded state. benchmarks/sigterm.py has 30 of them."""
    expected = sigterm.undisturbed("sharded.py", tmp_path / "reference")
    version, _ = sigterm.episode("hsdp", tmp_path / "job", 1.3, expected)
    assert version > 0


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
        terminate(everything(job))
        checkpoint = saved(job, agent.wait(60))
        called = {fact["rank"] for fact in job.facts("handler")}
        assert called == (set() if how == "fork" else {0, 1, 2, 3}), job.story()
        resumed(job, checkpoint.manifest.version)
        assert job.digests() == reference(STEPS="40")


def test_without_dump_a_signalled_worker_is_replaced(
    tmp_path: pathlib.Path,
    reference,  # noqa: F811
) -> None:
    with harness.job(tmp_path, **TRAINING) as job:
        job.start_manager()
        agent = job.start_agent("train.py")
        wait_for_step(job, 5)
        terminate([workers(job)[1]])
        job.tell()
        assert agent.wait(60).returncode == 0, job.story()
        (record,) = job.recoveries()
        assert record["faults"][0]["detail"] == "SIGTERM"
        assert job.digests() == reference(STEPS="40")


def test_our_own_signal_is_not_the_platforms(tmp_path: pathlib.Path) -> None:
    """A shard is lost, so that the agent ends all processes by SIGTERM and starts them anew."""
    env = {"LAYOUT": "fsdp", "FAULTS": "1@5:forward:kill", "TASKD_RECOVER_STRATEGY": STRATEGY}
    with harness.job(tmp_path, **env) as job:
        finished = job.run("sharded.py")
        assert finished.returncode == 0, job.story()
        assert [record["strategy"] for record in job.recoveries()] == ["restart"]
        assert "is to end" not in finished.output
        assert len({fact["pid"] for fact in job.facts("entered")}) == 8


def test_before_the_first_step_there_is_nothing_to_save(tmp_path: pathlib.Path) -> None:
    """One rank is still busy, the others wait for it: nobody waits for the grace period."""
    with harness.job(
        tmp_path, FAULTS="1@0:boot:sleep", TASKD_RECOVER_STRATEGY=STRATEGY, TASKD_GRACE_S="120"
    ) as job:
        manager = job.start_manager()
        agent = job.start_agent("train.py")
        wait_for(job, "entered", 3)
        wait_for(job, "fault", 1)
        terminate(everything(job))
        finished = agent.wait(60)
        assert finished.returncode == 1, job.story()
        assert re.fullmatch(
            r"taskd: job test-job has ended: node 0 is to end \(SIGTERM( to rank \d)?\); and no "
            r"dump: rank 1 has not come to its function yet",
            finished.last_line,
        )
        assert manager.wait(20).returncode == 1
        assert not (tmp_path / "taskd_checkpoints").exists()
        assert job.leftovers() == set()


def test_twice_is_once(tmp_path: pathlib.Path) -> None:
    """The hook of the pod signals everything, and then the platform does."""
    with harness.job(tmp_path, STEPS="40", SLEEP_S="0.3", TASKD_RECOVER_STRATEGY=STRATEGY) as job:
        job.start_manager()
        agent = job.start_agent("train.py")
        wait_for_step(job, 2)
        terminate(everything(job))
        agent.wait_text("the job is to be saved first", 20)
        assert terminate([agent.process.pid, job.manager.process.pid, *workers(job).values()])
        saved(job, agent.wait(60))


def test_within_a_recovery(tmp_path: pathlib.Path, reference) -> None:  # noqa: F811
    """A rank dies, and is being replaced when the signal comes."""
    with harness.job(tmp_path, **TRAINING, TASKD_RECOVER_STRATEGY=STRATEGY) as job:
        manager = job.start_manager()
        agent = job.start_agent("train.py")
        wait_for_step(job, 5)
        os.kill(workers(job)[1], signal.SIGKILL)
        manager.wait_text("-> ReplaceWorker", 20)
        terminate(everything(job))
        job.tell()
        checkpoint = saved(job, agent.wait(60))
        resumed(job, checkpoint.manifest.version)
        assert job.digests() == reference(STEPS="40")


def test_within_a_dump(tmp_path: pathlib.Path) -> None:
    """It is written to its end."""
    with harness.job(
        tmp_path, STEPS="40", SLEEP_S="0.05", HIDDEN="1500", TASKD_RECOVER_STRATEGY="dump"
    ) as job:
        manager = job.start_manager()
        agent = job.start_agent("train.py")
        wait_for_step(job, 5)
        os.kill(workers(job)[1], signal.SIGKILL)
        manager.wait_text("-> Dump", 20)
        terminate(everything(job))
        finished = agent.wait(60)
        assert finished.returncode == 2, job.story()
        assert manager.wait(20).returncode == 1
        (checkpoint,) = checkpoints(job)
        assert checkpoint.manifest.fault.startswith("rank 1 ended with SIGKILL at step")


@pytest.mark.parametrize("fault", ["", "1@5:forward:sleep"])
def test_a_grace_of_one_second(tmp_path: pathlib.Path, fault: str) -> None:
    """Saved whole or not at all, also where a rank does not finish its step."""
    env = {"STEPS": "400", "SLEEP_S": "0.05", "TASKD_RECOVER_STRATEGY": STRATEGY}
    with harness.job(tmp_path, **env, TASKD_GRACE_S="1", FAULTS=fault) as job:
        job.start_manager()
        agent = job.start_agent("train.py")
        wait_for(job, "fault", 1) if fault else wait_for_step(job, 5)
        terminate(everything(job))
        finished = agent.wait(40)
        # A draft may be left, if the time was over while it was written: the next start removes it.
        found = folder.scan(tmp_path / "taskd_checkpoints", "test-job", is_full=True).valid
        assert job.manager is not None
        job.manager.wait(20)
        if finished.returncode == 2:
            assert found, job.story()
        else:  # one that was just being published may be there, and nobody has heard of it
            assert "ends without having saved: 1 s (TASKD_GRACE_S) are over" in finished.output
            assert not found or "-> Publish" in job.manager.text, job.story()
        assert job.leftovers() == set()


def test_a_grace_that_is_too_short_for_a_checkpoint_is_said_once(tmp_path: pathlib.Path) -> None:
    env = {"SAVE_EVERY": "3", "TASKD_RECOVER_STRATEGY": STRATEGY, "TASKD_GRACE_S": "0.002"}
    with harness.job(tmp_path, **env) as job:
        finished = job.run()
        assert finished.returncode == 0, job.story()
        said = [line for line in finished.output.splitlines() if "set TASKD_GRACE_S to" in line]
        assert len(said) == 1
        assert " WARNING taskd: rank 0: a checkpoint took " in said[0]


def test_after_a_fault_the_job_may_go_on_from_its_dump(
    tmp_path: pathlib.Path,
    reference,  # noqa: F811
) -> None:
    """TASKD_AFTER_DUMP: twice after a fault, but not after SIGTERM."""
    env = {"TASKD_RECOVER_STRATEGY": "dump", "TASKD_AFTER_DUMP": "restart", **TRAINING}
    faults = "1@5:forward:kill;0@9:backward:kill"
    with harness.job(tmp_path, **env, FAULTS=faults) as job:
        manager = job.start_manager()
        agent = job.start_agent("train.py")
        wait_for_step(job, 12)
        assert len(job.facts("fault")) == 2
        terminate(everything(job))
        job.tell()
        finished = agent.wait(60)
        assert finished.returncode == 2, job.story()
        assert manager.wait(20).returncode == 1
        found = [checkpoint.manifest for checkpoint in checkpoints(job)]
        assert [manifest.version for manifest in found[1:]] == [9, 5]
        assert found[0].fault.startswith("node 0 is to end (SIGTERM")
        assert [record["strategy"] for record in job.recoveries()] == ["dump"] * 3
        assert [record["steps_redone"] for record in job.recoveries()] == [0, 0, 0]
        resumed(job, found[0].version)
        assert job.digests() == reference(STEPS="40")


def test_the_manager_that_an_agent_started_stays_too(tmp_path: pathlib.Path) -> None:
    """It is signalled with everything else, and not started once more."""
    env = {"TASKD_RECOVER_STRATEGY": STRATEGY, "TASKD_MANAGER": "auto"}
    with harness.job(tmp_path, STEPS="40", FAULTS="1@5:step:told-go-on", **env) as job:
        agent = job.start_agent("train.py")
        agent.wait_text("joined the manager", 60)
        wait_for_step(job, 5)
        terminate(everything(job))
        job.tell()
        finished = agent.wait(60)
        assert finished.returncode == 2, job.story()
        (checkpoint,) = checkpoints(job)
        assert f"was saved in {checkpoint.path}" in finished.last_line
        assert job.leftovers() == set()
