"""Sharded state on real processes.

A dead rank's shard comes from its replica, or from the last dump, to the last bit.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist

from tests.process import harness
from tests.process.test_dump import checkpoints, end_with_dump, resumed
from tests.process.test_recovery import check_recovered

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Callable

pytestmark = pytest.mark.slow

Reference = dict[int, str]


def gloo_averages() -> bool:
    """Not before torch 2.8 at least, where FSDP2 asks for it between replicas.

    The tensor outlives the group: to delete one, gloo's thread in torch 2.7 needs the interpreter
    lock, with which the group's end waits for that thread.
    """
    tensor = torch.ones(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        dist.all_reduce(tensor, op=dist.ReduceOp.AVG)
    except RuntimeError:
        return False
    finally:
        dist.destroy_process_group()
    return True


@pytest.mark.parametrize(("layout", "place"), [
    *(("hsdp", place) for place in ("step", "forward", "backward-begin", "backward-end",
    "before-vote")),
    ("tp", "backward-begin"), ("zero", "before-vote"), ("stages", "backward-end"),
])  # fmt: skip
def test_a_shard_comes_from_its_replica(
    tmp_path: pathlib.Path, undisturbed: Callable[[str], Reference], layout: str, place: str
) -> None:
    with harness.job(tmp_path, LAYOUT=layout, FAULTS=f"3@4:{place}:kill;0@8:{place}:kill") as job:
        check_recovered(job, job.run("sharded.py"), undisturbed(layout), faults=2, replaced={0, 3})
        records = job.recoveries()
        assert [(record["strategy"], record["steps_redone"]) for record in records] == [
            ("recover-in-place", 0)
        ] * 2
        replica = 2 if layout == "stages" else 1
        assert {fact["source"] for fact in job.facts("restored") if fact["rank"] == 3} >= {
            f"received version 4 from rank {replica}"
        }


@pytest.mark.parametrize("layout", ["stages", "zero", "flat-FULL_SHARD"])
def test_before_anybody_has_a_version_nobody_passes_for_a_replica(
    tmp_path: pathlib.Path, undisturbed: Callable[[str], Reference], layout: str
) -> None:
    """The others wait for the dead rank in their first restore(): all begin afresh."""
    with harness.job(tmp_path, LAYOUT=layout, FAULTS="3@0:before-anybody:kill") as job:
        check_recovered(job, job.run("sharded.py"), undisturbed(layout), faults=1, replaced={3})
        (record,) = job.recoveries()
        assert (record["strategy"], record["version"]) == ("recover-in-place", None)


def test_with_what_debugging_puts_around_groups(
    tmp_path: pathlib.Path, undisturbed: Callable[[str], Reference]
) -> None:
    """Its wrappers serve devices, too, of which there are none; and abort nothing.

    A retry may come between: they compare collectives of their own. (DDP crashes with them, also
    without taskd: torch 2.13 for the CPU.)
    """
    env = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL", "LAYOUT": "hsdp"}
    with harness.job(tmp_path, **env, FAULTS="3@4:backward-begin:kill;0@8:step:kill") as job:
        check_recovered(job, job.run("sharded.py"), undisturbed("hsdp"), faults=2, replaced={0, 3})


@pytest.mark.parametrize(
    ("layout", "snapshots"), [("hsdp", 0), ("tp", 0), ("stages", 0), ("hsdp", 1)]
)
def test_whoever_is_left_behind_by_a_vote_steps_too(
    tmp_path: pathlib.Path, undisturbed: Callable[[str], Reference], layout: str, snapshots: int
) -> None:
    """Two ranks have passed the vote and committed.

    The vote broke for the third, and the fourth, which had the same shard, is dead.
    """
    broken = 2 if layout == "stages" else 1
    with harness.job(
        tmp_path,
        LAYOUT=layout,
        FAULTS=f"{broken}@4:vote:break;3@4:optimizer:late",
        SNAPSHOT_EVERY=str(snapshots),
    ) as job:
        check_recovered(job, job.run("sharded.py"), undisturbed(layout), faults=2, replaced={3})
        assert job.manager is not None
        assert f"generation=1 version=5 ranks=({broken},)" in job.manager.text
        records = job.recoveries()
        assert [
            (record["strategy"], record["version"], record["steps_redone"]) for record in records
        ] == [("recover-in-place", 5, 0)]


@pytest.mark.parametrize("place", ["optimizer", "before-commit"])
def test_a_death_behind_the_vote_never_mixes_versions(
    tmp_path: pathlib.Path, undisturbed: Callable[[str], Reference], place: str
) -> None:
    with harness.job(tmp_path, LAYOUT="hsdp", FAULTS=f"3@4:{place}:kill") as job:
        loses_no_step(job, undisturbed("hsdp"))


def loses_no_step(job: harness.Job, reference: Reference) -> None:
    """One rank dies behind the vote, which may be complete for some and not for others.

    These do the step as well.
    """
    finished = job.run("sharded.py")
    assert finished.returncode == 0, finished.output[-3000:]
    assert len(job.facts("fault")) == 1
    assert job.digests() == reference
    assert job.manager is not None
    assert job.manager.wait(20).returncode == 0
    assert [(record["strategy"], record["steps_redone"]) for record in job.recoveries()] == [
        ("recover-in-place", 0)
    ]


def test_a_dump_takes_the_shard_of_a_rank_that_hangs(
    tmp_path: pathlib.Path, undisturbed: Callable[[str], Reference]
) -> None:
    with harness.job(
        tmp_path,
        LAYOUT="fsdp",
        SNAPSHOT_EVERY="1",
        FAULTS="1@5:forward:stop",
        TASKD_RECOVER_STRATEGY="dump",
    ) as job:
        finished = job.run("sharded.py")
        assert len(job.facts("fault")) == 1
        assert finished.returncode == 2, finished.output[-3000:]
        assert job.manager is not None
        assert job.manager.wait(20).returncode == 1
        (checkpoint,) = checkpoints(job)
        assert "rank 1 hangs: stopped by a signal" in checkpoint.manifest.fault
        assert checkpoint.manifest.version in (4, 5), (
            "that of the last step may have been under way in it"
        )
        resumed(job, checkpoint.manifest.version, script="sharded.py")
        assert job.digests() == undisturbed("fsdp")


@pytest.mark.parametrize(("layout", "other"), [("hsdp", "fsdp"), ("tp", ""), ("stages", "")])
def test_a_dump_without_a_rank_is_whole_and_another_world_goes_on_from_it(
    tmp_path: pathlib.Path, undisturbed: Callable[[str], Reference], layout: str, other: str
) -> None:
    with harness.job(
        tmp_path, LAYOUT=layout, FAULTS="3@5:forward:kill", TASKD_RECOVER_STRATEGY="dump"
    ) as job:
        checkpoint = end_with_dump(
            job, job.run("sharded.py"), "rank 3 ended with SIGKILL at step 5", 5
        )
        assert checkpoint.manifest.writers == (0, 1, 2)
        resumed(job, 5, script="sharded.py")
        assert job.digests() == undisturbed(layout)
    if not other:
        return  # tests/unit/worker/test_sharded_checkpoints.py
    with harness.job(tmp_path, LAYOUT=other) as job:
        resumed(job, 5, nproc=2, script="sharded.py")
        assert len({fact["digest"] for fact in job.facts("done")[-2:]}) == 1


def test_a_dump_that_lacks_a_shard_is_none(tmp_path: pathlib.Path) -> None:
    """FSDP over all ranks, one of them dead: nobody else has what it had."""
    with harness.job(
        tmp_path, LAYOUT="fsdp", FAULTS="1@5:forward:kill", TASKD_RECOVER_STRATEGY="dump"
    ) as job:
        finished = job.run("sharded.py")
        assert finished.returncode == 1
        assert (
            "taskd: job test-job has ended: rank 1 ended with SIGKILL at step 5; and no dump: "
            "no version of the state is complete: shard "
        ) in finished.output
        assert "(rank 1)" in finished.last_line
        assert not (tmp_path / "taskd_checkpoints").exists()


@pytest.mark.parametrize(
    ("every", "place"), [(1, "step"), (1, "backward-end"), (1, "before-vote"), (3, "forward")]
)
def test_a_shard_that_nobody_has_comes_from_node_memory(
    tmp_path: pathlib.Path, undisturbed: Callable[[str], Reference], every: int, place: str
) -> None:
    """FSDP over all ranks: the dead rank's process had the only copy.

    Its snapshot of the step before may not have been complete.
    """
    faults = f"1@5:{place}:kill;0@9:{place}:kill"
    with harness.job(tmp_path, LAYOUT="fsdp", SNAPSHOT_EVERY=str(every), FAULTS=faults) as job:
        check_recovered(
            job,
            job.run("sharded.py"),
            undisturbed("fsdp"),
            faults=2,
            replaced={0, 1},
            redone=2 * every,
        )
        for record, version in zip(job.recoveries(), (5, 9), strict=True):
            assert record["strategy"] == "recover-in-place"
            assert record["steps_redone"] == version - record["version"] <= every
            sources = {fact["source"] for fact in job.facts("restored")}
            assert f"loaded version {record['version']} from the memory of its node" in sources


@pytest.mark.extended(
    "ranks 3 and 0: test_a_shard_comes_from_its_replica[hsdp-forward]; ranks 1 and 0: "
    "test_a_shard_that_nobody_has_comes_from_node_memory[1-before-vote]; `make test-torch` runs it"
)
@pytest.mark.parametrize("layout", ["hsdp", "fsdp"])
def test_each_rank_in_one_run(
    tmp_path: pathlib.Path, undisturbed: Callable[[str], Reference], layout: str
) -> None:
    if layout == "hsdp" and not gloo_averages():
        pytest.skip("HSDP of this torch asks for an average, which its gloo cannot make")
    every = 1 if layout == "fsdp" else 0
    faults = ";".join(f"{rank}@{2 + 3 * rank}:forward:kill" for rank in range(4))
    with harness.job(tmp_path, LAYOUT=layout, SNAPSHOT_EVERY=str(every), FAULTS=faults) as job:
        check_recovered(
            job,
            job.run("sharded.py"),
            undisturbed(layout),
            faults=4,
            replaced=set(range(4)),
            redone=4 * every,
        )
        assert [record["strategy"] for record in job.recoveries()] == ["recover-in-place"] * 4


@pytest.mark.parametrize(
    "faults", ["1@5:forward:kill", "1@5:forward:together;2@5:forward:together"]
)
def test_a_dump_takes_the_shards_of_the_dead_from_node_memory(
    tmp_path: pathlib.Path, undisturbed: Callable[[str], Reference], faults: str
) -> None:
    with harness.job(
        tmp_path, LAYOUT="fsdp", SNAPSHOT_EVERY="3", FAULTS=faults, TASKD_RECOVER_STRATEGY="dump"
    ) as job:
        is_saved_without_the_dead(job, faults, 3, undisturbed("fsdp"))


def test_generators_of_the_dead_are_in_a_dump_of_an_older_version(tmp_path: pathlib.Path) -> None:
    """The shard of ranks 1 and 3 is left in node memory only.

    So rank 2 saves that version, with what rank 0 and rank 3 alone had.
    """
    training = {"LAYOUT": "hsdp", "NOISE": "1"}
    with harness.job(tmp_path / "undisturbed", **training) as job:
        assert job.run("sharded.py").returncode == 0
        reference = job.digests()
    faults = ";".join(f"{rank}@5:forward:together" for rank in (0, 1, 3))
    with harness.job(
        tmp_path / "job",
        **training,
        SNAPSHOT_EVERY="3",
        FAULTS=faults,
        TASKD_RECOVER_STRATEGY="dump",
    ) as job:
        is_saved_without_the_dead(job, faults, 3, reference)


def is_saved_without_the_dead(
    job: harness.Job, faults: str, version: int, reference: Reference
) -> None:
    """The ranks of `faults` die at step 5.

    The others write all of `version`, and the next start ends as if nothing had been.
    """
    dead = {int(fault[0]) for fault in faults.split(";")}
    finished = job.run("sharded.py")
    assert {fact["rank"] for fact in job.facts("fault")} == dead
    ends = [f"rank {rank} ended with SIGKILL at step 5" for rank in sorted(dead)]
    reasons = {
        "; ".join(some)
        for number in range(len(ends))
        for some in itertools.permutations(ends, number + 1)
    }
    checkpoint = end_with_dump(job, finished, reasons, version)
    assert set(checkpoint.manifest.writers) == set(range(4)) - dead
    resumed(job, version, script="sharded.py")
    assert job.digests() == reference
