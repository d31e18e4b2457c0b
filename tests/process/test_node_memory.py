"""Snapshots that outlive the agent: a torchrun is killed and started again on the same host.

No node has mirrors: what the ranks of the lost node alone had is in the folder of
TASKD_NODE_MEMORY, or nowhere.
"""

from __future__ import annotations

import pathlib
import shutil
import signal
import tempfile
from typing import TYPE_CHECKING

import pytest

from tests.process import harness
from tests.process.harness import wait_for_step, wait_until
from tests.process.test_mirrors import (
    EVERY,
    STEPS,
    TRAINING,
    committed,
    undisturbed_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.slow

KEPT = {
    **TRAINING,
    "SNAPSHOT_EVERY": str(EVERY),
    "STEP_S": "0.03",
    "HOLD_AT": "30",  # so that it is not over before a node is lost
    "TASKD_FAULT_TIMEOUT": "6",
    "TASKD_RECOVER_STRATEGY": "recover",
}


@pytest.fixture
def undisturbed(tmp_path: pathlib.Path, shared_folder: pathlib.Path) -> dict[int, str]:
    """Of four ranks."""
    return undisturbed_of(4, tmp_path, shared_folder)


@pytest.fixture
def memory() -> Iterator[pathlib.Path]:
    """A folder on a tmpfs, as of a volume in memory."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix="test-", dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def start(
    job: harness.Job,
    node_rank: int,
    memory: pathlib.Path,
    *,
    nodes: int = 2,
    nproc: int = 2,
    **env: str,
) -> harness.Output:
    """The torchrun of one node, for the first time or again."""
    return job.start_agent(
        "sharded.py",
        nproc=nproc,
        options=(
            f"--nnodes={nodes}",
            "--master-addr=127.0.0.1",
            f"--master-port={job.master_port}",
            f"--node-rank={node_rank}",
        ),
        TASKD_NODE_MEMORY=str(memory),
        **env,
    )


def kill_torchrun(job: harness.Job, agent: harness.Output, ranks: tuple[int, int]) -> None:
    """It alone; its workers end because it is gone."""
    pids = {fact["pid"] for fact in job.facts("entered") if fact["rank"] in ranks}
    assert len(pids) == 2
    agent.process.send_signal(signal.SIGKILL)
    assert agent.wait(20).returncode == -signal.SIGKILL
    wait_until(job, lambda: not any(map(is_alive, pids)))
    job.tell()


def is_alive(pid: int) -> bool:
    try:
        return harness.state_of(pid) != "Z"
    except FileNotFoundError:
        return False


def files_in(memory: pathlib.Path) -> list[str]:
    return sorted(str(path.relative_to(memory)) for path in memory.rglob("*"))


def lose_and_restart(
    job: harness.Job,
    lost: int,
    memories: tuple[pathlib.Path, pathlib.Path],
    then: pathlib.Path,
    meanwhile: Callable[[], None] = lambda: None,
) -> tuple[list[harness.Output], dict[int, int]]:
    """One of two torchruns is killed, and started again with the folder `then`.

    Both torchruns, and who had committed what.
    """
    job.start_manager()
    agents = [start(job, node_rank, memories[node_rank]) for node_rank in range(2)]
    wait_for_step(job, 12)
    ranks = (0, 1) if lost == 0 else (2, 3)
    kill_torchrun(job, agents[lost], ranks)
    reached = committed(job)
    assert max(reached.values()) < STEPS
    meanwhile()
    agents[lost] = start(job, lost, then)
    return agents, reached


@pytest.mark.parametrize("lost", [1, pytest.param(0, marks=pytest.mark.extended("[1]"))])
def test_a_torchrun_on_the_same_host_has_the_snapshots_of_the_one_that_was_killed(
    tmp_path: pathlib.Path, memory: pathlib.Path, undisturbed: dict[int, str], lost: int
) -> None:
    """The survivors keep their processes, and all go back to the newest snapshot."""
    with harness.job(tmp_path, **KEPT) as job:
        agents, reached = lose_and_restart(job, lost, (memory, memory), memory)
        ended = [agent.wait(90) for agent in agents]
        assert [one.returncode for one in ended] == [0, 0], job.story()
        assert job.digests() == undisturbed
        (record,) = job.recoveries()
        assert record["strategy"] == "recover"
        names = "0, 1" if lost == 0 else "2, 3"
        left = f"snapshots of ranks {names} were left in the memory of node {lost}"
        assert record["reason"].endswith(left), record["reason"]
        assert record["version"] % EVERY == 0
        assert 0 <= record["steps_redone"] <= 2 * EVERY
        assert record["version"] + record["steps_redone"] in range(
            max(reached.values()), max(reached.values()) + 3
        )
        survivors = {0, 1} if lost == 1 else {2, 3}
        for rank in range(4):
            pids = {fact["pid"] for fact in job.facts("entered") if fact["rank"] == rank}
            assert len(pids) == (1 if rank in survivors else 2)
        assert files_in(memory) == [], "an orderly end leaves nothing"
        said = (job.log_dir / f"agent-{lost}.log").read_text()
        assert said.count(f"snapshots of node {lost} are kept in {memory}") == 2
        assert "takes over what the agent that was lost" in said
        assert job.leftovers() == set()


def test_a_replaced_pod_has_nothing_of_it(
    tmp_path: pathlib.Path, memory: pathlib.Path, undisturbed: dict[int, str]
) -> None:
    """Its volume is another one, and empty: all processes are replaced, as without a volume."""
    volumes = [memory / name for name in ("one", "two", "three")]
    for volume in volumes:
        volume.mkdir()
    with harness.job(tmp_path, **KEPT) as job:
        agents, _ = lose_and_restart(job, 1, (volumes[0], volumes[1]), volumes[2])
        ended = [agent.wait(90) for agent in agents]
        assert [one.returncode for one in ended] == [0, 0], job.story()
        assert job.digests() == undisturbed
        record = job.recoveries()[-1]
        assert record["strategy"] == "restart"
        assert "no version of the state is complete" in record["reason"]
        for rank in range(4):
            pids = {fact["pid"] for fact in job.facts("entered") if fact["rank"] == rank}
            assert len(pids) == 2
        assert files_in(volumes[0]) == files_in(volumes[2]) == []
        assert files_in(volumes[1]) != [], "nobody was there any more to remove it"
        assert job.leftovers() == set()


@pytest.mark.extended(
    "tests/contract/test_node_memory.py: test_a_damaged_snapshot_is_as_good_as_none; "
    "test_all_gone.py: test_without_snapshots_all_start_anew_and_the_record_says_why"
)
def test_what_is_damaged_is_not_used(
    tmp_path: pathlib.Path, memory: pathlib.Path, undisturbed: dict[int, str]
) -> None:
    """Of one rank. All processes are replaced, and the log says why."""

    def damage() -> None:
        (arena,) = memory.glob("taskd-*-1/*/0-1-0")
        size = arena.stat().st_size
        with open(arena, "r+b") as file:
            for start in (4096, 4096 + (size - 4096) // 2):  # the first tensor of each snapshot
                file.seek(start)
                file.write(b"damaged!" * 4)

    with harness.job(tmp_path, **KEPT) as job:
        agents, _ = lose_and_restart(job, 1, (memory, memory), memory, damage)
        ended = [agent.wait(90) for agent in agents]
        assert [one.returncode for one in ended] == [0, 0], job.story()
        assert job.digests() == undisturbed
        assert job.recoveries()[-1]["strategy"] == "restart"
        said = "rank 2 does not use what a lost agent has left of it in node memory"
        assert said in agents[1].text
        assert files_in(memory) == []


def test_the_manager_is_lost_with_the_torchrun_and_another_one_elected(
    tmp_path: pathlib.Path, memory: pathlib.Path, shared_folder: pathlib.Path
) -> None:
    """The agents know from its roster whose node memory is that of node 0."""
    ranks = 3
    with harness.job(tmp_path, **KEPT, TASKD_MANAGER="auto") as job:
        manager = job.start_manager()
        agents = [start(job, node, memory, nodes=ranks, nproc=1) for node in range(ranks)]
        wait_for_step(job, 12)
        for process in (manager.process, agents[0].process):
            process.send_signal(signal.SIGKILL)
        agents[0].wait(20)
        job.tell()
        agents[0] = start(job, 0, memory, nodes=ranks, nproc=1)
        ended = [agent.wait(90) for agent in agents]
        assert [one.returncode for one in ended] == [0] * ranks, job.story()
        assert job.digests() == undisturbed_of(ranks, tmp_path, shared_folder)
        (record,) = job.recoveries()
        assert record["strategy"] == "recover"
        left = "snapshots of rank 0 were left in the memory of node 0"
        assert record["reason"].endswith(left), record["reason"]
        assert record["version"] % EVERY == 0
        for rank in range(ranks):
            pids = {fact["pid"] for fact in job.facts("entered") if fact["rank"] == rank}
            assert len(pids) == (2 if rank == 0 else 1)
        assert files_in(memory) == []
        assert job.leftovers() == set()


@pytest.mark.extended(
    "tests/contract/test_memory_folders.py: test_arenas_are_as_without_one_*[missing]"
)
def test_a_folder_that_is_not_there_is_told_and_the_job_goes_on(tmp_path: pathlib.Path) -> None:
    """Else: tests/contract/test_node_memory.py."""
    missing = tmp_path / "none"
    with harness.job(tmp_path, **TRAINING, TASKD_NODE_MEMORY=str(missing)) as job:
        assert job.run("sharded.py").returncode == 0
        told = f"snapshots are kept as without TASKD_NODE_MEMORY={missing}"
        assert told in (job.log_dir / "agent-0.log").read_text()
