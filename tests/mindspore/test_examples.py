"""examples/mindspore, started as their first lines say: a kill and an end change nothing."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest

from taskd.checkpoint import folder
from tests.mindspore.jobs import ROOT

if TYPE_CHECKING:
    from tests.mindspore.jobs import Job

HERE = ROOT / "examples" / "mindspore"


def kinds(job: Job) -> list[str]:
    """Of the faults. MindSpore has crashed at the end of a process: that costs a start, no more."""
    return [fault["kind"] for record in job.records for fault in record["faults"][:1]]


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("name", "ranks", "epochs"), [("resnet.py", 2, "8"), ("pangu.py", 4, "12")]
)
def test_killed_ended_and_started_again_it_comes_to_the_same(
    job: Job, name: str, ranks: int, epochs: str, record_property
) -> None:
    def start(named: str) -> Job:
        job.environment["MINDX_TASK_ID"] = named  # none goes on from another's checkpoints
        return job.start(ranks, HERE / name, "--epochs", epochs)

    assert start("plain").end() == 0, job.output
    (expected,) = job.digests(ranks)
    record_property("digest", expected)

    start("killed").wait_for_step(25)
    os.kill(job.workers()[ranks - 1], signal.SIGKILL)
    assert job.end() == 0, job.output
    assert [kind for kind in kinds(job) if kind != "crashed"] == ["killed"]
    first, second = job.began_at(0)[:2]
    assert first == 0 < second
    record_property("killed, and went on after step", second)
    assert job.digests(ranks) == {expected}

    start("ended").wait_for_step(25)
    assert job.process is not None
    job.process.terminate()
    assert job.end() == 2, job.output
    newest = folder.scan(job.checkpoints, "ended", is_full=True).valid[0]
    said = f"step {newest.manifest.version} is saved in {newest.path}"
    assert job.output.splitlines()[-1].endswith(said)
    assert start("ended").end() == 0, job.output
    assert job.began_at(ranks - 1)[0] == newest.manifest.version
    record_property("ended, and went on after step", newest.manifest.version)
    assert job.digests(ranks) == {expected}
