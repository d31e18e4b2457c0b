"""Starts that come to nothing are spaced out: by the parts, and by the node as a whole."""

from typing import Any

import pytest

from taskd.core import commands as do
from taskd.core import events as ev
from taskd.core.exits import SIGKILL, SIGTERM
from taskd.core.faults import Fault, FaultKind
from taskd.core.node.spacing import FIRST_S, LONGEST_S, SHORT_LIFE_S, Spacing


def kinds(commands: list[do.Command]) -> list[str]:
    return [type(command).__name__ for command in commands]


def waits(spacing: Spacing, now: float) -> float:
    """How long rank 0 must wait."""
    if not spacing.must_wait(0, now, at_once=True):
        return 0.0
    at = spacing.next_at()
    assert at is not None
    assert spacing.due(at - 0.01) == []
    assert spacing.due(at) == [(0, True)]
    assert spacing.next_at() is None
    return at - now


def test_each_start_that_comes_to_nothing_lets_the_next_one_wait_for_longer() -> None:
    spacing, found = Spacing(), []
    for _ in range(5):
        spacing.ended(0, FaultKind.EXITED, 100.0, 99.9, has_entered=False)
        found.append(waits(spacing, 100.0))
    assert found == [0, FIRST_S, LONGEST_S, LONGEST_S, LONGEST_S]


@pytest.mark.parametrize(
    "life",
    [
        {"kind": FaultKind.KILLED},
        {"kind": FaultKind.CRASHED},
        {"has_entered": True},
        {"started_at": 100 - SHORT_LIFE_S},
    ],
    ids=str,
)
def test_a_life_that_came_to_something_or_was_killed_ends_the_series(life: dict[str, Any]) -> None:
    spacing = Spacing()
    for _ in range(3):
        spacing.ended(0, FaultKind.START_FAILED, 100.0, None, has_entered=False)
    spacing.ended(
        0,
        life.get("kind", FaultKind.EXITED),
        100.0,
        life.get("started_at", 99.0),
        has_entered=life.get("has_entered", False),
    )
    assert waits(spacing, 100.0) == 0
    spacing.ended(0, FaultKind.EXITED, 100.0, 99.9, has_entered=False)
    assert waits(spacing, 100.0) == 0


def test_one_that_waits_is_due_at_once_when_its_series_ends() -> None:
    """An earlier life of the rank was reaped late, and had been killed."""
    spacing = Spacing()
    for _ in range(2):
        spacing.ended(0, FaultKind.START_FAILED, 100.0, None, has_entered=False)
    assert spacing.must_wait(0, 100.0, at_once=True)
    spacing.ended(0, FaultKind.KILLED, 101.0, 90.0, has_entered=True)
    assert spacing.next_at() == 101.0
    assert spacing.due(101.0) == [(0, True)]


class TestTheNode:
    def failing(self, node, times: int) -> Any:
        """Rank 1 died, and as many starts after that came to nothing.

        The last one has been ordered to be replaced.
        """
        agent = node()
        agent.exit(1)
        for incarnation in range(1, times + 1):
            assert "SpawnWorker" in kinds(agent.replace(1, incarnation, incarnation))
            agent.worker(ev.WorkerStarted, 1, 1001)
            agent.exit(1, 2, "boot")
        return agent

    def test_a_start_waits_and_comes_when_it_is_due(self, node) -> None:
        agent = self.failing(node, 2)
        assert kinds(agent.replace(1, 3, 3)) == []
        deadline = agent.machine.next_deadline()
        assert deadline is not None
        assert deadline - agent.now == pytest.approx(FIRST_S, abs=0.1)
        (spawn,) = agent.tick()
        assert spawn == do.SpawnWorker("c", 3, 1, 3, gated=True, restarts_used=1)
        assert agent.machine.next_deadline() is None

    def test_a_system_that_refuses_is_asked_again_later(self, node) -> None:
        agent = node()
        agent.exit(1)
        for incarnation in (1, 2):
            agent.replace(1, incarnation, incarnation)
            (told,) = agent.worker(ev.WorkerStartFailed, 1, "[Errno 24] Too many open files")
            assert told.event.fault == Fault(
                FaultKind.START_FAILED,
                1,
                incarnation,
                "[Errno 24] Too many open files",
                signature="[Errno 24] Too many open files",
            )
        assert kinds(agent.replace(1, 3, 3)) == []
        assert kinds(agent.tick()) == ["SpawnWorker"]

    def test_a_start_that_waits_is_replaced_without_a_process_to_be_killed(self, node) -> None:
        agent = self.failing(node, 2)
        agent.replace(1, 3, 3)
        assert kinds(agent.replace(1, 4, 4)) == []
        (spawn,) = agent.tick()
        assert (spawn.incarnation, spawn.generation) == (4, 4)

    def test_a_job_that_ends_starts_nobody(self, node) -> None:
        agent = self.failing(node, 2)
        agent.replace(1, 3, 3)
        agent.command(do.GiveUp, 4, "enough", None)
        agent.exit(0, -15)
        assert agent.machine.phase.value == "done"

    def test_a_start_of_all_waits_for_the_rank_that_fails(self, node) -> None:
        agent = self.failing(node, 2)
        agent.command(do.RestartGroup, 9, 2, "all", ((0, 7), (1, 7)))
        assert [
            command.rank
            for command in agent.exit(0, -15, incarnation=0)
            if isinstance(command, do.SpawnWorker)
        ] == [0]
        assert [
            command.rank for command in agent.tick() if isinstance(command, do.SpawnWorker)
        ] == [1]


def test_one_that_starts_only_when_force_is_due_is_ended_by_force(node) -> None:
    """The forkserver was stopped: SIGTERM and SIGKILL found nobody."""
    agent = node(started=False)
    agent.worker(ev.WorkerStarted, 0, 1000)
    signals = agent.command(do.GiveUp, 1, "enough", None)
    assert [(signal.rank, signal.signal_number) for signal in signals] == [
        (0, SIGTERM),
        (1, SIGTERM),
    ]
    assert [(signal.rank, signal.signal_number) for signal in agent.tick()] == [
        (0, SIGKILL),
        (1, SIGKILL),
    ]
    (signal,) = agent.worker(ev.WorkerStarted, 1, 1001)
    assert (signal.rank, signal.signal_number) == (1, SIGKILL)
