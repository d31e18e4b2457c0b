"""FSDP1 on real processes.

A dead rank's shard comes from node memory, from its replica, or from a checkpoint, to the last bit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.process import harness
from tests.process.test_dump import end_with_dump
from tests.process.test_recovery import check_recovered
from tests.process.test_sharded import is_saved_without_the_dead, loses_no_step

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Callable

pytestmark = pytest.mark.slow

Reference = dict[int, str]

SHARDED = [
    "flat-FULL_SHARD",
    "flat-FULL_SHARD-orig",
    "flat-SHARD_GRAD_OP",
    "flat-SHARD_GRAD_OP-orig",
]
HYBRID = ["flat-HYBRID_SHARD", "flat-HYBRID_SHARD-orig"]


@pytest.mark.parametrize(("layout", "every", "place"), [
    *(("flat-FULL_SHARD", 1, place) for place in ("step", "backward-end", "before-vote",
    "optimizer")),
    *(("flat-SHARD_GRAD_OP-orig", 3, place) for place in ("forward", "before-commit")),
    ("flat-FULL_SHARD-orig", 1, "backward-begin"), ("flat-FULL_SHARD-orig", 3, "before-commit"),
    ("flat-SHARD_GRAD_OP", 1, "backward-end"),
])  # fmt: skip
def test_a_shard_comes_from_node_memory(
    tmp_path: pathlib.Path,
    undisturbed: Callable[[str], Reference],
    layout: str,
    every: int,
    place: str,
) -> None:
    faults = f"1@5:{place}:kill;0@9:{place}:kill"
    with harness.job(tmp_path, LAYOUT=layout, SNAPSHOT_EVERY=str(every), FAULTS=faults) as job:
        check_recovered(
            job,
            job.run("sharded.py"),
            undisturbed(layout),
            faults=2,
            replaced={0, 1},
            redone=2 * every,
        )
        records = job.recoveries()
        assert [record["strategy"] for record in records] == ["recover-in-place"] * 2
        assert all(record["steps_redone"] <= every for record in records)
        sources = {fact["source"] for fact in job.facts("restored")}
        assert all(
            f"loaded version {record['version']} from the memory of its node" in sources
            for record in records
        )


@pytest.mark.parametrize("layout", [*SHARDED, *HYBRID])
def test_there_are_as_many_digests_as_shards(
    undisturbed: Callable[[str], Reference], layout: str
) -> None:
    assert len(set(undisturbed(layout).values())) == (2 if layout in HYBRID else 4)


@pytest.mark.parametrize("rank", range(4))
def test_any_rank_may_die(
    tmp_path: pathlib.Path, undisturbed: Callable[[str], Reference], rank: int
) -> None:
    layout = SHARDED[rank]
    with harness.job(
        tmp_path,
        LAYOUT=layout,
        SNAPSHOT_EVERY="1",
        FAULTS=f"{rank}@2:forward:kill;{rank}@6:backward-begin:kill",
    ) as job:
        check_recovered(
            job, job.run("sharded.py"), undisturbed(layout), faults=2, replaced={rank}, redone=2
        )
        assert all(record["steps_redone"] <= 1 for record in job.recoveries())


@pytest.mark.parametrize(("layout", "place"), [
    ("flat-HYBRID_SHARD", "forward"), ("flat-HYBRID_SHARD", "before-vote"),
    ("flat-HYBRID_SHARD-orig", "backward-end"),
])  # fmt: skip
def test_a_shard_comes_from_its_replica(
    tmp_path: pathlib.Path, undisturbed: Callable[[str], Reference], layout: str, place: str
) -> None:
    with harness.job(tmp_path, LAYOUT=layout, FAULTS=f"3@4:{place}:kill;0@8:{place}:kill") as job:
        check_recovered(job, job.run("sharded.py"), undisturbed(layout), faults=2, replaced={0, 3})
        assert [(record["strategy"], record["steps_redone"]) for record in job.recoveries()] == [
            ("recover-in-place", 0)
        ] * 2
        assert {fact["source"] for fact in job.facts("restored") if fact["rank"] == 3} >= {
            "received version 4 from rank 1"
        }


@pytest.mark.parametrize("place", ["optimizer", "before-commit"])
def test_a_death_behind_the_vote_never_mixes_versions(
    tmp_path: pathlib.Path, undisturbed: Callable[[str], Reference], place: str
) -> None:
    with harness.job(tmp_path, LAYOUT="flat-HYBRID_SHARD", FAULTS=f"3@4:{place}:kill") as job:
        loses_no_step(job, undisturbed("flat-HYBRID_SHARD"))


def test_an_optimizer_step_is_voted_on(
    tmp_path: pathlib.Path, undisturbed: Callable[[str], Reference]
) -> None:
    """Rank 1 dies with its gradients complete: nobody else has stepped, though all have theirs."""
    with harness.job(
        tmp_path, LAYOUT="flat-FULL_SHARD", SNAPSHOT_EVERY="1", FAULTS="1@5:before-vote:kill"
    ) as job:
        check_recovered(
            job,
            job.run("sharded.py"),
            undisturbed("flat-FULL_SHARD"),
            faults=1,
            replaced={1},
            redone=1,
        )
        (died,) = [fact["time"] for fact in job.facts("fault")]
        assert all(fact["time"] > died for fact in job.facts("committed") if fact["step"] == 6)


@pytest.mark.parametrize(
    ("layout", "snapshots", "faults", "version"),
    [
        ("flat-HYBRID_SHARD-orig", "0", "3@5:forward:kill", 5),
        ("flat-FULL_SHARD", "3", "1@5:forward:kill", 3),
        ("flat-SHARD_GRAD_OP-orig", "3", "1@5:forward:together;2@5:forward:together", 3),
    ],
)
def test_a_dump_is_whole_and_the_next_start_goes_on_from_it(
    tmp_path: pathlib.Path,
    undisturbed: Callable[[str], Reference],
    layout: str,
    snapshots: str,
    faults: str,
    version: int,
) -> None:
    with harness.job(
        tmp_path,
        LAYOUT=layout,
        SNAPSHOT_EVERY=snapshots,
        FAULTS=faults,
        TASKD_RECOVER_STRATEGY="dump",
    ) as job:
        is_saved_without_the_dead(job, faults, version, undisturbed(layout))


def test_another_number_of_ranks_is_told_why_it_cannot_go_on(tmp_path: pathlib.Path) -> None:
    """And the checkpoint stays as it is, for as many ranks as have saved it."""
    with harness.job(
        tmp_path,
        LAYOUT="flat-FULL_SHARD",
        SNAPSHOT_EVERY="3",
        FAULTS="1@5:forward:kill",
        TASKD_RECOVER_STRATEGY="dump",
    ) as job:
        dump = end_with_dump(
            job, job.run("sharded.py"), "rank 1 ended with SIGKILL at step 5", 3
        ).path
        before = {path.name: path.read_bytes() for path in dump.iterdir()}
        finished = job.run("sharded.py", nproc=2)
        assert finished.returncode != 0
        assert job.manager is not None
        job.manager.wait(20)
        assert (
            "Start the job as it was saved, by 4 ranks; nothing was changed or deleted"
        ) in finished.output
        assert {path.name: path.read_bytes() for path in dump.iterdir()} == before
