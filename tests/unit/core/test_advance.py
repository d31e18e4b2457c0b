"""RecoveryMachine.

Ranks that are called out within a vote, or at the end of the step that they were let finish.
"""

import pytest

from taskd.core import commands as do
from taskd.core import events as ev
from taskd.core.faults import FaultKind
from taskd.core.phase import JobPhase
from tests.unit.core.answers import kinds, only, plan

GRACE_S = 30.0


def ask(job, rank: int, version: int = 5, **more) -> list[do.Command]:
    return job.worker(ev.WorkerMayAdvance, rank, job.machine.generation, version, **more)


@pytest.fixture
def voting(manager):
    """Four ranks, each with a part of the state that another one has as well.

    Rank 3 died in or behind the vote of step 6.
    """
    job = manager().joined()
    for rank in range(4):
        assert job.worker(ev.WorkerHolds, rank, f"shard {rank % 2}") == []
    assert kinds(job.lose(3, FaultKind.KILLED, "SIGKILL", version=5)) == [
        "Interrupt",
        "ReplaceWorker",
    ]
    assert job.pause(3, None) == []
    return job


class TestVote:
    def test_whoever_is_behind_those_who_passed_steps_too(self, voting) -> None:
        assert ask(voting, 0) == ask(voting, 1) == []
        advance = only(voting.pause(2, 6), do.Advance)
        assert (advance.version, advance.ranks, advance.generation) == (6, (0, 1), 1)
        assert voting.pause(0, 6) == []
        resume = only(voting.pause(1, 6), do.Resume)
        assert (resume.version, plan(resume)) == (6, {3: 1})

    def test_if_nobody_has_passed_nobody_steps(self, voting) -> None:
        assert ask(voting, 0) == ask(voting, 1) == []
        resume = only(ask(voting, 2), do.Resume)
        assert resume.version == 5
        assert voting.pause(0, 5) == [], (
            "it leaves its function only now, and says so; it has been heard already"
        )

    def test_one_that_died_may_have_passed(self, manager) -> None:
        job = manager().joined()
        job.lose(3, FaultKind.KILLED, "SIGKILL", version=6)
        job.pause(3, None)
        ask(job, 0)
        ask(job, 1)
        assert only(ask(job, 2), do.Advance).ranks == (0, 1, 2)

    def test_a_torn_copy_of_the_same_version_is_no_reason(self, voting) -> None:
        ask(voting, 0)
        ask(voting, 1)
        assert only(voting.pause(2, 5, clean=False), do.Resume).version == 5

    def test_whose_vote_broke_before_the_interrupt_is_asked_again(self, manager) -> None:
        job = manager().joined()
        assert (
            job.raise_(
                0,
                "RuntimeError: Connection closed by peer",
                kind=FaultKind.COMMUNICATION,
                may_advance=True,
            )
            == []
        )
        job.lose(3, FaultKind.KILLED, "SIGKILL", version=5)
        job.pause(3, None)
        job.pause(1, 5)
        assert job.pause(2, 6) == [], "rank 0 has not said whether it is still in its vote"
        assert only(ask(job, 0), do.Advance).ranks == (0,)

    def test_its_report_and_the_interrupt_may_cross(self, voting) -> None:
        ask(voting, 0)
        voting.pause(2, 6)
        assert (
            voting.raise_(
                1,
                "RuntimeError: reset",
                kind=FaultKind.COMMUNICATION,
                may_advance=True,
                generation=0,
            )
            == []
        )
        assert only(ask(voting, 1), do.Advance).ranks == (0, 1)

    def test_one_that_dies_on_the_way_is_replaced(self, voting) -> None:
        ask(voting, 0)
        ask(voting, 1)
        voting.pause(2, 6)
        assert kinds(voting.lose(0, FaultKind.KILLED, "SIGKILL", version=6)) == ["ReplaceWorker"]
        voting.pause(0, None)
        assert only(voting.pause(1, 6), do.Resume).version == 6

    def test_one_that_does_not_come_back_is_replaced(self, voting) -> None:
        ask(voting, 0)
        ask(voting, 1)
        voting.pause(2, 6)
        voting.pause(0, 6)
        voting.hear_all_until(voting.now + 15)
        assert kinds(voting.tick())[:2] == ["KillWorker", "ReplaceWorker"]

    def test_before_a_dump(self, manager) -> None:
        job = manager(strategies="dump").joined()
        job.lose(3, FaultKind.KILLED, "SIGKILL", version=5)
        ask(job, 0)
        ask(job, 1)
        assert only(job.pause(2, 6), do.Advance).ranks == (0, 1)
        job.pause(0, 6)
        assert only(job.pause(1, 6), do.Dump).writers == (0, 1, 2)

    def test_a_new_manager_asks_again(self, manager) -> None:
        job = manager()
        reports = [
            ev.WorkerReport(rank, 0, "running", declared=True, entered=True, version=5)
            for rank in range(3)
        ]
        job.register(
            0,
            *reports,
            ev.WorkerReport(3, 0, "lost", declared=True, entered=True, version=5),
            generation=1,
        )
        job.worker(ev.WorkerMayAdvance, 0, 1, 5)
        job.worker(ev.WorkerMayAdvance, 1, 1, 5)
        job.lose(3, FaultKind.KILLED, "SIGKILL", version=5)
        assert job.machine.generation == 2
        job.pause(3, None)
        ask(job, 0)
        job.pause(2, 6)
        assert only(ask(job, 1), do.Advance).ranks == (0, 1)


class TestDrain:
    @pytest.fixture
    def draining(self, manager):
        job = manager(strategies="recover-in-place,dump").joined()
        assert only(job.send(ev.AgentDraining, 0, "SIGTERM", GRACE_S), do.Interrupt).finish_step
        return job

    def test_all_stop_behind_the_step_that_the_first_has_begun(self, draining) -> None:
        for rank, version in enumerate([5, 6, 5]):
            assert ask(draining, rank, version) == []
        advance = only(ask(draining, 3), do.Advance)
        assert (advance.version, advance.ranks) == (7, (0, 1, 2, 3))
        assert draining.pause(0, 7) == draining.pause(1, 7) == draining.pause(2, 7) == []
        assert only(draining.pause(3, 7), do.Dump).version == 7

    def test_a_step_that_takes_too_long_is_given_up_in_good_time(self, draining) -> None:
        began = draining.now
        for rank in range(4):
            ask(draining, rank)
        draining.pause(0, 6)
        draining.hear_all_until(began + GRACE_S / 2 - 1)
        assert draining.machine.next_deadline() == began + GRACE_S / 2
        interrupt = only(draining.tick(), do.Interrupt)
        assert (interrupt.finish_step, interrupt.generation) == (False, 2)
        assert draining.pause(1, 5) == draining.pause(2, 5) == []
        assert only(draining.pause(3, 5), do.Dump).version == 6, "of the one that had done it"

    def test_a_death_ends_the_step_for_all(self, draining) -> None:
        ask(draining, 0)
        ask(draining, 1)
        interrupt = only(draining.lose(3, FaultKind.KILLED, "SIGKILL"), do.Interrupt)
        assert (interrupt.finish_step, interrupt.generation) == (False, 2)
        assert draining.pause(0, 5) == draining.pause(1, 5) == [], (
            "they were asked to finish, so they are not out yet"
        )
        assert only(draining.pause(2, 5), do.Dump).writers == (0, 1, 2)

    def test_one_whose_step_fails_is_not_sent_on(self, draining) -> None:
        for rank in range(3):
            ask(draining, rank)
        assert draining.pause(0, 5) == []
        advance = only(ask(draining, 3), do.Advance)
        assert advance.ranks == (1, 2, 3)

    def test_a_new_manager_does_not_take_them_for_stopped(self, manager) -> None:
        job = manager(nodes=2, per_node=1, strategies="recover-in-place,dump")
        job.register(
            0,
            ev.WorkerReport(0, 0, "running", declared=True, entered=True, version=5),
            generation=1,
        )
        job.worker(ev.WorkerMayAdvance, 0, 1, 5)
        commands = job.register(
            1,
            ev.WorkerReport(1, 0, "running", declared=True, entered=True, version=5),
            generation=1,
        )
        assert kinds(commands) == ["Interrupt"]
        assert job.machine.phase is JobPhase.PAUSING
        job.pause(1, 5)
        assert job.machine.phase is JobPhase.PAUSING, "rank 0 was finishing its step"
        assert only(job.pause(0, 5), do.Resume).version == 5
