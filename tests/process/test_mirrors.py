"""Snapshots on a buddy node: a whole node is killed, and the dump is complete all the same; the next start goes on from it to the last bit."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from typing import TYPE_CHECKING

import pytest

from tests.process import harness
from tests.process.test_dump import checkpoints, resumed
from tests.process.test_recovery import wait_for_step

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Sequence

    from taskd.checkpoint import folder

pytestmark = pytest.mark.slow

EVERY = 3
TRAINING = {"LAYOUT": "fsdp", "NOISE": "1", "STEPS": "60"}
MIRRORED = {**TRAINING, "SNAPSHOT_EVERY": str(EVERY), "SNAPSHOT_BUDDY": "1", "STEP_S": "0.03", "TASKD_FAULT_TIMEOUT": "6", "TASKD_RECOVER_STRATEGY": "dump"}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """Digests of a run without faults, on one node."""
    with harness.job(tmp_path_factory.mktemp("undisturbed"), **TRAINING) as job:
        assert job.run("sharded.py").returncode == 0
        return job.digests()


def start(job: harness.Job, hosts: Sequence[str], nproc: int = 2) -> list[harness.Output]:
    """A manager, and one torchrun on each of the hosts, which differ by name alone."""
    job.start_manager()
    options = (f"--nnodes={len(hosts)}", "--master-addr=127.0.0.1", f"--master-port={job.master_port}")
    return [job.start_agent("sharded.py", nproc=nproc, options=(*options, f"--node-rank={node_rank}"), TASKD_HOST=host)
            for node_rank, host in enumerate(hosts)]


def kill_node(agent: harness.Output) -> None:
    """Everything that runs there; nothing of it sees anything else of it die."""
    pids = [agent.process.pid, *harness.descendants(agent.process.pid)]
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
    assert agent.wait(20).returncode == -signal.SIGKILL


def committed(job: harness.Job) -> dict[int, int]:
    """The newest step that each rank said it had committed."""
    return {rank: max(fact["step"] for fact in job.facts("committed") if fact["rank"] == rank) for rank in range(4)}


def dump_of(job: harness.Job, survivor: harness.Output, lost: int) -> folder.Checkpoint:
    """The job has ended as it does when the node `lost` has vanished and its shards were elsewhere; what it has left."""
    finished = survivor.wait(60)
    assert finished.returncode == 2, job.story()
    assert job.manager is not None
    assert job.manager.wait(20).returncode == 1
    (checkpoint,) = checkpoints(job)
    version = checkpoint.manifest.version
    assert checkpoint.manifest.fault == f"the agent of node {lost} has been silent for 6 s"
    assert finished.last_line == f"taskd: job test-job has ended: {checkpoint.manifest.fault}; step {version} was saved in {checkpoint.path}"
    assert set(checkpoint.manifest.writers) == ({2, 3} if lost == 0 else {0, 1})
    assert checkpoint.manifest.world_size == 4
    assert version % EVERY == 0
    assert job.leftovers() == set()
    return checkpoint


@pytest.mark.parametrize("lost", [1, 0])
def test_the_shards_of_a_lost_node_are_in_the_dump(tmp_path: pathlib.Path, undisturbed: dict[int, str], lost: int) -> None:
    with harness.job(tmp_path, **MIRRORED) as job:
        agents = start(job, ("one", "two"))
        wait_for_step(job, 12)
        kill_node(agents[lost])
        reached = committed(job)
        assert max(reached.values()) < 60
        checkpoint = dump_of(job, agents[1 - lost], lost)
        version = checkpoint.manifest.version
        assert 0 < version <= max(reached.values()) + 1
        assert checkpoint.manifest.generation == 1
        if lost == 1:
            resumed(job, version, script="sharded.py")       # on one node
        else:
            for agent in start(job, ("one", "two")):
                assert agent.wait(60).returncode == 0, job.story()
            assert {fact["source"] for fact in job.facts("restored")[-4:]} == {f"read version {version} from {checkpoint.path}"}
        assert job.digests() == undisturbed


def test_nodes_of_one_host_mirror_nothing_and_say_so_once(tmp_path: pathlib.Path, undisturbed: dict[int, str]) -> None:
    with harness.job(tmp_path, **MIRRORED | {"STEP_S": "0"}) as job:
        agents = start(job, ("same", "same"))
        for agent in agents:
            assert agent.wait(60).returncode == 0, job.story()
        assert job.manager is not None
        said = job.manager.wait(20).output
        assert len(re.findall(r"no snapshot can be mirrored: all nodes are on one host \(same\)", said)) == 1
        assert not any("mirrors its snapshots on" in agent.text for agent in agents)
        assert job.digests() == undisturbed
