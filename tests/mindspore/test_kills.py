"""kill -9: all processes start anew, and go on after the last step that all of them had."""

from __future__ import annotations

import os
import random
import re
import signal
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.mindspore.jobs import Job

STEPS_OF_EPOCH, STEPS_OF_KILLS = 20, 90  # of scripts/train.py
PLACES = ("begin", "computed", "committed")
KILLS = int(os.environ.get("KILLS", "10"))  # of each rank


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("ranks", [2, 4])
def test_each_rank_is_killed_at_seeded_steps(
    job: Job, tmp_path, ranks: int, record_property
) -> None:
    # Every other step, so that nobody dies while the others have not heard of the death before: a
    # rank that has committed begins the next step alone.
    epochs = STEPS_OF_KILLS // STEPS_OF_EPOCH + 1
    assert job.start(ranks, EPOCHS=str(epochs)).end() == 0, job.output
    (expected,) = job.digests(ranks)
    seed = os.environ.get("TASKD_TEST_SEED", "0")
    chance = random.Random(f"{seed}/{ranks}")
    steps = sorted(chance.sample(range(2, STEPS_OF_KILLS, 2), KILLS * ranks))
    victims = [*range(ranks)] * KILLS
    chance.shuffle(victims)
    faults = [
        f"{rank}@{step}:{chance.choice(PLACES)}" for rank, step in zip(victims, steps, strict=True)
    ]
    record_property("seed", seed)
    record_property("kills", " ".join(faults))

    assert job.start(ranks, FAULTS=",".join(faults), EPOCHS=str(epochs)).end() == 0, job.output
    struck = sorted(path.name.removeprefix("struck-") for path in tmp_path.glob("struck-*"))
    assert struck == sorted(faults)
    assert job.digests(ranks) == {expected}
    record_property("digest", f"{expected} on all {ranks} ranks, as without a fault")
    assert len(job.records) == len(faults)
    assert {record["strategy"] for record in job.records} == {"restart"}
    assert all(record["code"] == 0 for record in job.records)
    began = [job.began_at(rank) for rank in range(ranks)]
    assert all(one == began[0] for one in began), "not the same step on all ranks"
    for index, fault in enumerate(faults):
        step = int(fault.partition("@")[2].partition(":")[0])
        # A rank that dies behind its commit has it; one that dies before has the one before that.
        whole = step - 1 if fault.endswith(("begin", "computed")) else step
        assert whole - 1 <= began[0][index + 1] <= whole, (fault, began[0])
    redone = sum(record["steps_redone"] for record in job.records)
    record_property("recoveries", f"{len(job.records)}, {redone} committed steps done again")


@pytest.mark.timeout(1800)
def test_a_kill_from_outside_in_pynative_mode(job: Job) -> None:
    assert job.start(2, MODE="1").end() == 0, job.output
    (expected,) = job.digests(2)
    job.start(2, MODE="1", PAUSE="0.1").wait_for_step(15)
    os.kill(job.workers()[1], signal.SIGKILL)
    assert job.end() == 0, job.output
    (record,) = job.records
    assert record["faults"][0]["kind"] == "killed"
    assert job.began_at(0)[1] >= 14
    assert job.digests(2) == {expected}


@pytest.mark.timeout(1800)
def test_a_rank_that_is_stopped_is_found(job: Job) -> None:
    job.start(2, PAUSE="0.1", TASKD_FAULT_TIMEOUT="6").wait_for_step(15)
    os.kill(job.workers()[1], signal.SIGSTOP)
    assert job.end() == 0, job.output
    (record,) = job.records
    assert record["faults"][0]["kind"] == "hang"
    assert job.began_at(0)[1] >= 14


@pytest.mark.timeout(1800)
def test_snapshots_further_apart_cost_the_steps_in_between(job: Job) -> None:
    assert job.start(2).end() == 0, job.output
    (expected,) = job.digests(2)
    fault = "1@18:begin"
    assert job.start(2, FAULTS=fault, SNAPSHOT_EVERY="5").end() == 0, job.output
    assert job.began_at(0) == [0, 15]
    assert job.digests(2) == {expected}
    (record,) = job.records
    assert (record["version"], record["steps_redone"]) == (15, 2)


@pytest.mark.timeout(1800)
def test_snapshots_are_by_default_as_far_apart_as_they_cost(job: Job, record_property) -> None:
    assert job.start(2).end() == 0, job.output
    (expected,) = job.digests(2)
    fault = "1@35:begin"
    assert job.start(2, FAULTS=fault, SNAPSHOT_EVERY="", PAUSE="0.01").end() == 0, job.output
    said = "taskd: from step 10 on there is a snapshot every (\\d+) steps"
    found = re.search(said, job.said(0))
    assert found, job.said(0)
    assert not re.search(said, job.said(1)), "it is said once"
    apart = int(found[1])
    assert job.began_at(0) == job.began_at(1) == [0, max(10, 34 // apart * apart)]
    assert job.digests(2) == {expected}
    record_property("steps from one snapshot to the next", apart)


@pytest.mark.timeout(1800)
def test_the_budget_is_that_of_torchrun_jobs(job: Job) -> None:
    faults = "1@10:begin,0@20:begin"
    assert job.start(2, FAULTS=faults, TASKD_MAX_RESTARTS="1").end() == 2, job.output
    assert "restart budget spent: 1 of 1 restarts used" in job.output
    assert job.output.splitlines()[-1].endswith("dump-000000000019")
