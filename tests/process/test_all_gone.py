"""Every process of a job dies in the same moment, and the agents stay.

What lies whole in node memory is gone on from, or saved.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest

from tests.process import harness
from tests.process.test_dump import end_with_dump, resumed
from tests.process.test_recovery import check_recovered

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Callable

pytestmark = pytest.mark.slow

Reference = dict[int, str]


def all_ranks(at: str, count: int = 4) -> str:
    """FAULTS by which all of them die together."""
    return ";".join(f"{rank}@{at}:together" for rank in range(count))


@pytest.mark.parametrize(
    ("layout", "every", "place"),
    [
        ("fsdp", 1, "forward"),
        ("fsdp", 3, "step"),
        ("flat-FULL_SHARD", 1, "step"),
        ("hsdp", 1, "forward"),
    ],
)
def test_all_go_on_from_node_memory(
    tmp_path: pathlib.Path,
    undisturbed: Callable[[str], Reference],
    layout: str,
    every: int,
    place: str,
) -> None:
    faults = all_ranks(f"8:{place}")
    with harness.job(tmp_path, LAYOUT=layout, SNAPSHOT_EVERY=str(every), FAULTS=faults) as job:
        check_recovered(
            job,
            job.run("sharded.py"),
            undisturbed(layout),
            faults=4,
            replaced=set(range(4)),
            redone=every,
        )
        (record,) = job.recoveries()
        assert record["strategy"] == "recover-in-place"
        assert record["steps_redone"] == 8 - record["version"] <= every
        assert record["reason"] == "every process is gone, node memory has snapshots"
        again = [fact for fact in job.facts("restored") if fact["step"]]
        loaded = f"loaded version {record['version']} from the memory of its node"
        assert [fact["source"] for fact in again] == [loaded] * 4


def test_a_world_of_one_goes_on_too(tmp_path: pathlib.Path) -> None:
    training = {"LAYOUT": "fsdp", "SNAPSHOT_EVERY": "1"}
    with harness.job(tmp_path / "undisturbed", **training) as job:
        assert job.run("sharded.py", nproc=1).returncode == 0
        reference = job.digests()
    with harness.job(tmp_path / "job", **training, FAULTS="0@5:forward:kill") as job:
        finished = job.run("sharded.py", nproc=1)
        assert finished.returncode == 0, finished.output[-3000:]
        assert len(job.facts("fault")) == 1
        assert job.digests() == reference
        (record,) = job.recoveries()
        assert (record["strategy"], record["version"]) in {
            ("recover-in-place", 5),
            ("recover-in-place", 4),  # the last one was not whole yet
        }


def test_without_snapshots_all_start_anew_and_the_record_says_why(
    tmp_path: pathlib.Path, undisturbed: Callable[[str], Reference]
) -> None:
    with harness.job(tmp_path, LAYOUT="hsdp", FAULTS=all_ranks("5:forward")) as job:
        finished = job.run("sharded.py")
        assert finished.returncode == 0, finished.output[-3000:]
        assert len(job.facts("fault")) == 4
        assert job.digests() == undisturbed("hsdp")
        last = job.recoveries()[-1]
        assert last["strategy"] == "restart"
        assert "taskd.recoverable" not in last["reason"], "all of them used it"


@pytest.mark.parametrize("layout", ["fsdp", "flat-FULL_SHARD", "hsdp"])
def test_all_is_saved_from_node_memory(
    tmp_path: pathlib.Path, undisturbed: Callable[[str], Reference], layout: str
) -> None:
    """Nobody is left to write it, and no process may be replaced to train."""
    with harness.job(
        tmp_path,
        LAYOUT=layout,
        SNAPSHOT_EVERY="3",
        FAULTS=all_ranks("5:forward"),
        TASKD_RECOVER_STRATEGY="dump",
    ) as job:
        finished = job.run("sharded.py")
        assert len(job.facts("fault")) == 4
        ends = [f"rank {rank} ended with SIGKILL at step 5" for rank in range(4)]
        reasons = {"; ".join(order) for order in itertools.permutations(ends)}
        checkpoint = end_with_dump(job, finished, reasons, 3)
        assert checkpoint.manifest.writers == (0, 1, 2, 3)
        entered = job.facts("entered")
        assert len(entered) == 4, "nobody has trained again"
        resumed(job, 3, script="sharded.py")
        assert job.digests() == undisturbed(layout)
