"""Elastic training on real processes: a node is lost, the others go on; it comes back."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest

from tests.process import elastic_model, harness
from tests.process.harness import wait_for_step, wait_until

if TYPE_CHECKING:
    import pathlib

pytestmark = pytest.mark.slow

LIMIT_S = 150


class Nodes:
    """A job over several torchruns, which have begun to train."""

    def __init__(self, job: harness.Job, count: int, nproc: int) -> None:
        self.job, self.count, self.nproc = job, count, nproc
        self.manager = job.start_manager()
        self.lost: set[int] = set()
        self.agents = [self.start(node_rank) for node_rank in range(count)]

    def start(self, node_rank: int) -> harness.Output:
        """One more torchrun with this index."""
        options = (
            f"--nnodes={self.count}",
            f"--node-rank={node_rank}",
            "--master-addr=127.0.0.1",
            f"--master-port={self.job.master_port}",
        )
        return self.job.start_agent("elastic.py", nproc=self.nproc, options=options)

    def lose(self, node_rank: int) -> None:
        """SIGKILL for its torchrun, which the manager knows."""
        for one in self.agents:
            one.wait_text("joined the manager at", LIMIT_S)
        agent = self.agents[node_rank]
        os.kill(agent.process.pid, signal.SIGKILL)
        assert agent.wait(LIMIT_S).returncode == -signal.SIGKILL
        self.lost.add(node_rank)

    def bring_back(self, node_rank: int) -> None:
        """Another torchrun has the index of a lost one."""
        self.agents[node_rank] = self.start(node_rank)
        self.lost.discard(node_rank)

    def finish(self) -> int:
        """All torchruns that are there end well. The number of steps."""
        wait_until(self.job, lambda: self._done() >= 8)
        (self.job.facts_dir / "stop").touch()
        for node_rank, agent in enumerate(self.agents):
            if node_rank not in self.lost:
                assert agent.wait(LIMIT_S).returncode == 0, self.job.story()
        assert self.manager.wait(LIMIT_S).returncode == 0
        assert self.job.leftovers() == set()
        return 1 + max(fact["step"] for fact in self.job.facts("committed"))

    def _done(self) -> int:
        """Steps that the newest entry has done, on the rank that has done fewest."""
        facts = self.job.facts()
        entered = max(fact["time"] for fact in facts if fact["what"] == "restored")
        done: dict[int, int] = {}
        for fact in facts:
            is_new = fact["what"] == "committed" and fact["time"] > entered
            done[fact["rank"]] = done.get(fact["rank"], 0) + is_new
        return min(done[fact["rank"]] for fact in facts if fact["time"] >= entered)


def _job(directory: pathlib.Path, **env: str) -> harness.Job:
    settings = {
        "TASKD_RECOVER_STRATEGY": "elastic-training",
        "TASKD_FAULT_TIMEOUT": "9",  # two thirds of it without an answer, and agents go on alone
    }
    return harness.job(directory, **settings | env)


def _committed(job: harness.Job) -> dict[int, list[dict]]:
    found: dict[int, list[dict]] = {}
    for fact in job.facts("committed"):
        found.setdefault(fact["rank"], []).append(fact)
    return found


def _have_committed(job: harness.Job, ranks: set[int], world: int) -> bool:
    """Whether each of these has done a step in a world of so many."""
    return ranks <= {fact["rank"] for fact in job.facts("committed") if fact["world"] == world}


def _check_steps(job: harness.Job, ranks: set[int], steps: int) -> None:
    """These ranks have done each step once, each in one process, with the losses of one alone.

    One that was behind when the node was lost has received what another had done already.
    """
    committed, expected = _committed(job), elastic_model.losses_alone(steps)
    done: set[int] = set()
    for rank in ranks:
        own = [fact["step"] for fact in committed[rank]]
        assert own == sorted(set(own))
        assert len(own) >= steps - len(job.recoveries())
        done |= set(own)
        assert len({fact["pid"] for fact in committed[rank]}) == 1
        losses = [fact["loss"] for fact in committed[rank]]
        assert losses == pytest.approx([expected[step] for step in own], rel=1e-4)
    # an interrupt at the end of commit() comes before the script has written that down
    untold = set(range(steps)) - done
    assert untold <= {record["version"] - 1 for record in job.recoveries()}


@pytest.mark.parametrize(
    "lost", [2, pytest.param(0, marks=pytest.mark.extended("[last]"))], ids=["last", "first"]
)
def test_the_others_go_on_and_the_node_comes_back(tmp_path: pathlib.Path, lost: int) -> None:
    survivors = {0, 1, 2} - {lost}
    with _job(tmp_path) as job:
        nodes = Nodes(job, 3, 1)
        wait_for_step(job, 8)
        nodes.lose(lost)
        left = ", ".join(map(str, sorted(survivors)))
        said = f"elastic-training: the job goes on with 2 of 3 nodes (ranks {left})"
        nodes.manager.wait_text(said, LIMIT_S)
        wait_until(job, lambda: _have_committed(job, survivors, world=2))
        nodes.bring_back(lost)
        nodes.manager.wait_text("the world is whole again: all 3 nodes, 3 ranks", LIMIT_S)
        _check_steps(job, survivors, nodes.finish())
        worlds = [fact["world"] for fact in _committed(job)[min(survivors)]]
        assert (worlds[0], 2 in worlds, worlds[-1]) == (3, True, 3)
        digests = job.digests()
        assert set(digests) == {0, 1, 2}
        assert len(set(digests.values())) == 1
        without, back = job.recoveries()
        assert [without["strategy"], back["strategy"]] == ["elastic-training"] * 2
        assert [without["steps_redone"], back["steps_redone"]] == [0, 0]
        assert [fault["kind"] for fault in without["faults"]] == ["node lost"]
        assert (back["faults"], back["restarts_used"]) == ([], 1)
        assert "without taskd.ElasticSampler" not in job.story()


@pytest.mark.extended(
    "tests/unit/core/test_elastic.py: test_whole_replicas_can_be_done_without; "
    "tests/unit/worker/test_world.py: ranks of the smaller world; [last]"
)
def test_replicas_of_sharded_state(tmp_path: pathlib.Path) -> None:
    """HSDP, a replica on each node: each rank of the other one goes on with its own shard."""
    with _job(tmp_path, LAYOUT="hsdp") as job:
        nodes = Nodes(job, 2, 2)
        wait_for_step(job, 8)
        nodes.lose(0)
        said = "elastic-training: the job goes on with 1 of 2 nodes (ranks 2, 3)"
        nodes.manager.wait_text(said, LIMIT_S)
        nodes.bring_back(0)
        nodes.manager.wait_text("the world is whole again: all 2 nodes, 4 ranks", LIMIT_S)
        _check_steps(job, {2, 3}, nodes.finish())
        assert len(set(job.digests().values())) == 1
        entries = [fact for fact in job.facts("restored") if fact["rank"] == 3]
        assert [(fact["world"], fact["world_rank"], fact["local"]) for fact in entries] == [
            (4, 3, 1), (2, 1, 1), (4, 3, 1),
        ]  # fmt: skip
        assert [record["steps_redone"] for record in job.recoveries()] == [0, 0]


@pytest.mark.extended(
    "tests/unit/worker/test_world.py: test_a_world_of_another_size_is_told_of_once"
)
def test_data_that_are_divided_by_ranks_are_warned_of(tmp_path: pathlib.Path) -> None:
    """Nobody comes back here: the job ends as the smaller world."""
    with _job(tmp_path, DATA="divided") as job:
        nodes = Nodes(job, 2, 1)
        wait_for_step(job, 8)
        nodes.lose(1)
        nodes.manager.wait_text("the job goes on with 1 of 2 nodes (ranks 0)", LIMIT_S)
        nodes.finish()
        said = nodes.agents[0].text.count(
            "the world has 1 of 2 ranks now, and the script reads its data without "
            "taskd.ElasticSampler"
        )
        assert said == 1


@pytest.mark.extended("tests/unit/core/test_elastic.py: test_a_shard_that_nobody_else_has_cannot")
def test_shards_that_nobody_else_has_end_the_job_and_say_so(tmp_path: pathlib.Path) -> None:
    with _job(tmp_path, LAYOUT="fsdp") as job:
        nodes = Nodes(job, 2, 1)
        wait_for_step(job, 8)
        nodes.lose(1)
        finished = nodes.agents[0].wait(LIMIT_S)
        assert finished.returncode == 1
        assert (
            "the job cannot go on without it: the state is sharded, and nobody else has shard"
            in (finished.last_line)
        )
        record = job.recoveries()[-1]
        assert (record["strategy"], record["code"]) == ("exit", 499)
        why = {each["strategy"]: each["why"] for each in record["skipped"]}
        assert why["elastic-training"].startswith("the state is sharded, and nobody else has")
        assert nodes.manager.wait(LIMIT_S).returncode == 1
        assert job.leftovers() == set()
