"""The dying gasp on real processes.

One whole checkpoint is left, and the next start goes on from it to the last bit.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
from typing import TYPE_CHECKING

import pytest
import torch

from taskd.checkpoint import folder
from tests.disks import small_disk
from tests.process import harness
from tests.process.harness import wait_for_step, wait_until
from tests.process.test_recovery import check_recovered, reference  # noqa: F401

if TYPE_CHECKING:
    import pathlib

pytestmark = pytest.mark.slow

HELD = "1@20:step:told-go-on"  # whoever signals has half of the job for it


def checkpoints(job: harness.Job) -> list[folder.Checkpoint]:
    """Whole ones, newest first; asserts that there is nothing else."""
    found = folder.scan(job.directory / "taskd_checkpoints", "test-job", is_full=True)
    assert found.passed_over == []
    assert sorted(os.listdir(job.directory / "taskd_checkpoints")) == sorted(
        checkpoint.path.name for checkpoint in found.valid
    )
    return found.valid


def end_with_dump(
    job: harness.Job, finished: harness.Finished, reason: str | set[str], version: int
) -> folder.Checkpoint:
    """torchrun ended as it does after a dump, and this is it.

    `reason`: one of them, where it depends on who is heard first.
    """
    assert finished.returncode == 2, finished.output[-4000:]
    assert job.manager is not None
    assert job.manager.wait(20).returncode == 1
    (checkpoint,) = checkpoints(job)
    assert checkpoint.manifest.version == version
    fault = checkpoint.manifest.fault
    expected = {reason} if isinstance(reason, str) else reason
    assert _without_manner(fault) in map(_without_manner, expected)
    end = re.fullmatch(r"taskd: job test-job has ended: (.*); (step .*)", finished.last_line)
    assert end is not None, finished.last_line
    assert _without_manner(end[1]) == _without_manner(fault)
    assert end[2] == f"step {version} was saved in {checkpoint.path}"
    assert job.leftovers() == set()
    return checkpoint


def _without_manner(fault: str) -> str:
    """How a process ended may be known only after the dump was ordered: its alarm comes first."""
    return fault.replace(" with SIGKILL", "")


def resumed(
    job: harness.Job, version: int, *, nproc: int = 4, script: str = "train.py"
) -> harness.Finished:
    """The same command line again."""
    before = len(job.facts("restored"))
    finished = job.run(script, nproc=nproc)
    assert finished.returncode == 0, finished.output[-4000:]
    assert job.manager is not None
    assert job.manager.wait(20).returncode == 0, job.manager.text
    sources = {fact["rank"]: fact["source"] for fact in job.facts("restored")[before:]}
    assert set(sources) == set(range(nproc))
    (source,) = set(sources.values())
    assert re.fullmatch(
        rf"read version {version} from "
        rf"{job.directory}/taskd_checkpoints/(dump|step)-0*{version}(-\d+)?",
        source,
    )
    return finished


@pytest.mark.parametrize(("fault", "version", "ended"), [
    ("1@5:forward:kill", 5, "rank 1 ended with SIGKILL"),
    ("0@5:backward:null", 5, ("rank 0 ended with SIGSEGV at address 0x0 (SEGV_MAPERR) in the main "
                             "thread")),
    ("3@5:optimizer:last-kill", 6, "rank 3 ended with SIGKILL"),
    ("2@1:before-commit:last-exit3", 2, "rank 2 ended with exit 3"),
    ("1@7:forward:raise", 7, "rank 1 raised ValueError: a bad sample"),
])  # fmt: skip
def test_the_next_start_goes_on_to_the_last_bit(
    tmp_path: pathlib.Path,
    reference,  # noqa: F811
    fault: str,
    version: int,
    ended: str,
) -> None:
    with harness.job(
        tmp_path, FAULTS=fault, TASKD_RECOVER_STRATEGY="dump", BATCH_NORM="1", ON_DUMP="1"
    ) as job:
        step = fault.split("@")[1].split(":", maxsplit=1)[0]
        checkpoint = end_with_dump(job, job.run(), f"{ended} at step {step}", version)
        assert checkpoint.manifest.world_size == 4
        assert set(checkpoint.manifest.writers) <= set(range(4)) - (
            set() if "raise" in fault else {int(fault[0])}
        )
        own = {
            file.name: checkpoint.path / file.name
            for file in checkpoint.manifest.files
            if file.name.startswith("user/")
        }
        assert set(own) == {
            f"user/iter_{version:07}/mp_rank_{rank:02}/model.pt"
            for rank in checkpoint.manifest.writers
        }
        saved = [torch.load(path, weights_only=True) for path in own.values()]
        assert all(
            torch.equal(tensor, state["first.weight"])
            for state in saved
            for tensor in [saved[0]["first.weight"]]
        )
        resumed(job, version)
        assert job.digests() == reference(BATCH_NORM="1")
        assert len(job.facts("fault")) == 1


def test_replacing_comes_first_and_the_dump_when_no_restart_is_left(
    tmp_path: pathlib.Path,
    reference,  # noqa: F811
) -> None:
    env = {
        "FAULTS": "1@3:forward:kill;2@6:backward:kill",
        "TASKD_RECOVER_STRATEGY": "recover-in-place,dump",
    }
    with harness.job(tmp_path, **env) as job:
        finished = job.run(options=("--max-restarts=1",))
        reason = (
            "restart budget spent: 1 of 1 restarts used (--max_restarts) when rank 2 "
            "ended at "
            "step 6"
        )
        end_with_dump(job, finished, reason, 6)
        replaced, dumped = job.recoveries()
        assert (replaced["strategy"], replaced["code"]) == ("recover-in-place", 0)
        assert replaced["skipped"] == [{"strategy": "retry", "why": "1 process is gone"}]
        assert (dumped["strategy"], dumped["code"]) == ("dump", 406)
        names = ["retry", "recover-in-place", "recover", "elastic-training", "restart"]
        assert [each["strategy"] for each in dumped["skipped"]] == names
        assert all(each["why"].startswith("restart budget spent") for each in dumped["skipped"])
        resumed(job, 6)
        assert job.digests() == reference()
        assert len(job.facts("fault")) == 2


@pytest.mark.parametrize(("grace_s", "version"), [(60, 2), (8, 1)])
def test_a_step_is_done_before_a_node_ends_if_it_takes_less_than_half_of_the_grace(
    tmp_path: pathlib.Path, grace_s: int, version: int
) -> None:
    with harness.job(
        tmp_path,
        LAYOUT="hsdp",
        STEP_S="7",
        TASKD_RECOVER_STRATEGY="dump",
        TASKD_GRACE_S=str(grace_s),
    ) as job:
        job.start_manager()
        agent = job.start_agent("sharded.py")
        wait_for_step(job, 1)
        agent.process.send_signal(signal.SIGTERM)
        end_with_dump(job, agent.wait(60), "node 0 is to end (SIGTERM)", version)


@pytest.mark.parametrize("nproc", [2, 6])
def test_another_number_of_ranks_goes_on_from_it(tmp_path: pathlib.Path, nproc: int) -> None:
    with harness.job(tmp_path, FAULTS="1@5:forward:kill", TASKD_RECOVER_STRATEGY="dump") as job:
        end_with_dump(job, job.run(), "rank 1 ended with SIGKILL at step 5", 5)
        resumed(job, 5, nproc=nproc)
        done = [fact for fact in job.facts("done") if fact["step"] == 12]
        assert len({fact["digest"] for fact in done}) == 1
        assert {fact["rank"] for fact in done} == set(range(nproc))


def test_a_node_that_is_to_end_saves_at_the_end_of_the_step(
    tmp_path: pathlib.Path,
    reference,  # noqa: F811
) -> None:
    """SIGTERM, as a pod gets it that is evicted."""
    env = {"STEPS": "40", "SLEEP_S": "0.1", "TASKD_RECOVER_STRATEGY": "recover-in-place,dump"}
    env["FAULTS"] = HELD
    with harness.job(tmp_path, **env) as job:
        job.start_manager()
        agent = job.start_agent("train.py")
        wait_for_step(job, 5)
        agent.process.send_signal(signal.SIGTERM)
        job.tell()
        finished = agent.wait(60)
        committed = {
            max(fact["step"] for fact in job.facts("committed") if fact["rank"] == rank)
            for rank in range(4)
        }
        assert len(committed) == 1, (
            "all of them end with the same step, whose commit() does not return"
        )
        checkpoint = end_with_dump(job, finished, "node 0 is to end (SIGTERM)", committed.pop() + 1)
        assert checkpoint.manifest.writers == (0, 1, 2, 3)
        resumed(job, checkpoint.manifest.version)
        assert job.digests() == reference(STEPS="40")


def test_the_manager_of_the_same_pod_stays_until_the_job_is_saved(tmp_path: pathlib.Path) -> None:
    """It gets the signal, too, and before."""
    env = {"STEPS": "40", "SLEEP_S": "0.1", "TASKD_RECOVER_STRATEGY": "dump", "FAULTS": HELD}
    with harness.job(tmp_path, **env) as job:
        manager = job.start_manager()
        agent = job.start_agent("train.py")
        wait_for_step(job, 5)
        manager.process.send_signal(signal.SIGTERM)
        manager.wait_text("stays until the job is saved", 20)
        agent.process.send_signal(signal.SIGTERM)
        job.tell()
        assert agent.wait(60).returncode == 2
        assert manager.wait(20).returncode == 1
        assert len(checkpoints(job)) == 1


def test_where_nothing_can_be_written_the_reason_is_told(tmp_path: pathlib.Path) -> None:
    """The disk is full."""
    path = tmp_path / "disk"
    with (
        small_disk(path, 64),
        harness.job(
            tmp_path / "job",
            FAULTS="1@5:forward:kill",
            TASKD_RECOVER_STRATEGY="dump",
            TASKD_CHECKPOINT_DIR=str(path),
        ) as job,
    ):
        finished = job.run()
        assert finished.returncode == 1
        assert finished.last_line.startswith(
            "taskd: job test-job has ended: rank 1 ended with SIGKILL at step 5; and no dump: rank "
        )
        assert f"{path}" in finished.last_line
        assert "No space left on device" in finished.last_line
        assert os.listdir(path) == []
        assert job.leftovers() == set()


def test_exit_is_no_dump(tmp_path: pathlib.Path) -> None:
    with harness.job(tmp_path, FAULTS="1@5:forward:kill", TASKD_RECOVER_STRATEGY="exit") as job:
        finished = job.run()
        assert finished.returncode == 1
        assert finished.last_line == (
            "taskd: job test-job has ended: rank 1 ended with SIGKILL at step 5; no restart is "
            "allowed (recover-strategy)"
        )
        assert not (tmp_path / "taskd_checkpoints").exists()


def test_a_damaged_dump_is_passed_over_for_the_one_before(
    tmp_path: pathlib.Path,
    reference,  # noqa: F811
) -> None:
    with harness.job(
        tmp_path, FAULTS="1@5:forward:kill;2@8:forward:kill", TASKD_RECOVER_STRATEGY="dump"
    ) as job:
        end_with_dump(job, job.run(), "rank 1 ended with SIGKILL at step 5", 5)
        assert job.run().returncode == 2
        assert job.manager is not None
        assert job.manager.wait(20).returncode == 1
        newest, older = checkpoints(job)
        assert (newest.manifest.version, older.manifest.version) == (8, 5)
        victim = max(newest.path.glob("*.distcp"), key=lambda path: path.stat().st_size)
        with victim.open("r+b") as file:
            file.seek(victim.stat().st_size // 2)
            byte = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte[0] ^ 1]))
        finished = job.run()
        assert finished.returncode == 0, finished.output[-3000:]
        assert job.manager.wait(20).returncode == 0
        assert {fact["source"] for fact in job.facts("restored")[-4:]} == {
            f"read version 5 from {older.path}"
        }
        assert (
            f"taskd: restoring step 5 of job test-job from {older.path}: "
            "the newest whole checkpoint"
        ) in finished.output
        assert f"passed over {newest.path.name}: rank " in finished.output
        assert job.digests() == reference()
        assert newest.path.is_dir(), "nothing is deleted"


def test_two_jobs_in_one_folder_leave_each_other_alone(tmp_path: pathlib.Path, reference) -> None:  # noqa: F811
    shared = str(tmp_path / "shared")
    with harness.job(
        tmp_path / "a",
        FAULTS="1@5:forward:kill",
        TASKD_RECOVER_STRATEGY="dump",
        TASKD_CHECKPOINT_DIR=shared,
    ) as job:
        assert job.run().returncode == 2
        assert job.manager is not None
        assert job.manager.wait(20).returncode == 1
    with harness.job(
        tmp_path / "b", TASKD_CHECKPOINT_DIR=shared, MINDX_TASK_ID="another-job"
    ) as job:
        finished = job.run()
        check_recovered(job, finished, reference(), faults=0, replaced=set())
        assert {fact["source"] for fact in job.facts("restored")} == {"nothing: fresh start"}
    (kept,) = os.listdir(shared)
    assert json.loads((tmp_path / "shared" / kept / "taskd.json").read_text())["job"] == "test-job"


def test_periodic_checkpoints_survive_the_death_of_everything(
    tmp_path: pathlib.Path,
    reference,  # noqa: F811
) -> None:
    """Manager, torchrun and all ranks at once."""
    with harness.job(tmp_path, STEPS="40", SLEEP_S="0.05", SAVE_EVERY="5") as job:
        manager = job.start_manager()
        agent = job.start_agent("train.py")
        wait_for_step(job, 17)
        for pid in (manager.process.pid, agent.process.pid, *harness.marked(job.mark)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        agent.wait(20), manager.wait(20)
        wait_until(job, lambda: not harness.marked(job.mark))
        found = folder.scan(tmp_path / "taskd_checkpoints", "test-job", is_full=True)
        committed = min(
            max(fact["step"] for fact in job.facts("committed") if fact["rank"] == rank)
            for rank in range(4)
        )
        newest = found.valid[0].manifest.version
        assert newest in range(committed - 10, committed + 2), "one may have been under way"
        resumed(job, newest)
        assert job.digests() == reference(STEPS="40")
        assert [checkpoint.manifest.version for checkpoint in checkpoints(job)] == [40, 35, 30]


def test_periodic_checkpoints_go_on_after_a_fault(tmp_path: pathlib.Path, reference) -> None:  # noqa: F811
    with harness.job(
        tmp_path,
        STEPS="30",
        SLEEP_S="0.02",
        SAVE_EVERY="4",
        FAULTS="1@9:forward:kill;0@17:backward:kill",
    ) as job:
        finished = job.run()
        assert job.manager is not None
        assert finished.returncode == job.manager.wait(20).returncode == 0, finished.output[-3000:]
        assert job.digests() == reference(STEPS="30")
        assert [checkpoint.manifest.version for checkpoint in checkpoints(job)] == [28, 24, 20]
        assert [record["steps_redone"] for record in job.recoveries()] == [0, 0]


def test_without_a_manager_the_group_starts_anew_from_its_checkpoints_and_writes_more(
    tmp_path: pathlib.Path,
    reference,  # noqa: F811
) -> None:
    env = {
        "STEPS": "30",
        "SLEEP_S": "0.02",
        "SAVE_EVERY": "4",
        "FAULTS": "1@14:forward:kill",
        "TASKD_FAULT_TIMEOUT": "3",
    }
    with harness.job(tmp_path, **env) as job:
        finished = job.run(manager=False)
        assert finished.returncode == 0, finished.output[-4000:]
        assert len(job.facts("fault")) == 1
        (source,) = {fact["source"] for fact in job.facts("restored")[4:]}
        assert re.fullmatch(
            r"read version (8|12) from "
            rf"{tmp_path}/taskd_checkpoints/step-0*(8|12)",
            source,
        )
        assert job.digests() == reference(STEPS="30")
        assert [checkpoint.manifest.version for checkpoint in checkpoints(job)] == [28, 24, 20]
