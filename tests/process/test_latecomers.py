"""Torchruns that are started when the job has another manager than their command line names."""

from __future__ import annotations

import contextlib
import os
import signal
from typing import TYPE_CHECKING

import pytest

from tests.process import harness
from tests.process.harness import wait_for_step, wait_until
from tests.process.test_recovery import (
    reference,  # noqa: F401
)

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Callable, Iterator

    Reference = Callable[..., dict[int, str]]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.extended(
        "nearest: test_elections.py: an election; test_names.py: several addresses; who is late: "
        "tests/unit/core/test_election.py: test_who_asks_before_the_agents_have_come_is_late, "
        "tests/unit/manager/test_late.py, tests/unit/core/test_meeting.py"
    ),
]

LIMIT_S = 60
NODES = 3
STEPS = "200"


class Nodes:
    """A job of three torchruns, each with an address of its own, and the manager at the first."""

    def __init__(self, job: harness.Job, backend: str) -> None:
        self.job, self.backend = job, backend
        self.manager = job.start_manager(POD_IP=_address(0))
        self.agents = [self.start(node_rank) for node_rank in range(NODES)]

    def start(self, node_rank: int, **env: str) -> harness.Output:
        """One more torchrun, at an address of its own."""
        port = self.job.master_port
        options = (
            (f"--node-rank={node_rank}", "--master-addr=127.0.0.1", f"--master-port={port}")
            if self.backend == "static"
            else (
                "--rdzv-backend=c10d",
                f"--rdzv-endpoint={_address(0)}:{port}",
                "--rdzv-id=one",
                f"--rdzv-conf=is_host={int(node_rank == 0)}",
                f"--local-addr={_address(node_rank)}",
            )
        )
        env = {"POD_IP": _address(node_rank)} | env
        return self.job.start_agent(
            "train.py", nproc=1, options=(f"--nnodes={NODES}", *options), **env
        )

    def lose_the_first(self) -> None:
        """Its torchrun and the manager are killed, and the next one is elected."""
        self.kill_the_first()
        wait_until(self.job, lambda: self.is_elected)

    def kill_the_first(self) -> None:
        """Its torchrun and the manager."""
        for process in (self.manager.process, self.agents[0].process):
            os.kill(process.pid, signal.SIGKILL)

    @property
    def is_elected(self) -> bool:
        """Whether one of the others obeys another manager."""
        return any("obeys the manager at" in agent.text for agent in self.agents)

    def recovered(self, *agents: harness.Output) -> str:
        """By which strategy, once, with no step redone. These torchruns end well."""
        outputs = [agent.wait(LIMIT_S) for agent in agents]
        assert [output.returncode for output in outputs] == [0] * NODES, self.job.story()
        (record,) = self.job.recoveries()
        assert record["steps_redone"] == 0
        return record["strategy"]


@contextlib.contextmanager
def training(directory: pathlib.Path, backend: str, **env: str) -> Iterator[Nodes]:
    """A job that waits for lost nodes, and has begun. Afterwards nothing of it is left."""
    settings = {
        "TASKD_RECOVER_STRATEGY": "recover", "TASKD_MANAGER": "auto", "TASKD_FAULT_TIMEOUT": "6",
        "STEPS": STEPS, "SLEEP_S": "0.05",
    }  # fmt: skip
    with harness.job(directory, **(settings | env)) as job:
        nodes = Nodes(job, backend)
        wait_for_step(job, 4)
        yield nodes
        assert job.leftovers() == set()


def _address(node_rank: int) -> str:
    return f"127.0.0.{node_rank + 1}"


@pytest.mark.parametrize(
    ("backend", "told"),
    [
        ("static", {"TASKD_SPARE": "1", "TASKD_MANAGER_ADDR": "127.0.0.1,127.0.0.3,127.0.0.2"}),
        ("c10d", {"TASKD_SPARE": "1", "SLURM_JOB_NODELIST": "127.0.0.[1-3]"}),
        ("static", {"TASKD_MANAGER_ADDR": "127.0.0.1,127.0.0.2,127.0.0.3"}),
    ],
    ids=["spare", "c10d", "same index"],
)
def test_a_torchrun_that_is_started_after_an_election_finds_the_manager(
    tmp_path: pathlib.Path,
    reference: Reference,  # noqa: F811
    backend: str,
    told: dict[str, str],
) -> None:
    """Where its command line names it nobody listens; with it went the store of the rendezvous."""
    with training(tmp_path, backend) as nodes:
        nodes.lose_the_first()
        assert nodes.job.recoveries() == []
        late = nodes.start(0 if "TASKD_SPARE" not in told else NODES, **told)
        assert nodes.recovered(*nodes.agents[1:], late) == "recover"
        assert nodes.job.digests() == reference(nproc=NODES, STEPS=STEPS)


@pytest.mark.parametrize(
    ("backend", "node_rank", "told"),
    [
        ("static", 0, {"TASKD_MANAGER_ADDR": "127.0.0.1,127.0.0.2,127.0.0.3"}),
        ("c10d", 0, {"SLURM_JOB_NODELIST": "127.0.0.[1-3]"}),
        ("c10d", NODES, {"TASKD_MANAGER_ADDR": "127.0.0.1,127.0.0.2,127.0.0.3"}),
    ],
    ids=["same index", "same host", "another host"],
)
def test_a_torchrun_that_is_started_before_the_election_waits_for_its_end(
    tmp_path: pathlib.Path,
    reference: Reference,  # noqa: F811
    backend: str,
    node_rank: int,
    told: dict[str, str],
) -> None:
    """It is no spare. Nobody listens anywhere, and it would open a rendezvous of its own."""
    with training(tmp_path, backend) as nodes:
        others = nodes.agents[1:]
        for agent in others:
            os.kill(agent.process.pid, signal.SIGSTOP)  # they do not elect before it is there
        nodes.kill_the_first()
        late = nodes.start(node_rank, **told)
        late.wait_text("on to the rendezvous, and the manager is looked for", LIMIT_S)
        assert not nodes.is_elected
        for agent in others:
            os.kill(agent.process.pid, signal.SIGCONT)
        assert nodes.recovered(*others, late) == "recover"
        assert nodes.job.digests() == reference(nproc=NODES, STEPS=STEPS)


@pytest.mark.parametrize("backend", ["static", "c10d"])
def test_a_torchrun_that_is_started_while_the_manager_is_away_waits_for_it(
    tmp_path: pathlib.Path,
    reference: Reference,  # noqa: F811
    backend: str,
) -> None:
    """The store of the rendezvous is there, and says that the others have met.

    They stand still meanwhile: nobody misses the node that is lost before the manager is there.
    """
    with training(tmp_path, backend, TASKD_MANAGER="off") as nodes:
        job = nodes.job
        others = [fact["pid"] for fact in job.facts("entered") if fact["rank"] != NODES - 1]
        for pid in others:
            os.kill(pid, signal.SIGSTOP)
        for process in (nodes.agents[2].process, nodes.manager.process):
            os.kill(process.pid, signal.SIGKILL)
        assert nodes.manager.wait(LIMIT_S).returncode == -signal.SIGKILL
        late = nodes.start(2)
        late.wait_text("and its manager does not answer: this torchrun waits", LIMIT_S)
        manager = job.start_manager(POD_IP=_address(0))
        manager.wait_text("node 0 of 3 registered", LIMIT_S)
        for pid in others:
            os.kill(pid, signal.SIGCONT)
        nodes.recovered(*nodes.agents[:2], late)
        assert job.digests() == reference(nproc=NODES, STEPS=STEPS)
        assert manager.wait(LIMIT_S).returncode == 0
