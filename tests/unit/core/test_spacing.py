"""Starts that come to nothing are spaced out: by the parts, and by the node as a whole."""

from typing import Any

import pytest

from taskd.core import commands as do
from taskd.core import events as ev
from taskd.core.exits import SIGKILL, SIGTERM
from taskd.core.faults import Fault, FaultKind
from taskd.core.node.spacing import Spacing
from taskd.core.policy.start_delay import FIRST_S, LONGEST_S, SHORT_LIFE_S
from tests.unit.core.answers import acts, only


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
    for incarnation in range(5):
        spacing.ended(0, incarnation, FaultKind.EXITED, 100.0, 99.9, has_entered=False)
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
    for incarnation in range(3):
        spacing.ended(0, incarnation, FaultKind.START_FAILED, 100.0, None, has_entered=False)
    spacing.ended(
        0,
        3,
        life.get("kind", FaultKind.EXITED),
        100.0,
        life.get("started_at", 99.0),
        has_entered=life.get("has_entered", False),
    )
    assert waits(spacing, 100.0) == 0
    spacing.ended(0, 4, FaultKind.EXITED, 100.0, 99.9, has_entered=False)
    assert waits(spacing, 100.0) == 0


def test_a_death_that_is_reaped_after_the_starts_that_followed_it_ends_no_series() -> None:
    """A large process needs seconds to be gone; its successors start when the alarm comes."""
    spacing = Spacing()
    for incarnation in (1, 2):
        spacing.ended(0, incarnation, FaultKind.START_FAILED, 100.0, None, has_entered=False)
    assert spacing.must_wait(0, 100.0, at_once=True)
    spacing.ended(0, 0, FaultKind.KILLED, 101.0, 90.0, has_entered=True)
    assert spacing.due(101.0) == []
    assert spacing.next_at() == 100.0 + FIRST_S


def test_one_that_waits_is_due_at_once_when_its_series_ends() -> None:
    spacing = Spacing()
    for incarnation in (1, 2):
        spacing.ended(0, incarnation, FaultKind.START_FAILED, 100.0, None, has_entered=False)
    assert spacing.must_wait(0, 100.0, at_once=True)
    spacing.ended(0, 3, FaultKind.KILLED, 101.0, 100.5, has_entered=True)
    assert spacing.next_at() == 101.0
    assert spacing.due(101.0) == [(0, True)]


def test_a_group_that_waits_waits_as_a_whole() -> None:
    spacing = Spacing()
    spacing.hold_all(104.0)
    assert [spacing.must_wait(rank, 100.0, at_once=False) for rank in (0, 1)] == [True, True]
    spacing.ended(0, 3, FaultKind.KILLED, 101.0, 90.0, has_entered=True)  # by the restart
    assert spacing.due(101.0) == []
    assert spacing.next_at() == 104.0
    assert spacing.due(104.0) == [(0, False), (1, False)]


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

    def test_a_restart_of_all_that_waits_starts_nobody_before(self, node) -> None:
        agent = node()
        order = agent.command(do.RestartGroup, 3, 2, "all", ((0, 3), (1, 3)), "", FIRST_S)
        assert "SpawnWorker" not in kinds(order)
        for rank in (0, 1):
            assert "SpawnWorker" not in kinds(agent.exit(rank, -15, incarnation=0))
        deadline = agent.machine.next_deadline()
        assert deadline - agent.now == pytest.approx(FIRST_S, abs=0.1)
        spawned = [one.rank for one in agent.tick() if isinstance(one, do.SpawnWorker)]
        assert spawned == [0, 1]


class TestTheManager:
    """Restarts of the whole group: a script without `taskd.recoverable`."""

    def after_a_while(self, manager) -> Any:
        job = manager().joined(declared=False)
        job.hear_all_until(job.now + 5)
        return job

    def fail(
        self,
        job,
        rank: int,
        kind: FaultKind = FaultKind.EXITED,
        detail: str = "exit 2",
        **more: Any,
    ) -> float:
        """How long the restart that follows waits."""
        return only(job.lose(rank, kind, detail, version=None, **more), do.RestartGroup).delay_s

    def test_another_rank_fails_first_each_time(self, manager) -> None:
        job = self.after_a_while(manager)
        assert self.fail(job, 1, FaultKind.KILLED) == 0
        assert [self.fail(job, rank) for rank in (1, 0)] == [0, FIRST_S]

    def test_how_the_newest_failed_is_not_known_yet(self, manager, make_fault) -> None:
        job = self.after_a_while(manager)
        found = []
        for rank, kind in enumerate([FaultKind.KILLED, FaultKind.EXITED, FaultKind.EXITED]):
            life = job.incarnation(rank)
            found.append(self.fail(job, rank, FaultKind.LOST))
            how = make_fault(kind, rank, life, "exit 2")
            assert acts(job.worker(ev.WorkerExitKnown, rank, how, incarnation=life)) == []
        assert found == [0, 0, FIRST_S]

    @pytest.mark.parametrize("kind", [FaultKind.KILLED, FaultKind.CRASHED])
    def test_being_killed_says_nothing_against_the_start(self, manager, kind: FaultKind) -> None:
        job = self.after_a_while(manager)
        for how in (FaultKind.EXITED, kind, FaultKind.EXITED, kind, FaultKind.EXITED):
            assert self.fail(job, 1, how) == 0

    def test_the_delay_is_no_part_of_a_life(self, manager) -> None:
        """What fails half a second after a start that had to wait has failed at once."""
        job = self.after_a_while(manager)
        found = [self.fail(job, 1, detail=f"exit {code}") for code in (1, 2, 3)]
        again_at = job.now + FIRST_S + 0.5
        found.append(self.fail(job, 0, detail="exit 4", at=again_at))
        assert found == [0, 0, FIRST_S, LONGEST_S]

    def test_what_lives_for_longer_is_far_enough_from_the_next(self, manager) -> None:
        job = self.after_a_while(manager)
        for code in range(4):
            at = job.now + SHORT_LIFE_S + 0.1
            assert self.fail(job, 1, detail=f"exit {code}", at=at) == 0

    def test_a_rank_that_had_to_wait_is_not_late(self, manager) -> None:
        job = self.after_a_while(manager)
        for detail in ("exit 1", "exit 2", "exit 3"):
            delay_s = self.fail(job, 1, detail=detail)
        assert delay_s == FIRST_S
        start_by = job.now + FIRST_S + job.timeouts.start_s
        while job.now < start_by - 6:
            job.hear_all_until(job.now + 5)
        assert job.tick(at=start_by - 0.1) == []
        assert "RestartGroup" in kinds(job.tick(at=start_by))


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
