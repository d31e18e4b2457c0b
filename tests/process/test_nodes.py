"""A whole node is lost, and another torchrun takes its place: two torchruns of two ranks each.

A node is lost when its torchrun is: the workers end with it.
"""

from __future__ import annotations

import os
import re
import signal
from typing import TYPE_CHECKING

import pytest

from tests.process import harness
from tests.process.harness import wait_for_step
from tests.process.test_recovery import (
    check_recovered,
    reference,  # noqa: F401
)

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Callable

    Reference = Callable[..., dict[int, str]]

pytestmark = pytest.mark.slow

LIMIT_S = 90


class TwoNodes:
    """A job over two torchruns, which have begun to train."""

    def __init__(self, job: harness.Job) -> None:
        self.job = job
        self.manager = job.start_manager()
        self.agents = [self.start(node_rank) for node_rank in range(2)]

    def start(self, node_rank: int) -> harness.Output:
        """One more torchrun with this index."""
        options = (
            "--nnodes=2",
            f"--node-rank={node_rank}",
            "--master-addr=127.0.0.1",
            f"--master-port={self.job.master_port}",
        )
        return self.job.start_agent("train.py", nproc=2, options=options)

    def lose(self, node_rank: int, held: int | None = None) -> None:
        """SIGKILL for its torchrun, which the manager knows. Then the step `held` is let go."""
        for one in self.agents:
            one.wait_text("joined the manager at", LIMIT_S)
        agent = self.agents[node_rank]
        os.kill(agent.process.pid, signal.SIGKILL)
        assert agent.wait(LIMIT_S).returncode == -signal.SIGKILL
        self.job.tell(held)


def _job(directory: pathlib.Path, **env: str) -> harness.Job:
    settings = {
        "TASKD_RECOVER_STRATEGY": "recover",
        "TASKD_FAULT_TIMEOUT": "9",  # two thirds of it without an answer, and agents go on alone
        "STEPS": "40",
        "SLEEP_S": "0.05",
        "HOLD_AT": "35",  # so that it is not over before anything befalls it
    }
    return harness.job(directory, **settings | env)


@pytest.mark.parametrize(
    "lost_times", [1, pytest.param(2, marks=pytest.mark.extended("[once]"))], ids=["once", "twice"]
)
def test_another_torchrun_takes_the_place_of_a_lost_node(
    tmp_path: pathlib.Path,
    reference: Reference,  # noqa: F811
    lost_times: int,
) -> None:
    """In the same step, and to the last bit: its RNG and sampler state was kept elsewhere, too."""
    held = [10 * number for number in range(1, lost_times + 1)]
    with _job(tmp_path, HOLD_AT=",".join(map(str, held))) as job:
        nodes = TwoNodes(job)
        for step in held:
            wait_for_step(job, step - 2)
            nodes.lose(1, held=step)
            nodes.agents[1] = nodes.start(1)
        assert nodes.agents[1].wait(LIMIT_S).returncode == 0, nodes.agents[1].text
        finished = nodes.agents[0].wait(LIMIT_S)
        check_recovered(job, finished, reference(STEPS="40"), faults=0, replaced={2, 3})
        records = job.recoveries()
        assert [record["strategy"] for record in records] == ["recover"] * lost_times
        assert [record["steps_redone"] for record in records] == [0] * lost_times
        assert {fault["kind"] for record in records for fault in record["faults"]} == {"node lost"}


@pytest.mark.extended(
    "tests/unit/core/test_absence.py: test_its_own_agent_comes_back_with_its_workers; "
    "tests/simulation/test_large.py: test_where_lost_nodes_are_replaced_it_comes_back_*"
)
def test_a_node_that_is_only_cut_off_keeps_its_processes(
    tmp_path: pathlib.Path,
    reference: Reference,  # noqa: F811
) -> None:
    """Its agent stands still for longer than its lease; its workers wait meanwhile."""
    with _job(tmp_path) as job:
        nodes = TwoNodes(job)
        wait_for_step(job, 8)
        pid = nodes.agents[1].process.pid
        os.kill(pid, signal.SIGSTOP)
        nodes.manager.wait_text("Interrupt cause=tick", LIMIT_S)
        os.kill(pid, signal.SIGCONT)
        job.tell()
        assert nodes.agents[1].wait(LIMIT_S).returncode == 0, nodes.agents[1].text
        finished = nodes.agents[0].wait(LIMIT_S)
        check_recovered(job, finished, reference(STEPS="40"), faults=0, replaced=set())
        (record,) = job.recoveries()
        assert record["strategy"] == "recover"


@pytest.mark.extended(
    "test_cut_off.py: test_nobody_comes_back_before_the_others_have_given_up; "
    "tests/unit/core/test_absence.py: test_nobody_comes, "
    "test_nobody_comes_and_the_others_hold_everything"
)
@pytest.mark.parametrize("strategies", ["recover", "recover,dump"])
def test_nobody_takes_the_place(tmp_path: pathlib.Path, strategies: str) -> None:
    env = {"TASKD_RECOVER_STRATEGY": strategies, "TASKD_WAIT_RESCHEDULE_TIMEOUT": "2"}
    dumps = tmp_path / "dumps"
    with _job(tmp_path, TASKD_CHECKPOINT_DIR=str(dumps), **env) as job:
        nodes = TwoNodes(job)
        wait_for_step(job, 8)
        nodes.lose(1)
        finished = nodes.agents[0].wait(LIMIT_S)
        has_dump = "dump" in strategies
        assert finished.returncode == (2 if has_dump else 1), finished.output
        reason = "nobody took its place within 2 s (node 1)"
        assert reason in finished.output
        assert bool(list(dumps.glob("*")) if dumps.exists() else []) == has_dump
        assert nodes.manager.wait(LIMIT_S).returncode != 0
        assert job.leftovers() == set()


@pytest.mark.extended(
    "tests/unit/core/test_absence.py: test_a_node_that_is_heard_keeps_it, "
    "test_it_does_not_ask_for_ever"
)
def test_two_torchruns_of_one_index(
    tmp_path: pathlib.Path,
    reference: Reference,  # noqa: F811
) -> None:
    """The first one keeps its place; the second one ends, and says why."""
    with _job(tmp_path, STEPS="300", HOLD_AT="290") as job:
        nodes = TwoNodes(job)
        wait_for_step(job, 8)
        second = nodes.start(1)
        finished = second.wait(LIMIT_S)
        job.tell()
        assert finished.returncode == 1, finished.output
        assert "has no place in it: no manager has given it this place" in finished.output
        assert nodes.agents[1].wait(LIMIT_S).returncode == 0, nodes.agents[1].text
        finished = nodes.agents[0].wait(LIMIT_S)
        check_recovered(job, finished, reference(STEPS="300"), faults=0, replaced=set())
        assert "two torchruns of one index are a mistake" in nodes.manager.text
        assert job.recoveries() == []


def _start(job: harness.Job, node_rank: int, node_count: int, *options: str) -> harness.Output:
    return job.start_agent(
        "train.py",
        nproc=2,
        options=(
            f"--nnodes={node_count}",
            f"--node-rank={node_rank}",
            "--master-addr=127.0.0.1",
            f"--master-port={job.master_port}",
            *options,
        ),
    )


def test_a_node_too_many_is_told_at_once_and_the_others_train(
    tmp_path: pathlib.Path,
    reference: Reference,  # noqa: F811
) -> None:
    with _job(tmp_path) as job:
        job.tell()
        job.start_manager()
        first, second, third = (_start(job, node_rank, 2) for node_rank in range(3))
        finished = third.wait(LIMIT_S)
        assert finished.returncode == 1, finished.output
        assert finished.last_line == (
            "taskd: --node-rank=2 is none of the nodes 0 to 1 that --nnodes=2 says: start as many "
            "torchruns as there are nodes, and those that are to wait for the place of a lost one "
            "with TASKD_SPARE=1"
        )
        assert "Traceback" not in finished.output
        assert second.wait(LIMIT_S).returncode == 0, job.story()
        check_recovered(job, first.wait(LIMIT_S), reference(STEPS="40"), faults=0, replaced=set())


@pytest.mark.parametrize(
    "backend",
    [
        "static",
        pytest.param("c10d", marks=pytest.mark.extended("[static]; tests/unit/test_not_met.py")),
    ],
)
def test_a_node_that_does_not_come_ends_the_others(tmp_path: pathlib.Path, backend: str) -> None:
    """When the time of the rendezvous is over; without a traceback of torch."""
    with _job(tmp_path) as job:
        if backend == "static":
            nodes = [_start(job, node_rank, 3, "--rdzv-conf=timeout=5") for node_rank in (0, 2)]
        else:
            place = f"--rdzv-endpoint=127.0.0.1:{job.master_port}"
            told = ("--nnodes=3", "--rdzv-backend=c10d", place, "--rdzv-id=one")
            nodes = [
                job.start_agent(
                    "train.py",
                    nproc=2,
                    options=(*told, f"--rdzv-conf=is_host={is_host},join_timeout=5"),
                )
                for is_host in (1, 0)
            ]
        ended = [node.wait(LIMIT_S) for node in nodes]
        assert [finished.returncode for finished in ended] == [1, 1], job.story()
        # of the two, the second one may come so late that the first one does not see it
        why = r"[12]/3 clients joined\." if backend == "static" else r"\(RendezvousTimeoutError\)\."
        told = f"taskd: the nodes of --nnodes=3 have not met at 127.0.0.1:{job.master_port}: "
        with_nodes = "all with the same --nnodes and the same address."
        for number, finished in enumerate(ended):
            last = finished.last_line
            assert last.startswith(told)
            # with c10d the store goes with the first one, and the second one may see that first
            is_left = backend == "c10d" and number == 1 and "Nobody answers there: " in last
            assert is_left or last.endswith(f" Start a torchrun for each node, {with_nodes}")
            assert "Traceback" not in finished.output
        assert re.search(f"{why} Start", ended[0].last_line)
        assert not job.facts()


@pytest.mark.extended(
    "tests/unit/core/test_dying_incomplete.py: test_what_the_others_hold_is_saved"
)
def test_what_is_left_is_saved_if_the_node_went_while_no_manager_was_there(
    tmp_path: pathlib.Path,
) -> None:
    """The next manager never hears of that node, and saves what the other one holds."""
    dumps = tmp_path / "dumps"
    strategies = {"TASKD_RECOVER_STRATEGY": "recover-in-place,dump"}
    with _job(tmp_path, TASKD_CHECKPOINT_DIR=str(dumps), STEPS="400", **strategies) as job:
        nodes = TwoNodes(job)
        wait_for_step(job, 8)
        first = nodes.agents[0]
        os.kill(first.process.pid, signal.SIGSTOP)  # nor does it hear of it before that
        os.kill(nodes.manager.process.pid, signal.SIGKILL)
        assert nodes.manager.wait(LIMIT_S).returncode == -signal.SIGKILL
        nodes.lose(1)
        manager = job.start_manager()
        manager.wait_text("listens on", LIMIT_S)
        os.kill(first.process.pid, signal.SIGCONT)
        finished = first.wait(LIMIT_S)
        assert finished.returncode == 2, finished.output
        assert "and ranks [2, 3] are not known to this manager" in finished.output
        (saved,) = dumps.glob("dump-*")
        assert f"was saved in {saved}" in finished.last_line
        assert manager.wait(LIMIT_S).returncode == 1
        assert job.leftovers() == set()


@pytest.mark.extended("tests/unit/core/test_recovery_end.py: test_a_death_after_release_*")
@pytest.mark.parametrize("culprit", [2, 0])
def test_all_hear_of_a_process_that_fails_when_the_training_is_over(
    tmp_path: pathlib.Path, culprit: int
) -> None:
    """A node that has done its part waits for the other one, and its manager has ended then."""
    other = 0 if culprit else 1
    with _job(tmp_path, HOLD_AT="-1", FAULTS=f"{culprit}@40:behind:kill") as job:
        nodes = TwoNodes(job)
        finished = [agent.wait(LIMIT_S) for agent in nodes.agents]
        assert [one.returncode for one in finished] == [1, 1], job.story()
        why = f"rank {culprit} ended with SIGKILL at step 40 after the training function had"
        assert f"node {other} has done its part, but the job has failed: {why}" in (
            finished[other].output
        )
        assert why in finished[other].last_line
        assert "Error waiting on exit barrier" not in finished[other].output
        assert nodes.manager.wait(LIMIT_S).returncode == 1
        assert job.leftovers() == set()


def test_a_node_that_finds_no_manager_trains_with_the_others(tmp_path: pathlib.Path) -> None:
    """Nobody takes it for lost, although it never registers."""
    with _job(tmp_path, TASKD_FAULT_TIMEOUT="3") as job:
        manager = job.start_manager()
        options = ["--nnodes=2", "--master-addr=127.0.0.1", f"--master-port={job.master_port}"]
        agents = [
            job.start_agent("train.py", nproc=2, options=(*options, f"--node-rank={rank}"), **env)
            for rank, env in enumerate([{}, {"TASKD_MANAGER_ADDR": "127.0.0.1:9"}])
        ]
        manager.wait_text("nodes [1] of 2 (ranks [2, 3]) are missing, the others commit", LIMIT_S)
        job.tell()
        assert [agent.wait(LIMIT_S).returncode for agent in agents] == [0, 0], job.story()
        assert manager.wait(LIMIT_S).returncode == 0
        assert job.recoveries() == []
