"""RecoveryMachine: scripts that do not use `taskd.recoverable`, whose group is restarted."""

import pytest

from taskd.core import commands as do
from taskd.core import events as ev
from taskd.core.faults import FaultKind
from tests.unit.core.answers import acts, kinds, only


def test_no_new_life_has_the_number_of_one_that_an_earlier_manager_has_ordered(manager) -> None:
    """Its restart of the group reached node 1 after the registration that this manager has read."""
    job = manager(nodes=2, per_node=1)
    job.register(0, ev.WorkerReport(0, 1, "running", True, entered=True), generation=1)
    job.register(1, ev.WorkerReport(1, 0, "paused", True, 6, clean=False, entered=True))
    assert job.machine.generation == 2
    restart = only(job.pause(0, 11, clean=False), do.RestartGroup)
    assert (restart.generation, restart.incarnations) == (3, ((0, 3), (1, 3)))


class TestUndeclared:
    def test_a_failure_restarts_the_group(self, manager) -> None:
        job = manager().joined(declared=False)
        restart = only(job.lose(1, version=None), do.RestartGroup)
        assert restart == do.RestartGroup(
            "e2", 1, 1, "no live worker uses taskd.recoverable", ((0, 1), (1, 1), (2, 1), (3, 1))
        )
        for rank in job.ranks:
            assert job.worker(ev.WorkerStarted, rank, 1) == []
        record = only(job.recover_all(0), do.RecordRecovery).record
        assert (record.strategy, record.version, record.sources, record.steps_redone) == (
            "restart",
            None,
            (),
            0,
        )
        assert record.respawn_s == pytest.approx(0.04)
        assert record.total_s == pytest.approx(0.081)  # until the last rank's first step
        assert record.first_step_s > 0

    def restarted(self, manager):
        job = manager().joined(declared=False)
        job.lose(1, version=None)
        for rank in job.ranks:
            assert job.worker(ev.WorkerStarted, rank, 1) == []
        return job

    def test_first_steps_that_cannot_be_seen_are_waited_for_in_vain(self, manager) -> None:
        job = self.restarted(manager)
        assert job.recover(2, 0) == []
        for moment in range(110, 700, 10):
            job.hear_all_until(moment)
        record = only(job.tick(at=job.now + 15), do.RecordRecovery).record
        assert record.total_s == pytest.approx(0.041)  # until the last start
        assert record.first_step_s == 0.0

    def test_all_end_well_without_a_step_that_was_seen(self, manager) -> None:
        job = self.restarted(manager)
        commands = [c for rank in job.ranks for c in job.worker(ev.WorkerFinished, rank)]
        record = only(commands, do.RecordRecovery).record
        assert (record.generation, record.restarts_used, record.code) == (1, 1, 0)
        assert record.total_s == pytest.approx(0.041)

    def test_a_failure_during_the_restart_restarts_again(self, manager) -> None:
        job = manager().joined(declared=False)
        job.lose(1)
        job.worker(ev.WorkerStarted, 1, 1)
        assert only(job.lose(1), do.RestartGroup).generation == 2

    def test_three_equal_failures_in_a_row(self, manager, make_fault) -> None:
        job = manager().joined(declared=False)
        for _ in range(2):
            life = job.incarnation(1)
            job.lose(1, version=None)
            job.worker(
                ev.WorkerExitKnown,
                1,
                make_fault(FaultKind.EXITED, 1, life, "exit 1"),
                incarnation=life,
            )
            for rank in job.ranks:
                job.worker(ev.WorkerStarted, rank, 1)
        give_up = only(job.lose(2, FaultKind.EXITED, "exit 1", version=None), do.GiveUp)
        assert give_up.reason == (
            "3 equal failures in a row, each within 60 s of its start: rank 2 ended with exit 1"
        )

    def test_the_third_is_recognised_after_the_restart_was_ordered(
        self, manager, make_fault
    ) -> None:
        job = manager().joined(declared=False)
        for attempt in range(3):
            life = job.incarnation(1)
            assert acts(job.lose(1, version=None)) == ["RestartGroup"]
            how = make_fault(FaultKind.EXITED, 1, life, "exit 1")
            commands = job.worker(ev.WorkerExitKnown, 1, how, incarnation=life)
            assert acts(commands) == (["GiveUp"] if attempt == 2 else [])

    @pytest.mark.parametrize("between", ["killed", "other", "long life"])
    def test_not_in_a_row(self, manager, between) -> None:
        job = manager().joined(declared=False)
        for attempt in range(5):
            if attempt == 2:
                if between == "killed":
                    job.lose(1, FaultKind.KILLED, "SIGKILL", version=None)
                elif between == "other":
                    job.lose(1, FaultKind.CRASHED, "SIGSEGV", version=None)
                else:
                    for moment in range(110, 190, 10):
                        job.hear_all_until(moment)
            if attempt < 4:
                assert acts(job.lose(1, FaultKind.EXITED, "exit 1", version=None)) == [
                    "RestartGroup"
                ]

    def test_victims_that_are_heard_of_first_are_not_counted(self, manager, make_fault) -> None:
        job = manager().joined(declared=False)
        for _ in range(5):
            cause = job.incarnation(1)
            assert acts(job.lose(2, FaultKind.EXITED, "exit 1", version=None)) == ["RestartGroup"]
            how = make_fault(FaultKind.KILLED, 1, cause, "SIGKILL")
            assert job.worker(ev.WorkerLost, 1, how, 0.2, incarnation=cause) == []
            for rank in job.ranks:
                job.worker(ev.WorkerStarted, rank, 1)
            record = only(job.recover_all(0), do.RecordRecovery).record
            assert [fault.detail for fault in record.faults] == ["SIGKILL"]
            assert record.followers == 1

    def test_a_cause_that_is_heard_of_late_may_end_the_job(self, manager, make_fault) -> None:
        job = manager().joined(declared=False)
        for attempt in range(3):
            cause = job.incarnation(1)
            job.lose(2, FaultKind.EXITED, f"exit {attempt}", version=None)
            for rank in job.ranks:
                job.worker(ev.WorkerStarted, rank, 1)
            how = make_fault(FaultKind.EXITED, 1, cause, "exit 7")
            commands = job.worker(ev.WorkerLost, 1, how, 0.5, incarnation=cause)
            assert acts(commands) == (["GiveUp"] if attempt == 2 else [])
        assert job.worker(ev.WorkerLost, 1, how, 9.0, incarnation=2) == []

    def test_later_deaths_in_the_old_life_are_consequences(self, manager, make_fault) -> None:
        job = manager().joined(declared=False)
        job.lose(2, version=None)
        how = make_fault(FaultKind.EXITED, 1, 0, "exit 1")
        assert job.worker(ev.WorkerLost, 1, how, 0.0, incarnation=0) == []
        assert job.worker(ev.WorkerLost, 1, how, 0.0, incarnation=7) == []

    def test_it_ends_when_all_processes_have(self, manager) -> None:
        job = manager(nodes=2, per_node=1).joined(declared=False)
        job.worker(ev.WorkerFinished, 0)
        assert job.send(ev.AgentLeft, 0, "succeeded", "") == []
        job.worker(ev.WorkerFinished, 1)
        assert job.send(ev.AgentLeft, 1, "succeeded", "") == [
            do.EndJob("e6", 0, True, "every node succeeded")
        ]

    def test_a_failure_after_a_node_has_left_cannot_be_recovered(self, manager) -> None:
        job = manager(nodes=2, per_node=1).joined(declared=False)
        job.worker(ev.WorkerFinished, 0)
        job.send(ev.AgentLeft, 0, "succeeded", "")
        assert only(job.lose(1), do.GiveUp).reason == (
            "rank 1 ended at step 5, and node 0 has already left"
        )

    def test_a_rank_that_declares_during_the_restart_is_recovered_in_place(self, manager) -> None:
        job = manager().joined(declared=False)
        job.lose(1)
        job.worker(ev.WorkerStarted, 0, 1)
        job.worker(ev.WorkerDeclared, 0)
        assert acts(job.lose(0)) == ["Interrupt", "ReplaceWorker"]
        assert [job.worker(ev.WorkerStarted, rank, 1) for rank in (1, 2, 3)] == [[], [], []]
        assert kinds(job.pause_all(0)) == ["Resume"]

    def test_a_broken_communication_during_the_restart(self, manager) -> None:
        job = manager(per_node=2).joined(declared=False)
        job.lose(1, version=None)
        job.worker(ev.WorkerStarted, 0, 1)
        assert job.raise_(0, kind=FaultKind.COMMUNICATION, version=None) == []
        assert kinds(job.worker(ev.WorkerStarted, 1, 1)) == []
        assert kinds(job.tick()) == ["Interrupt", "RecordRecovery"]
        assert only(job.pause(1, None), do.Resume).version is None

    def test_ranks_that_are_not_restarted_in_time_are_restarted_again(self, manager) -> None:
        job = manager(per_node=2).joined(declared=False)
        job.lose(1)
        job.worker(ev.WorkerStarted, 0, 1)
        for moment in range(110, 700, 10):
            job.hear_all_until(moment)
        restart = only(job.tick(at=job.now + 15), do.RestartGroup)
        assert restart.incarnations == ((0, 2), (1, 2))
