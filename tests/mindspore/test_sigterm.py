"""SIGTERM: the last whole step is saved, and the next start goes on from it."""

from __future__ import annotations

import os
import random
import signal
from typing import TYPE_CHECKING

import pytest

from taskd.checkpoint import folder

if TYPE_CHECKING:
    from tests.mindspore.jobs import Job

STEPS = 60
ENDS = int(os.environ.get("KILLS", "10"))


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("ranks", [2, 4])
def test_all_get_it_again_and_again(job: Job, ranks: int, record_property) -> None:
    assert job.start(ranks).end() == 0, job.output
    (expected,) = job.digests(ranks)
    seed = os.environ.get("TASKD_TEST_SEED", "0")
    steps = sorted(random.Random(f"sigterm/{seed}/{ranks}").sample(range(2, STEPS), ENDS))
    record_property("seed", seed)
    record_property("asked at", " ".join(map(str, steps)))
    saved = 0
    for step in steps:
        if step <= saved:
            continue  # it came a little further than it was asked to
        job.start(ranks, PAUSE="0.1").wait_for_step(step)
        assert job.process is not None
        for pid in (*job.workers().values(), job.process.pid):
            os.kill(pid, signal.SIGTERM)
        assert job.end() == 2, job.output
        assert job.began_at(0) == [saved]
        newest = folder.scan(job.checkpoints, "ms", is_full=True).valid[0]
        saved = newest.manifest.version
        assert saved >= step - 1
        assert job.output.splitlines()[-1].endswith(f"step {saved} is saved in {newest.path}")
    assert job.start(ranks).end() == 0, job.output
    assert job.began_at(ranks - 1) == [saved]
    assert job.digests(ranks) == {expected}
    record_property("digest", f"{expected} on all {ranks} ranks, as without an end")


@pytest.mark.timeout(1800)
def test_before_the_first_step_nothing_is_saved_and_nothing_is_lost(job: Job) -> None:
    job.start(2, FAULTS="", PAUSE="0")
    assert job.process is not None
    while len(job.workers()) < 2:
        assert job.process.poll() is None
    job.process.terminate()
    assert job.end() == 1, job.output
    assert not job.checkpoints.exists()
    assert "nothing is saved: the memory of this node has no step of all its ranks" in job.output
    assert job.start(2).end() == 0, job.output
    assert job.began_at(0) == [0]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("ranks", [1, 2])
def test_without_an_agent_each_rank_saves_its_own(job: Job, ranks: int) -> None:
    """Plain python, and msrun without MS_ENABLE_TFT."""

    def start(**environment: str) -> Job:
        if ranks == 1:
            return job.start_alone(**environment)
        return job.start(ranks, tft="", **environment)

    assert start().end() == 0, job.output
    digests = job.digests(ranks)
    job.environment["MINDX_TASK_ID"] = "again"
    start(PAUSE="0.1")
    assert job.process is not None
    if ranks == 1:
        while "step 12 " not in (line := job.process.stdout.readline()):
            assert line
        pids = [job.process.pid]
    else:
        job.wait_for_step(12)
        pids = list(job.workers().values())
    for pid in pids:
        os.kill(pid, signal.SIGTERM)
    assert job.end() != 0
    (found,) = folder.scan(job.checkpoints, "again", is_full=True).valid
    assert found.manifest.version >= 11
    assert start().end() == 0, job.output
    assert job.began_at(0) == [found.manifest.version]
    assert job.digests(ranks) == digests


@pytest.mark.timeout(1800)
def test_a_second_sigterm_does_not_disturb_the_save(job: Job) -> None:
    job.start(2, PAUSE="0.05", WIDTH="400000").wait_for_step(4)  # 60 MB
    assert job.process is not None
    job.process.send_signal(signal.SIGTERM)
    drafts = []
    while not drafts and job.process.poll() is None:  # it is being written
        drafts = list(job.checkpoints.glob(".dump-*")) if job.checkpoints.exists() else []
    assert drafts, "the draft was not seen"
    job.process.send_signal(signal.SIGTERM)
    assert job.end() == 2, job.output
    (found,) = folder.scan(job.checkpoints, "ms", is_full=True).valid
    assert found.manifest.version >= 3
