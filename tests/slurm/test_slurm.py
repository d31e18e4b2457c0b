"""examples/slurm/job.sbatch on a real Slurm: two nodes that train, and a spare.

node1    the script, the manager, a spare
node2    node 0 of the training: ranks 0 and 1
node3    node 1 of the training: ranks 2 and 3
"""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest

from tests.slurm.training import LIMIT_S, NAME, PROCESSES, STEPS, Training

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Callable

    from testbed.slurm import Cluster

    Reference = Callable[..., dict[int, str]]

# Some tests run two jobs one after the other.
pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(4 * LIMIT_S)]


@pytest.fixture
def training(cluster: Cluster, tmp_path: pathlib.Path) -> Training:
    return Training(cluster, tmp_path)


def ended_well(training: Training, job: int, expected: dict[int, str], kept: set[int]) -> None:
    """To the last bit, no step done twice, and with the same processes of the ranks `kept`."""
    about = training.end(job)
    assert (about["JobState"], about["ExitCode"]) == ("COMPLETED", "0:0"), training.text[-6000:]
    assert training.digests() == expected
    pids: dict[int, set[int]] = {}
    for fact in training.facts("entered"):
        pids.setdefault(fact["rank"], set()).add(fact["pid"])
    assert {rank for rank, seen in pids.items() if len(seen) == 1} == kept
    steps = [(fact["rank"], fact["step"]) for fact in training.facts("committed")]
    assert len(steps) == len(set(steps))


def worker(training: Training, rank: int) -> int:
    """Its newest process."""
    return [fact["pid"] for fact in training.facts("entered") if fact["rank"] == rank][-1]


def test_a_rank_that_is_killed_is_replaced_in_place(
    training: Training, reference: Reference
) -> None:
    job = training.submit()
    training.wait_for_step(8)
    os.kill(worker(training, 2), signal.SIGKILL)
    ended_well(training, job, reference(**STEPS), kept={0, 1, 3})
    (record,) = training.records()
    assert (record["strategy"], record["steps_redone"]) == ("recover-in-place", 0)
    assert [(fault["rank"], fault["detail"]) for fault in record["faults"]] == [(2, "SIGKILL")]


@pytest.mark.parametrize("lost", [0, 1])
def test_a_spare_takes_the_place_of_a_node_that_is_lost(
    cluster: Cluster, training: Training, reference: Reference, lost: int
) -> None:
    """Node 0 as well, at whose store all have met. Slurm keeps the job and its step."""
    job = training.submit()
    training.wait_text("(1 wait now)")
    training.wait_for_step(8)
    node = cluster.nodes[1 + lost]
    ranks = {PROCESSES * lost + number for number in range(PROCESSES)}
    killed = cluster.lose(node)
    assert {worker(training, rank) for rank in ranks} < killed
    ended_well(training, job, reference(**STEPS), kept={0, 1, 2, 3} - ranks)
    (record,) = training.records()
    assert (record["strategy"], record["steps_redone"]) == ("recover", 0)
    assert {fault["kind"] for fault in record["faults"]} == {"node lost"}
    assert f"Removing failed node {node.name} from JobId={job}" in cluster.log()
    assert f"srun: error: Node failure on {node.name}" in training.text


def test_a_manager_that_is_killed_is_started_again(
    cluster: Cluster, training: Training, reference: Reference
) -> None:
    """And decides about the next fault."""
    job = training.submit()
    training.wait_for_step(8)
    (manager,) = (
        pid for pid in cluster.nodes[0].host.pids() if f"(pid {pid})" in training.text
    )  # it says so itself
    os.kill(manager, signal.SIGKILL)
    training.wait_until(lambda: training.text.count("listens on") == 2, "another manager")
    again = training.text.rpartition("listens on")[2]
    registered = [f"node {number} of 2 registered" for number in range(2)]
    training.wait_until(
        lambda: all(told in training.text.rpartition(again)[2] for told in registered),
        "both nodes, at the new manager",
    )
    os.kill(worker(training, 1), signal.SIGKILL)
    ended_well(training, job, reference(**STEPS), kept={0, 2, 3})
    assert [record["strategy"] for record in training.records()] == ["recover-in-place"]


def test_training_goes_on_when_the_host_of_the_manager_is_lost(
    cluster: Cluster, training: Training, reference: Reference
) -> None:
    """The script is lost with it, and Slurm keeps the job: docs/launchers.md says so."""
    job = training.submit()
    training.wait_for_step(8)
    cluster.lose(cluster.nodes[0])
    training.wait_until(lambda: len(training.digests()) == 4, "the end of the training")
    training.wait_until(lambda: not training.leftovers(), "the end of the torchruns")
    assert training.digests() == reference(**STEPS)
    assert len({fact["pid"] for fact in training.facts("entered")}) == 4
    assert cluster.about(job)["JobState"] == "RUNNING"


def saved(training: Training) -> int:
    """The step that is in the only checkpoint, which is whole."""
    (checkpoint,) = training.checkpoints()
    manifest = checkpoint.manifest
    assert "is to end (SIGTERM)" in manifest.fault
    assert 8 <= manifest.version < int(STEPS["STEPS"])
    return manifest.version


def gone_on(training: Training, job: int, version: int, expected: dict[int, str]) -> None:
    """From the checkpoint, to the digest of a run that nothing has befallen."""
    about = training.end(job)
    assert (about["JobState"], about["ExitCode"]) == ("COMPLETED", "0:0"), training.text[-6000:]
    assert f"restoring step {version} of job {NAME} from" in training.text
    assert training.digests() == expected
    steps = [(fact["rank"], fact["step"]) for fact in training.facts("committed")]
    assert len(steps) == len(set(steps))


def test_a_job_that_is_cancelled_is_saved_and_the_next_one_goes_on(
    cluster: Cluster, training: Training, reference: Reference
) -> None:
    job = training.submit()
    training.wait_for_step(8)
    cluster.run("scancel", str(job))
    assert training.end(job)["JobState"] == "CANCELLED"
    version = saved(training)
    gone_on(training, training.submit(), version, reference(**STEPS))


def test_a_job_that_is_requeued_goes_on_from_what_it_has_saved(
    cluster: Cluster, training: Training, reference: Reference
) -> None:
    """As Slurm does it when a job is preempted."""
    job = training.submit()
    training.wait_for_step(8)
    cluster.run("scontrol", "requeue", str(job))
    training.wait_until(training.checkpoints, "a checkpoint")
    version = saved(training)
    gone_on(training, job, version, reference(**STEPS))
    assert cluster.about(job)["Restarts"] == "1"


def test_a_job_whose_time_is_over_is_saved_and_goes_on_in_another_turn(
    cluster: Cluster, training: Training, reference: Reference
) -> None:
    """--signal=B:USR1@120 sends this signal to the script, and to nothing else of the job."""
    job = training.submit()
    training.wait_for_step(8)
    cluster.run("scancel", "--batch", "--signal=USR1", str(job))
    training.wait_until(training.checkpoints, "a checkpoint")
    version = saved(training)
    gone_on(training, job, version, reference(**STEPS))
    assert cluster.about(job)["Restarts"] == "1"


def test_too_many_spares_are_refused_at_once(cluster: Cluster, tmp_path: pathlib.Path) -> None:
    training = Training(cluster, tmp_path, SPARES="3")
    about = training.end(training.submit())
    assert (about["JobState"], about["ExitCode"]) == ("FAILED", "2:0")
    assert training.text.strip() == "job.sbatch: SPARES=3 of --nodes=3 leaves none to train"


OWN = """#!/bin/bash
export TASKD_PROCESS_ENABLE=on TASKD_RECOVER_STRATEGY=recover MASTER_ADDR=node1 MASTER_PORT=29500
export MINDX_TASK_ID={name} TASKD_MANAGER_ADDR=node1 TASKD_BIND_ADDR=node1
srun --kill-on-bad-exit=0 --ntasks={tasks} --ntasks-per-node=1 --nodes={tasks} bash -c '
    exec python3 -m taskd.run --nnodes={nnodes} --node-rank=$SLURM_NODEID --nproc-per-node=2 \\
        --rdzv-conf=timeout=15 --master-addr=$MASTER_ADDR --master-port=$MASTER_PORT {script}'
"""


def own(training: Training, tasks: int, nnodes: int) -> int:
    """A job of somebody who has written the line with srun himself."""
    script = training.folder / "own.sh"
    told = OWN.format(tasks=tasks, nnodes=nnodes, name=NAME, script=training.env["TRAINING"])
    script.write_text(told)
    return training.submit(f"--job-name={NAME}", script=script)


def test_a_task_too_many_says_so_and_the_others_train(
    training: Training, reference: Reference
) -> None:
    job = own(training, tasks=3, nnodes=2)
    about = training.end(job)
    assert (about["JobState"], about["ExitCode"]) == ("FAILED", "1:0")
    assert (
        "taskd: --node-rank=2 is none of the nodes 0 to 1 that --nnodes=2 says: start as many "
        "torchruns as there are nodes, and those that are to wait for the place of a lost one with "
        "TASKD_SPARE=1"
    ) in training.text
    assert "Traceback" not in training.text
    assert training.digests() == reference(**STEPS)


def test_a_task_too_few_ends_all_within_the_time_for_the_rendezvous(training: Training) -> None:
    job = own(training, tasks=2, nnodes=3)
    about = training.end(job)
    assert (about["JobState"], about["ExitCode"]) == ("FAILED", "1:0")
    told = [line for line in training.text.splitlines() if "have not met at node1:29500: " in line]
    assert len(told) == 2
    for line in told:
        assert line.startswith("taskd: the nodes of --nnodes=3 have not met")
        assert "Start a torchrun for each node" in line
    assert "Traceback" not in training.text
    assert not training.facts("entered")
