"""A launcher that keeps its own processes, as far as an agent by callbacks uses it."""

from __future__ import annotations

import dataclasses
from enum import Enum
from typing import TYPE_CHECKING, Any

from taskd import api
from taskd.api import taskd_agent_api as agent_module

if TYPE_CHECKING:
    from collections.abc import Callable


class State(str, Enum):
    """As torch's WorkerState."""

    HEALTHY = "HEALTHY"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"


@dataclasses.dataclass
class Failure:
    exitcode: int


@dataclasses.dataclass
class RunResult:
    """As torch's."""

    state: State
    failures: dict[int, Failure] = dataclasses.field(default_factory=dict)

    def is_failed(self) -> bool:
        return self.state is State.FAILED


class Thing:
    """Anything with these attributes."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__ |= attributes


class Launcher:
    """A SimpleElasticAgent as far as it is used.

    `lives`: what the monitor says in each life of the group, from when on `may_begin` says so.
    """

    def __init__(
        self,
        *lives: list[RunResult],
        max_restarts: int = 5,
        may_begin: Callable[[], bool] = lambda: True,
    ) -> None:
        self._may_begin = may_begin
        workers = [Thing(global_rank=rank, world_size=2, id=100 + rank) for rank in range(2)]
        self._worker_group = Thing(
            spec=Thing(max_restarts=max_restarts, monitor_interval=0.01),
            workers=workers,
            group_world_size=1,
        )
        self._remaining_restarts = max_restarts
        self.lives = list(lives)
        self.calls: list[str] = []

    def _initialize_workers(self, group) -> None:
        self.calls.append("start")
        self.present = list(self.lives.pop(0))

    def _stop_workers(self, group) -> None:
        self.calls.append("stop")

    def _restart_workers(self, group) -> None:
        self.calls.append("restart")
        self.present = list(self.lives.pop(0))

    def _monitor_workers(self, group) -> RunResult:
        if not self._may_begin():
            return HEALTHY
        return self.present.pop(0) if len(self.present) > 1 else self.present[0]

    def _exit_barrier(self) -> None:
        self.calls.append("barrier")


def is_connected() -> bool:
    """Whether its manager has accepted the agent: before, it waits for none, or two seconds."""
    link = agent_module._held.agent._manager
    return link is not None and link.session.is_registered


HEALTHY, SUCCEEDED = RunResult(State.HEALTHY), RunResult(State.SUCCEEDED)


def failed(code: int = 3) -> RunResult:
    return RunResult(State.FAILED, {1: Failure(code)})


def init(launcher: Any, port: str = "1") -> bool:
    return api.init_taskd_agent(
        {"Framework": "PyTorch", "ServerRank": "0", "UpstreamPort": port}, launcher
    )
