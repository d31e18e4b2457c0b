"""RecoveryMachine: events in, commands out, for each kind of fault."""

from dataclasses import replace

import pytest

from taskd.core import commands as do
from taskd.core import events as ev
from taskd.core.faults import FaultKind
from taskd.core.phase import JobPhase
from tests.unit.core.answers import acts, kinds, only, plan


class TestOneDeath:
    def test_the_story_of_a_kill(self, manager) -> None:
        job = manager().joined()
        interrupt, replacement = job.lose(2, age=0.002)
        assert interrupt == do.Interrupt("e6", 1, "rank 2 ended at step 5", reach=5)
        assert replacement == do.ReplaceWorker("e6", 1, 0, 2, 1, restarts_used=1)
        assert job.pause(0) == job.pause(1) == job.pause(3) == []
        assert job.worker(ev.WorkerStarted, 2, 4711) == job.worker(ev.WorkerDeclared, 2) == []
        (resume,) = job.pause(2, None)
        assert isinstance(resume, do.Resume)
        assert (resume.generation, resume.version, resume.restarts_used, resume.cause) == (
            1,
            5,
            1,
            "e6",
        )
        assert plan(resume) == {2: 0}
        assert job.recover(0) == job.recover(1) == job.recover(3) == []
        record = only(job.recover(2, took=0.2), do.RecordRecovery).record
        assert job.machine.phase is JobPhase.RUNNING
        assert (record.generation, record.strategy, record.version, record.steps_redone) == (
            1,
            "recover-in-place",
            5,
            0,
        )
        assert record.sources == ((0, "kept"), (1, "kept"), (2, "rank 0"), (3, "kept"))
        assert (record.restarts_used, record.max_restarts, record.followers) == (1, 100, 0)
        assert record.detect_s == pytest.approx(0.002)
        assert record.decide_s == 0
        assert record.quiesce_s == pytest.approx(0.03)
        assert record.respawn_s == pytest.approx(0.06)
        assert (record.groups_s, record.state_s, record.first_step_s) == (0.2, 0.1, 0.05)
        assert record.total_s == pytest.approx(0.002 + 0.10)

    def test_the_record_tells_how_it_died_when_that_came_to_be_known(
        self, manager, make_fault
    ) -> None:
        job = manager().joined()
        job.lose(2)
        assert (
            job.worker(
                ev.WorkerExitKnown, 2, make_fault(FaultKind.KILLED, 2, 0, "SIGKILL"), incarnation=0
            )
            == []
        )
        job.pause_all()
        record = only(job.recover_all(), do.RecordRecovery).record
        assert [(fault.kind, fault.detail) for fault in record.faults] == [
            (FaultKind.KILLED, "SIGKILL")
        ]

    def test_what_an_earlier_life_says_is_ignored_and_recorded(self, manager) -> None:
        job = manager().joined()
        job.lose(2)
        assert job.pause(2, 5, incarnation=0) == []
        assert job.worker(ev.WorkerLost, 2, None, 0.0, incarnation=0) == []
        assert any(
            "incarnation 0 of rank 2 is over" in line for line in job.machine.story.of_rank(2)
        )

    def test_an_unknown_rank_is_ignored(self, manager) -> None:
        assert manager().joined().send(ev.WorkerFinished, 77, 0) == []

    def test_a_step_that_only_the_dead_had_committed_counts_as_redone(self, manager) -> None:
        job = manager().joined()
        job.lose(2, version=6)
        assert only(job.pause_all(5), do.Resume).version == 5
        assert only(job.recover_all(), do.RecordRecovery).record.steps_redone == 1

    def test_a_step_that_is_done_again_counts_once(self, manager) -> None:
        job = manager().joined()
        job.lose(2, version=6)
        job.pause_all(5)
        assert "on ranks 0, 1, 3; steps redone: 1" in job.machine.story.last()
        assert only(job.recover_all(), do.RecordRecovery).record.steps_redone == 1
        (interrupt, _) = job.lose(1, version=6)
        assert interrupt.reach == 6
        job.pause_all(6)
        assert only(job.recover_all(7), do.RecordRecovery).record.steps_redone == 0

    def test_what_was_taken_back_is_not_reached_for_any_more(self, manager) -> None:
        job = manager().joined()
        job.lose(2, version=6)
        job.pause_all(5)
        commands = job.lose(1, version=5)  # before a new step
        assert only(commands, do.Interrupt).reach == 5
        assert only(commands, do.RecordRecovery).record.steps_redone == 1
        job.pause_all(5)
        assert only(job.recover_all(), do.RecordRecovery).record.steps_redone == 0

    def test_a_rank_that_is_one_step_ahead_wins(self, manager) -> None:
        job = manager().joined()
        job.lose(2, version=5)
        job.pause(0, 5), job.pause(1, 6), job.pause(3, 5)
        resume = only(job.pause(2, None), do.Resume)
        assert (resume.version, plan(resume)) == (6, {0: 1, 2: 1, 3: 1})

    def test_missing_extras_are_told_in_the_story(self, manager) -> None:
        job = manager().joined()
        job.lose(2, box=(4,))
        job.pause_all()
        assert any("held no extras of version 5" in line for line in job.machine.story.of_rank(2))

    def test_one_that_came_to_the_decorator_before_all_others(self, manager) -> None:
        job = manager().joined(declared=False)
        job.worker(ev.WorkerDeclared, 1, True)
        assert acts(job.lose(1, version=None)) == ["Interrupt", "ReplaceWorker"]
        assert only(job.pause_all(None), do.Resume).version is None

    def test_a_world_of_one_is_restarted(self, manager) -> None:
        job = manager(per_node=1).joined()
        (restart,) = job.lose(0)
        assert isinstance(restart, do.RestartGroup)
        assert restart.reason == "every process is gone, and node memory has no snapshot"


class TestSeveralDeaths:
    def test_a_second_one_while_pausing_joins_the_same_generation(self, manager) -> None:
        job = manager().joined()
        job.lose(2)
        (replacement,) = job.lose(0)
        assert replacement == do.ReplaceWorker("e6", 1, 0, 0, 1, restarts_used=2)
        assert plan(only(job.pause_all(), do.Resume)) == {0: 1, 2: 3}
        record = only(job.recover_all(), do.RecordRecovery).record
        assert [fault.rank for fault in record.faults] == [2, 0]

    def test_one_after_resume_is_a_recovery_of_its_own_and_the_first_was_not_completed(
        self, manager
    ) -> None:
        job = manager().joined()
        job.lose(2)
        job.pause_all()
        job.recover(0)
        began = job.now
        interrupt, replacement, said = job.lose(3, age=0.0)
        assert (interrupt.generation, interrupt.cause, replacement.rank) == (2, f"e{job.count}", 3)
        assert (said.record.generation, [fault.rank for fault in said.record.faults]) == (1, [2])
        assert said.record.not_completed == (
            "before every rank had made a new step, rank 3 ended at step 5"
        )
        assert job.recover(1, generation=1) == []
        job.pause(0, 6), job.pause(1, 5), job.pause(2, 5)
        assert only(job.pause(3, None), do.Resume).version == 6
        record = only(job.recover_all(7), do.RecordRecovery).record
        assert (
            record.generation,
            [fault.rank for fault in record.faults],
            record.restarts_used,
        ) == (2, [3], 2)
        assert record.not_completed == ""
        assert record.total_s > job.now - began, "it counts from the first death"

    def test_a_commit_in_the_generation_before_is_no_recovery_in_this_one(self, manager) -> None:
        job = manager().joined()
        job.lose(2)
        job.pause_all()
        job.lose(3)
        assert only(job.pause_all(), do.Resume).generation == 2
        assert job.recover(1, generation=1) == []
        for rank in (0, 2, 3):
            assert job.recover(rank) == [], "rank 1 has not committed in this generation"
        assert kinds(job.recover(1)) == ["RecordRecovery"]

    def test_the_replacement_dies_at_once(self, manager) -> None:
        job = manager().joined()
        job.lose(2, box=(5,))
        assert job.lose(2, version=None)[0].incarnation == 2
        assert job.lose(2, version=None)[0].incarnation == 3
        resume = only(job.pause_all(), do.Resume)
        assert resume.restarts_used == 3
        assert not any("no extras" in line for line in job.machine.story.of_rank(2))

    def test_all_at_once_means_a_restart_with_the_reason(self, manager) -> None:
        job = manager(per_node=2).joined()
        job.lose(0)
        assert only(job.lose(1), do.RestartGroup).reason == (
            "every process is gone, and node memory has no snapshot"
        )

    def test_nobody_left_who_holds_the_state(self, manager) -> None:
        job = manager(per_node=2).joined()
        job.lose(0)
        job.worker(ev.WorkerDeclared, 0)
        job.lose(1)
        job.worker(ev.WorkerDeclared, 1)
        restart = only(job.pause_all(), do.RestartGroup)
        assert "step 5 was committed" in restart.reason
        assert restart.incarnations == ((0, 2), (1, 2))
        job.worker(ev.WorkerStarted, 0, 1)
        assert job.worker(ev.WorkerStarted, 1, 2) == []
        record = only(job.recover_all(1), do.RecordRecovery).record
        # from where the ranks went on is what they say with their first step: version 1
        assert (record.strategy, record.steps_redone, record.version) == ("restart", 4, 1)

    def test_all_copies_torn(self, manager) -> None:
        job = manager(per_node=2).joined()
        job.lose(0)
        job.pause(0, None)
        assert (
            "rank 1 holds an inconsistent copy (mostly: between"
            in only(job.pause(1, 5, clean=False), do.RestartGroup).reason
        )

    def test_nobody_goes_on_without_a_rank_that_ended_well(self, manager) -> None:
        """All ranks meet again, and it will not come."""
        job = manager(per_node=3).joined()
        job.lose(2)
        job.pause(2, None)
        job.pause(0)
        give_up = only(job.worker(ev.WorkerFinished, 1), do.GiveUp)
        assert give_up.reason == "rank 2 ended at step 5, and rank 1 has already ended well"


class TestExceptions:
    def test_the_raiser_counts_as_paused_and_nobody_is_replaced(self, manager) -> None:
        job = manager().joined()
        assert kinds(job.raise_(1)) == ["Interrupt"]
        assert job.pause(1) == []
        job.pause(0), job.pause(2)
        assert only(job.pause(3), do.Resume).version == 5
        assert job.pause(1) == []
        record = only(job.recover_all(), do.RecordRecovery).record
        assert (record.strategy, record.restarts_used) == ("retry", 1)

    def test_a_world_of_one_goes_on_at_once(self, manager) -> None:
        assert kinds(manager(per_node=1).joined().raise_(0)) == ["Interrupt", "Resume"]

    def test_a_torn_raiser_receives(self, manager) -> None:
        job = manager(per_node=2).joined()
        job.raise_(1, clean=False)
        assert plan(only(job.pause(0), do.Resume)) == {1: 0}

    def test_the_same_one_at_the_same_step_ends_the_job_after_a_grace(self, manager) -> None:
        job = manager().joined()
        job.raise_(1)
        job.pause_all()
        assert job.raise_(1) == []
        assert acts(job.tick()) == ["Interrupt"], (
            "the second time its process is replaced: test_broken.py"
        )
        job.pause_all(), job.pause_all()
        assert job.raise_(1) == []
        give_up = only(job.tick(), do.GiveUp)
        assert give_up.reason == (
            "the same exception came back: rank 1 raised ValueError: x at step 5"
        )
        assert give_up.culprit == 1
        assert give_up.fault.traceback == "Traceback"

    def test_the_same_one_at_another_step_is_recovered(self, manager) -> None:
        job = manager().joined()
        for version in range(5, 9):
            assert kinds(job.raise_(1, version=version)) == ["Interrupt"]
            job.pause_all(version)
            job.recover_all(version + 1)

    def test_from_all_ranks_at_once_it_is_one_fault(self, manager) -> None:
        job = manager().joined()
        job.raise_(0)
        for rank in (1, 2):
            assert job.raise_(rank, generation=0) == []
        assert only(job.raise_(3, generation=0), do.Resume).restarts_used == 1
        assert only(job.recover_all(), do.RecordRecovery).record.followers == 3

    def test_one_that_follows_a_death_is_its_consequence(self, manager) -> None:
        job = manager().joined()
        for attempt in range(3):
            assert kinds(job.raise_(1)) == ["Interrupt"]
            job.lose(2, age=0.5)
            job.pause_all()
            record = only(job.recover_all(5), do.RecordRecovery).record
            assert [fault.rank for fault in record.faults] == [2]
            assert record.followers == 1
            assert record.restarts_used == attempt + 1

    def test_one_of_an_earlier_generation_is_ignored(self, manager) -> None:
        job = manager().joined()
        for _ in range(2):
            job.lose(2)
            job.pause_all()
        assert job.raise_(1, generation=1) == []
        assert job.raise_(1, generation=0) == []
        job.lose(0)
        assert job.raise_(1, generation=1) == []
        assert job.machine.phase is JobPhase.PAUSING

    def test_a_second_one_from_a_waiting_rank_is_ignored(self, manager) -> None:
        job = manager().joined()
        job.raise_(1, kind=FaultKind.COMMUNICATION)
        assert job.raise_(1) == []


class TestBrokenCommunication:
    def test_it_waits_for_the_cause(self, manager) -> None:
        job = manager().joined()
        assert job.raise_(1, "reset", kind=FaultKind.COMMUNICATION) == []
        assert job.raise_(3, "reset", kind=FaultKind.COMMUNICATION) == []
        assert job.machine.phase is JobPhase.SUSPECTING
        interrupt, _ = job.lose(2)
        assert interrupt.reason == "rank 2 ended at step 5"
        job.pause(0)
        assert kinds(job.pause(2, None)) == ["Resume"]
        record = only(job.recover_all(), do.RecordRecovery).record
        assert (record.followers, len(record.faults)) == (2, 1)

    def test_without_a_cause_the_earliest_is_the_fault(self, manager) -> None:
        job = manager().joined()
        job.raise_(1, "reset", kind=FaultKind.COMMUNICATION)
        job.raise_(3, "reset", kind=FaultKind.COMMUNICATION, age=0.5)
        assert job.machine.next_deadline() == pytest.approx(job.now - 0.01 + 1.0)
        (interrupt,) = job.tick()
        assert interrupt.reason == "rank 3 lost its communication: reset at step 5"
        job.pause_all()
        record = only(job.recover_all(), do.RecordRecovery).record
        assert (record.strategy, record.followers) == ("retry", 1)
        assert record.decide_s == pytest.approx(0.99)

    def test_an_exception_meanwhile_is_the_cause(self, manager) -> None:
        job = manager().joined()
        job.raise_(1, "reset", kind=FaultKind.COMMUNICATION)
        assert job.raise_(3)[0].reason == "rank 3 raised ValueError: x at step 5"

    def test_an_exception_that_came_back_says_more(self, manager) -> None:
        job = manager().joined()
        for _ in range(2):
            job.raise_(1)
            if job.machine.phase is JobPhase.SUSPECTING:
                job.tick()
            job.pause_all(), job.pause_all()
        job.raise_(3, "reset", kind=FaultKind.COMMUNICATION, age=0.5)
        job.raise_(1)
        assert only(job.tick(), do.GiveUp).culprit == 1

    def test_three_times_at_one_step_end_the_job(self, manager) -> None:
        job = manager().joined()
        for rank in (1, 2):
            job.raise_(rank, "reset", kind=FaultKind.COMMUNICATION)
            assert acts(job.tick()) == ["Interrupt"]
            job.pause_all()
        job.raise_(3, "reset", kind=FaultKind.COMMUNICATION)
        assert only(job.tick(), do.GiveUp).reason.startswith(
            "the same failure came 3 times: rank 3 lost"
        )


class TestRepeatedFailures:
    def test_what_taskd_refuses_is_not_tried_again(self, manager, make_fault) -> None:
        job = manager(per_node=2).joined()
        refused = replace(
            make_fault(FaultKind.RAISED, 1, 0, "StateError: optimizer is a Wrapper", version=None),
            is_final=True,
        )
        commands = job.worker(ev.WorkerRaised, 1, 0, refused, True, 0.0)
        (give_up,) = [command for command in commands if isinstance(command, do.GiveUp)]
        assert give_up.reason == (
            "rank 1 raised StateError: optimizer is a Wrapper. Trying again would change nothing"
        )
        assert job.machine.restarts_used == 0

    def test_the_same_exit_three_times(self, manager) -> None:
        job = manager().joined()
        for _ in range(2):
            job.lose(2, FaultKind.EXITED, "exit 3")
            job.pause_all()
        give_up = only(job.lose(2, FaultKind.EXITED, "exit 3"), do.GiveUp)
        assert give_up.reason == "the same failure came 3 times: rank 2 ended with exit 3 at step 5"

    def test_known_only_after_the_replacement_was_ordered(self, manager, make_fault) -> None:
        job = manager().joined()
        for attempt in range(3):
            life = job.incarnation(2)
            assert "ReplaceWorker" in kinds(job.lose(2))
            how = make_fault(FaultKind.CRASHED, 2, life, "SIGSEGV", version=5)
            commands = job.worker(ev.WorkerExitKnown, 2, how, incarnation=life)
            assert acts(commands) == (["GiveUp"] if attempt == 2 else [])
            if attempt < 2:
                job.pause_all()

    def test_known_only_after_the_recovery_it_is_no_reason_to_stop(
        self, manager, make_fault
    ) -> None:
        job = manager().joined()
        for _ in range(3):
            life = job.incarnation(2)
            job.lose(2)
            job.pause_all()
            job.recover_all()
            how = make_fault(FaultKind.CRASHED, 2, life, "SIGSEGV", version=5)
            assert job.worker(ev.WorkerExitKnown, 2, how, incarnation=life) == []

    def test_being_killed_is_no_repeated_failure(self, manager) -> None:
        job = manager().joined()
        for _ in range(20):
            job.lose(2, FaultKind.KILLED, "SIGKILL")
            assert kinds(job.pause_all()) == ["Resume"]

    def test_a_replacement_that_cannot_be_started(self, manager) -> None:
        job = manager().joined()
        job.lose(2)
        for _ in range(2):
            assert acts(job.lose(2, FaultKind.START_FAILED, "no memory", version=None)) == [
                "ReplaceWorker"
            ]
        give_up = only(job.lose(2, FaultKind.START_FAILED, "no memory", version=None), do.GiveUp)
        assert "rank 2 could not be started: no memory" in give_up.reason

    def test_the_budget(self, manager) -> None:
        job = manager(max_restarts=2).joined()
        for _ in range(2):
            job.lose(2)
            job.pause_all()
        give_up = only(job.lose(1), do.GiveUp)
        assert give_up.reason == (
            "restart budget spent: 2 of 2 restarts used (--max_restarts) when rank 1 ended at "
            "step 5"
        )
        assert (give_up.culprit, job.machine.restarts_used) == (1, 2)

    def test_an_exit_that_nobody_asked_about_is_ignored(self, manager, make_fault) -> None:
        job = manager().joined()
        assert job.worker(ev.WorkerExitKnown, 2, make_fault(FaultKind.KILLED, 2)) == []


def manager_that_slept(manager):
    """It wakes when the lease of node 1 and the pause of its rank are nearly over."""
    job = manager(nodes=2, per_node=1).joined()
    job.lose(0)
    job.worker(ev.WorkerStarted, 0, 4711)
    job.pause(0, None)
    job.send(ev.AgentHeard, 0, at=129.5)
    assert job.send(ev.Tick, at=129.6) == []
    assert job.send(ev.Tick, at=130.5) == [], "the pause is over, and the rank is not killed"
    return job


class TestUnresponsive:
    def test_one_of_a_node_that_may_be_lost_is_lost_with_it(self, manager) -> None:
        job = manager_that_slept(manager)
        give_up = only(job.send(ev.Tick, at=131.6), do.GiveUp)
        assert give_up.reason == "the agent of node 1 has been silent for 32 s"

    def test_or_judged_when_that_node_is_heard(self, manager) -> None:
        job = manager_that_slept(manager)
        job.send(ev.AgentHeard, 1, at=131.0)
        kill = only(job.send(ev.Tick, at=131.6), do.KillWorker)
        assert (kill.rank, kill.reason) == (1, "did not leave its step")

    def test_asking_for_the_place_of_its_node_again_and_again_does_not_keep_it(
        self, manager
    ) -> None:
        """A job waited for ever: each time its judgement was put off until the node was heard."""
        job = manager(nodes=2, per_node=1).joined()
        job.lose(0)
        job.worker(ev.WorkerStarted, 0, 4711)
        job.pause(0, None)
        said = []
        while not said and job.now < 200:
            job.hear_all_until(job.now + 1)
            asks = job.register(1, ev.WorkerReport(1, 0, "lost"), agent="another")
            said = asks + job.send(ev.Tick)
        assert only(said, do.KillWorker).reason == "did not leave its step"
        assert job.now < 135

    def test_a_rank_that_does_not_come_is_killed_and_replaced(self, manager) -> None:
        job = manager().joined()
        job.lose(2)
        job.pause(0), job.pause(3)
        job.hear_all_until(120.0)
        kill, replacement = job.tick(at=130.2)
        assert kill == do.KillWorker("e6", 1, 0, 1, 0, "did not leave its step")
        assert (replacement.rank, replacement.incarnation, replacement.generation) == (1, 1, 1)
        assert job.pause(2, None) == []
        assert kinds(job.pause(1, None)) == ["Resume"]

    def test_a_new_process_has_more_time(self, manager) -> None:
        job = manager(per_node=2).joined()
        job.lose(1)
        job.pause(0)
        for moment in range(110, 700, 10):
            job.hear_all_until(moment)
        kill, replacement = job.tick(at=job.now + 20)
        assert (kill.rank, kill.incarnation, kill.reason) == (1, 1, "did not start")
        assert replacement.incarnation == 2
