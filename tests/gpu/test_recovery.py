"""Faults of ranks whose state is on a GPU: recovered to the last bit, and nothing else replaced.

With one GPU all ranks share it; see scripts/train_on_device.py.
"""

from __future__ import annotations

import pathlib
from typing import TYPE_CHECKING

import pytest
import torch

from tests.gpu.figures import note
from tests.process import harness

if TYPE_CHECKING:
    from collections.abc import Callable

SCRIPT = str(pathlib.Path(__file__).parent / "scripts" / "train_on_device.py")
RANKS = {"gloo": 4, "nccl": 2}
KILLS = "1@5:forward:kill;0@11:backward:kill;1@17:optimizer:kill;0@23:before-commit:kill"
LIMIT_S = 70.0
NCCL = {"NCCL_SOCKET_IFNAME": "lo", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}

Reference = dict[int, str]


@pytest.fixture(scope="module")
def undisturbed(
    tmp_path_factory: pytest.TempPathFactory, shared_folder: pathlib.Path
) -> Callable[..., Reference]:
    """Digest of each rank in a run without taskd; computed once each."""

    def digests(backend: str, layout: str = "ddp", nproc: int | None = None) -> Reference:
        def train() -> dict[str, str]:
            folder = tmp_path_factory.mktemp("undisturbed")
            env = NCCL | {"BACKEND": backend, "LAYOUT": layout, "FACTS": str(folder)}
            harness.run_plainly(folder, SCRIPT, nproc=count, timeout_s=LIMIT_S, **env)
            return {
                str(fact["rank"]): fact["digest"]
                for fact in harness.facts_in(folder)
                if fact["what"] == "returned"
            }

        count = nproc or RANKS[backend]
        known = harness.once(shared_folder, f"device {backend} {layout}", train)
        assert sorted(known) == [str(rank) for rank in range(count)]
        return {int(rank): digest for rank, digest in known.items()}

    return digests


def recovered(
    job: harness.Job, reference: Reference, *, faults: int, replaced: set[int]
) -> list[dict]:
    """Run the job to its end; its records. As it should be, to the last bit."""
    finished = job.run(SCRIPT, nproc=len(reference), timeout_s=LIMIT_S)
    assert finished.returncode == 0, finished.output[-6000:]
    assert len(job.facts("fault")) == faults
    assert job.digests() == reference
    lives: dict[int, set[int]] = {}
    for fact in job.facts("entered"):
        lives.setdefault(fact["rank"], set()).add(fact["pid"])
    assert {rank for rank, pids in lives.items() if len(pids) > 1} == replaced
    records = job.recoveries()
    assert job.leftovers() == set()
    return records


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_each_place_of_a_step(
    tmp_path: pathlib.Path, undisturbed: Callable[..., Reference], backend: str
) -> None:
    env = NCCL | {"BACKEND": backend, "FAULTS": KILLS}
    with harness.job(tmp_path, **env) as job:
        records = recovered(job, undisturbed(backend), faults=4, replaced={0, 1})
        assert [record["strategy"] for record in records] == ["recover-in-place"] * 4
        assert [record["steps_redone"] for record in records] == [0] * 4
        note(f"kill, {backend}, {RANKS[backend]} ranks", [one["total_s"] for one in records])


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
@pytest.mark.parametrize("how", ["raise", "memory"])
def test_an_exception_replaces_nobody(
    tmp_path: pathlib.Path, undisturbed: Callable[..., Reference], backend: str, how: str
) -> None:
    with harness.job(tmp_path, BACKEND=backend, FAULTS=f"1@7:forward:{how}", **NCCL) as job:
        (record,) = recovered(job, undisturbed(backend), faults=1, replaced=set())
        assert record["strategy"] == "retry"
        note(f"{how}, {backend}, {RANKS[backend]} ranks", [record["total_s"]])


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_a_broken_context_is_replaced(
    tmp_path: pathlib.Path, undisturbed: Callable[..., Reference], backend: str
) -> None:
    """After a kernel has failed nothing works on the device in that process."""
    with harness.job(tmp_path, BACKEND=backend, FAULTS="1@7:forward:assert", **NCCL) as job:
        records = recovered(job, undisturbed(backend), faults=1, replaced={1})
        note(f"failed kernel, {backend}", [one["total_s"] for one in records])


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_a_rank_that_stands_still_is_replaced(
    tmp_path: pathlib.Path, undisturbed: Callable[..., Reference], backend: str
) -> None:
    env = NCCL | {"BACKEND": backend, "FAULTS": "1@7:forward:stop"}
    with harness.job(tmp_path, **env) as job:
        (record,) = recovered(job, undisturbed(backend), faults=1, replaced={1})
        note(f"SIGSTOP, {backend}", [record["total_s"]])


def test_a_shard_comes_from_node_memory(
    tmp_path: pathlib.Path, undisturbed: Callable[..., Reference]
) -> None:
    env = NCCL | {"BACKEND": "nccl", "LAYOUT": "fsdp", "SNAPSHOT_EVERY": "1", "FAULTS": KILLS}
    with harness.job(tmp_path, **env) as job:
        records = recovered(job, undisturbed("nccl", "fsdp"), faults=4, replaced={0, 1})
        assert max(record["steps_redone"] for record in records) <= 1
        note("kill, nccl, FSDP2, 2 ranks", [one["total_s"] for one in records])


def test_a_shard_comes_from_its_replica(
    tmp_path: pathlib.Path, undisturbed: Callable[..., Reference]
) -> None:
    """Several communicators, which wait for one another on the device."""
    env = NCCL | {"BACKEND": "nccl", "LAYOUT": "hsdp", "FAULTS": "3@5:backward:kill;0@11:step:kill"}
    with harness.job(tmp_path, **env) as job:
        records = recovered(job, undisturbed("nccl", "hsdp", 4), faults=2, replaced={0, 3})
        assert [record["steps_redone"] for record in records] == [0, 0]
        note("kill, nccl, HSDP 2 x 2", [one["total_s"] for one in records])


def test_a_plain_value_comes_back_on_the_device_of_its_rank(
    tmp_path: pathlib.Path, undisturbed: Callable[..., Reference]
) -> None:
    """With one GPU it shows no more than that it is on a device: all ranks have the same."""
    env = NCCL | {"BACKEND": "gloo", "AVERAGE": "1", "FAULTS": KILLS}
    with harness.job(tmp_path, **env) as job:
        recovered(job, undisturbed("gloo"), faults=4, replaced={0, 1})
        found = {fact["rank"]: fact for fact in job.facts("average")}
        count = torch.cuda.device_count()
        assert {rank: one["device"] for rank, one in found.items()} == {
            rank: f"cuda:{rank % count}" for rank in range(RANKS["gloo"])
        }
        assert len({tuple(one["value"]) for one in found.values()}) == 1


@pytest.mark.parametrize("rank", [0, 1])
def test_a_second_death_before_the_communicator_is_made(
    tmp_path: pathlib.Path, undisturbed: Callable[..., Reference], rank: int
) -> None:
    """The other one waits for it: NCCL makes communicators at the first collective."""
    faults = f"{rank}@7:forward:kill;{rank}@1:started:kill"
    with harness.job(tmp_path, BACKEND="nccl", FAULTS=faults, **NCCL) as job:
        records = recovered(job, undisturbed("nccl"), faults=2, replaced={rank})
        assert [record["steps_redone"] for record in records] == [0, 0]
