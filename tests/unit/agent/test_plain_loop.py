"""Torch's own loop over our workers, when there is no manager for them any more."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
from torch.distributed.elastic.agent.server.api import WorkerSpec, WorkerState
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs

from taskd.agent.spawning.protocol import Exited, Started, StartFailed
from taskd.agent.workers.memory_folder import MemoryFolder
from taskd.clock import MonotonicClock
from taskd.torchrun.context import TaskdContext
from taskd.torchrun.elastic_agent import TaskdElasticAgent

if TYPE_CHECKING:
    from collections.abc import Iterator

    from taskd.agent.spawning.protocol import Reply, SpawnRequest

NOBODY = 1 << 22  # above the highest process id


class Slow:
    """A spawner that answers when it is told to."""

    fds: tuple[int, ...] = ()

    def __init__(self) -> None:
        self.asked: list[SpawnRequest] = []
        self.replies: list[Reply] = []

    def spawn(self, request: SpawnRequest) -> None:
        self.asked.append(request)

    def read(self) -> list[Reply]:
        replies, self.replies = self.replies, []
        return replies


@pytest.fixture
def spawner() -> Slow:
    return Slow()


@pytest.fixture
def agent(spawner: Slow) -> Iterator[TaskdElasticAgent]:
    """Of two ranks, whose first lives have begun. It has no restart left."""
    spec = WorkerSpec(
        role="default",
        local_world_size=2,
        rdzv_handler=SimpleNamespace(),  # type: ignore[arg-type]
        entrypoint=sys.executable,
        max_restarts=0,
        monitor_interval=0.01,
    )
    made = TaskdElasticAgent(spec, DefaultLogsSpecs())
    context = TaskdContext(
        spawner=spawner,  # type: ignore[arg-type]
        bootstraps={},
        life_fd=made.life_fd,
        memory=MemoryFolder("", "job", 0, "agent", MonotonicClock(), 60.0),
        name="default",
        entrypoint=sys.executable,
        args={0: ("script.py",), 1: ("script.py",)},
        envs={0: {}, 1: {}},
        logs_specs=DefaultLogsSpecs(),
    )
    for files in ("stdouts", "stderrs", "error_files"):
        setattr(context, files, dict.fromkeys(range(2), os.devnull))
    for rank, worker in enumerate(made.worker_group.workers):
        worker.global_rank, worker.id = rank, NOBODY + rank
        context.respawn(rank, {"incarnation": 0}, inherits=False)
        spawner.replies.append(Started(spawner.asked[-1].token, worker.id, -1, None))
    context.read()
    made._pcontext, made._workers_run, made._is_plain = context, True, True
    made.worker_group.state = WorkerState.HEALTHY
    yield made
    context.close(timeout=0)
    made.close()


def replace_second(agent: TaskdElasticAgent, spawner: Slow) -> int:
    """Its first life ends, and another is asked for. Returns the token of that."""
    assert agent.context is not None
    spawner.replies.append(Exited(spawner.asked[-1].token, NOBODY + 1, -9))
    agent.context.read()
    agent.context.respawn(1, {"incarnation": 1}, inherits=True)
    return spawner.asked[-1].token


def end(agent: TaskdElasticAgent, spawner: Slow) -> None:
    """All workers end well."""
    for request in (spawner.asked[0], spawner.asked[-1]):
        spawner.replies.append(Exited(request.token, NOBODY, 0))
    assert agent._monitor_workers(agent.worker_group).state is WorkerState.SUCCEEDED


def test_a_replacement_that_has_no_process_yet_is_waited_for(
    agent: TaskdElasticAgent, spawner: Slow
) -> None:
    token = replace_second(agent, spawner)
    assert agent._monitor_workers(agent.worker_group).state is WorkerState.HEALTHY
    spawner.replies.append(Started(token, NOBODY + 2, -1, None))
    assert agent._monitor_workers(agent.worker_group).state is WorkerState.HEALTHY
    assert agent._monitor_workers(agent.worker_group).state is WorkerState.HEALTHY
    assert [worker.id for worker in agent.worker_group.workers] == [NOBODY, NOBODY + 2]
    end(agent, spawner)


def test_one_that_could_not_be_started_is_a_failure(
    agent: TaskdElasticAgent, spawner: Slow
) -> None:
    token = replace_second(agent, spawner)
    spawner.replies.append(StartFailed(token, "Resource temporarily unavailable"))
    agent.incarnations[1] = 1
    spawner.replies.append(Exited(spawner.asked[0].token, NOBODY, -15))  # it is told to end
    result = agent.run_plainly("default")
    assert result.state is WorkerState.FAILED
    assert result.failures[1].pid == 0
