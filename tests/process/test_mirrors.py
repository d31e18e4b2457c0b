"""Snapshots on a buddy node: a whole node is killed, and the dump is complete all the same.

The next start goes on from it to the last bit.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
from typing import TYPE_CHECKING

import pytest

from taskd.native.arena import Arena
from testbed.hosts import INTERFACE
from tests.process import harness
from tests.process.harness import wait_for_step, wait_until
from tests.process.test_dump import checkpoints, resumed

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Sequence

    from taskd.checkpoint import folder

pytestmark = pytest.mark.slow

EVERY, STEPS = 3, 36
# One step after each of two snapshots: while it is held, what is mirrored is no matter of speed.
HELD = (EVERY + 1, 2 * EVERY + 1)
TRAINING = {"LAYOUT": "fsdp", "NOISE": "1", "STEPS": str(STEPS)}
MIRRORED = {
    **TRAINING,
    "HOLD_AT": "30",  # so that it is not over before a node is lost
    "SNAPSHOT_EVERY": str(EVERY),
    "SNAPSHOT_BUDDY": "1",
    "STEP_S": "0.03",
    "TASKD_FAULT_TIMEOUT": "9",  # two thirds of it without an answer, and agents go on alone
    "TASKD_RECOVER_STRATEGY": "dump",
}


def undisturbed_of(nproc: int, folder: pathlib.Path, shared_folder: pathlib.Path) -> dict[int, str]:
    """Digests of a run without faults, on one node."""

    def train() -> dict[int, str]:
        with harness.job(folder / "undisturbed", **TRAINING) as job:
            assert job.run("sharded.py", nproc=nproc).returncode == 0
            return job.digests()

    name = f"sharded {sorted(TRAINING.items())} of {nproc}"
    return {int(rank): digest for rank, digest in harness.once(shared_folder, name, train).items()}


@pytest.fixture
def undisturbed(tmp_path: pathlib.Path, shared_folder: pathlib.Path) -> dict[int, str]:
    """Of four ranks."""
    return undisturbed_of(4, tmp_path, shared_folder)


def start(job: harness.Job, hosts: Sequence[str], nproc: int = 2) -> list[harness.Output]:
    """A manager, and one torchrun on each of the hosts, which differ by name alone."""
    job.start_manager()
    options = (
        f"--nnodes={len(hosts)}",
        "--master-addr=127.0.0.1",
        f"--master-port={job.master_port}",
    )
    return [
        job.start_agent(
            "sharded.py",
            nproc=nproc,
            options=(*options, f"--node-rank={node_rank}"),
            TASKD_HOST=host,
        )
        for node_rank, host in enumerate(hosts)
    ]


def mirrored(job: harness.Job) -> list[tuple[int, int]]:
    """The newest version of each rank of which the whole mirror is there, and its newest version.

    -1: there is none.
    """
    pids = {fact["rank"]: fact["pid"] for fact in job.facts("entered")}
    found = []
    for rank in sorted(pids):
        snapshots = [one for path in _arenas_of(pids[rank]) for one in _snapshots_in(path)]
        found.append(
            (
                max((version for version, is_mirrored in snapshots if is_mirrored), default=-1),
                max((version for version, _ in snapshots), default=-1),
            )
        )
    return found


def _arenas_of(pid: int) -> list[str]:
    paths = []
    with contextlib.suppress(FileNotFoundError):  # it has just been killed
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(FileNotFoundError):
                path = f"/proc/{pid}/fd/{name}"
                if "taskd-arena" in os.readlink(path) and os.stat(path).st_size:
                    paths.append(path)
    return paths


def _snapshots_in(path: str) -> list[tuple[int, bool]]:
    """The version of each, and whether the mirror is whole."""
    with contextlib.closing(Arena.attach(os.open(path, os.O_RDWR | os.O_CLOEXEC))) as arena:
        if arena.memory is None:  # it is being made
            return []
        mark, seal_of = arena.mirror_mark, arena.memory.seal_of
        return [(held.version, seal_of(held.slot) == mark) for held in arena.versions()]


def wait_for_mirrors(job: harness.Job, version: int = 0) -> None:
    """Until all four ranks have a mirror, of this version at least.

    Training does not wait for mirrors, however slow they are: only while a step is held, the newest
    snapshots get theirs.
    """

    def are_there() -> bool:
        found = mirrored(job)
        return len(found) == 4 and all(version <= whole == newest for whole, newest in found)

    wait_until(job, are_there)


def kill_node(job: harness.Job, agent: harness.Output) -> None:
    """Everything that runs there; nothing of it sees anything else of it die."""
    pids = [agent.process.pid, *sorted(harness.descendants(agent.process.pid))]
    assert len(pids) >= 3, "torchrun, and two ranks at least"
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
    assert agent.wait(20).returncode == -signal.SIGKILL
    job.tell()


def committed(job: harness.Job) -> dict[int, int]:
    """The newest step that each rank said it had committed."""
    return {
        rank: max(fact["step"] for fact in job.facts("committed") if fact["rank"] == rank)
        for rank in range(4)
    }


def dump_of(
    job: harness.Job, survivor: harness.Output, lost: int, every: int = EVERY
) -> folder.Checkpoint:
    """The job has ended as it does when the node `lost` has vanished and its shards were elsewhere.

    What it has left.
    """
    finished = survivor.wait(60)
    assert finished.returncode == 2, job.story()
    assert job.manager is not None
    assert job.manager.wait(20).returncode == 1
    (checkpoint,) = checkpoints(job)
    version = checkpoint.manifest.version
    fault = checkpoint.manifest.fault
    assert fault == harness.silence_of(lost, 9, fault)
    assert finished.last_line == (
        f"taskd: job test-job has ended: {fault}; step {version} was saved in {checkpoint.path}"
    )
    assert set(checkpoint.manifest.writers) == ({2, 3} if lost == 0 else {0, 1})
    assert checkpoint.manifest.world_size == 4
    assert version % every == 0
    assert job.leftovers() == set()
    return checkpoint


def lose_and_replace(job: harness.Job, lost: int) -> list[harness.Output]:
    """A node is killed one step after a snapshot, and another torchrun started in its place."""
    agents = start(job, ("one", "two"))
    for step in HELD:
        wait_for_step(job, step)
        wait_for_mirrors(job, step - 1)
        if step != HELD[-1]:
            job.tell(step)
    kill_node(job, agents[lost])
    assert set(committed(job).values()) == {HELD[-1]}
    agents[lost] = job.start_agent(
        "sharded.py",
        nproc=2,
        options=(
            "--nnodes=2",
            "--master-addr=127.0.0.1",
            f"--master-port={job.master_port}",
            f"--node-rank={lost}",
        ),
        TASKD_HOST="three",
    )
    return agents


@pytest.mark.parametrize(
    ("lost", "strategies"),
    [
        (1, "recover"),
        pytest.param(0, "recover", marks=pytest.mark.extended("[1-recover]")),
        pytest.param(
            1,
            "recover,dump",
            marks=pytest.mark.extended(
                "[1-recover]; tests/unit/core/test_returning.py: with dump, too"
            ),
        ),
    ],
)
def test_another_node_gets_the_shards_of_the_lost_one_from_mirrors(
    tmp_path: pathlib.Path, undisturbed: dict[int, str], lost: int, strategies: str
) -> None:
    """The survivors keep their processes, and all go back to the newest snapshot."""
    env = {"TASKD_RECOVER_STRATEGY": strategies, "HOLD_AT": ",".join(map(str, HELD))}
    with harness.job(tmp_path, **MIRRORED | env) as job:
        agents = lose_and_replace(job, lost)
        ended = [agent.wait(60) for agent in agents]
        assert [one.returncode for one in ended] == [0, 0], job.story()
        assert job.digests() == undisturbed
        (record,) = job.recoveries()
        assert record["strategy"] == "recover"
        names = "0, 1" if lost == 0 else "2, 3"
        newest = 2 * EVERY
        came = f"version {newest} of ranks {names} came back from node {1 - lost}"
        assert record["reason"].endswith(f"{came}, which mirrored it")
        assert (record["version"], record["steps_redone"]) == (newest, 1)
        survivors = {0, 1} if lost == 1 else {2, 3}
        for rank in range(4):
            pids = {fact["pid"] for fact in job.facts("entered") if fact["rank"] == rank}
            assert len(pids) == (1 if rank in survivors else 2)
        assert not (job.directory / "taskd_checkpoints").exists(), "nothing had to be dumped"
        assert job.leftovers() == set()


@pytest.mark.parametrize("lost", [1, 0])
def test_the_shards_of_a_lost_node_are_in_the_dump(
    tmp_path: pathlib.Path, undisturbed: dict[int, str], lost: int
) -> None:
    with harness.job(tmp_path, **MIRRORED) as job:
        agents = start(job, ("one", "two"))
        wait_for_step(job, 12)
        wait_for_mirrors(job)
        kill_node(job, agents[lost])
        reached = committed(job)
        assert max(reached.values()) < STEPS
        checkpoint = dump_of(job, agents[1 - lost], lost)
        version = checkpoint.manifest.version
        assert 0 < version <= max(reached.values()) + 1
        if lost == 1:
            resumed(job, version, script="sharded.py")  # on one node
        else:
            for agent in start(job, ("one", "two")):
                assert agent.wait(60).returncode == 0, job.story()
            assert {fact["source"] for fact in job.facts("restored")[-4:]} == {
                f"read version {version} from {checkpoint.path}"
            }
        assert job.digests() == undisturbed


def test_mirrors_that_are_slower_than_steps_still_meet_in_one_version(
    tmp_path: pathlib.Path, undisturbed: dict[int, str]
) -> None:
    """A snapshot is due after every step, and a step takes a few milliseconds.

    Most are left out, by all ranks alike.
    """
    with harness.job(tmp_path, **MIRRORED | {"SNAPSHOT_EVERY": "1", "STEP_S": "0.005"}) as job:
        agents = start(job, ("one", "two"))
        wait_for_step(job, 15)
        wait_for_mirrors(job)
        kill_node(job, agents[1])
        assert max(committed(job).values()) < STEPS
        checkpoint = dump_of(job, agents[0], 1, every=1)
        resumed(job, checkpoint.manifest.version, script="sharded.py")
        assert job.digests() == undisturbed


def test_mirrors_follow_a_recovery_in_place(
    tmp_path: pathlib.Path, undisturbed: dict[int, str]
) -> None:
    """A rank dies and everybody goes back; then the node of that rank is lost."""
    env = {
        "FAULTS": "3@10:backward-end:kill",
        "TASKD_RECOVER_STRATEGY": "recover-in-place,dump",
        "HOLD_AT": "11,30",
    }
    with harness.job(tmp_path, **MIRRORED | env) as job:
        agents = start(job, ("one", "two"))
        wait_for_step(job, 11)
        wait_until(job, job.recoveries)
        assert len(job.facts("fault")) == len(job.recoveries()) == 1
        wait_for_mirrors(job)
        job.tell(11)
        wait_for_step(job, 20)
        wait_for_mirrors(job, 12)
        kill_node(job, agents[1])
        assert max(committed(job).values()) < STEPS
        checkpoint = dump_of(job, agents[0], 1)
        assert checkpoint.manifest.version >= job.recoveries()[0]["version"]
        resumed(job, checkpoint.manifest.version, script="sharded.py")
        assert job.digests() == undisturbed


def test_a_manager_that_was_restarted_knows_the_mirrors(
    tmp_path: pathlib.Path, undisturbed: dict[int, str]
) -> None:
    with harness.job(tmp_path, **MIRRORED) as job:
        agents = start(job, ("one", "two"))
        wait_for_step(job, 9)
        wait_for_mirrors(job)
        assert job.manager is not None
        os.kill(job.manager.process.pid, signal.SIGKILL)
        job.manager.wait(10)
        job.start_manager().wait_text("-> Pair cause=mirrors generation=0 node_rank=1 buddy=0", 30)
        kill_node(job, agents[1])
        assert max(committed(job).values()) < STEPS
        checkpoint = dump_of(job, agents[0], 1)
        assert not any(
            "mirrors its snapshots on" in line
            for agent in agents
            for line in agent.text.split("mirrors its snapshots on", 1)[1].splitlines()
        )
        resumed(job, checkpoint.manifest.version, script="sharded.py")
        assert job.digests() == undisturbed


def test_a_host_whose_network_is_gone(tmp_path: pathlib.Path, undisturbed: dict[int, str]) -> None:
    """Two hosts with addresses of their own, a secret, and a cable that is pulled.

    No connection breaks, they all fall silent.
    """
    secret = tmp_path / "secret"
    secret.write_text("of this test, and long enough")
    with (
        harness.hosts(tmp_path, 2) as (first, second),
        harness.job(
            tmp_path / "job",
            **MIRRORED,
            GLOO_SOCKET_IFNAME=INTERFACE,
            TASKD_SECRET_FILE=str(secret),
        ) as job,
    ):
        job.start_manager(host=first)
        agents = [
            job.start_node("sharded.py", node_rank, 2, host)
            for node_rank, host in enumerate((first, second))
        ]
        wait_for_step(job, 12)
        wait_for_mirrors(job)
        second.cut()
        job.tell()
        reached = committed(job)
        assert max(reached.values()) < STEPS
        finished = agents[0].wait(90)
        assert finished.returncode == 2, job.story()
        assert f"mirrors its snapshots on node 1 at {second.address}:" in finished.output
        assert f"mirrors its snapshots on node 0 at {first.address}:" in agents[1].text
        (checkpoint,) = checkpoints(job)
        fault = checkpoint.manifest.fault
        assert fault == harness.silence_of(1, 9, fault)
        assert 0 < checkpoint.manifest.version <= max(reached.values()) + 1
        assert job.manager is not None
        assert job.manager.wait(20).returncode == 1
        assert second.kill()
        job.env |= {"GLOO_SOCKET_IFNAME": "lo"}
        resumed(job, checkpoint.manifest.version, script="sharded.py")
        assert job.digests() == undisturbed


def test_nodes_of_one_host_mirror_nothing_and_say_so_once(
    tmp_path: pathlib.Path, undisturbed: dict[int, str]
) -> None:
    with harness.job(tmp_path, **MIRRORED | {"STEP_S": "0", "HOLD_AT": "-1"}) as job:
        agents = start(job, ("same", "same"))
        for agent in agents:
            assert agent.wait(60).returncode == 0, job.story()
        assert job.manager is not None
        said = job.manager.wait(20).output
        assert (
            len(
                re.findall(
                    r"no snapshot can be mirrored: all nodes are on one host "
                    r"\(same\)",
                    said,
                )
            )
            == 1
        )
        assert not any("mirrors its snapshots on" in agent.text for agent in agents)
        assert job.digests() == undisturbed
