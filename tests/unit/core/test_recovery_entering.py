"""RecoveryMachine: ranks that have declared and have not come to their function."""

from taskd.core import commands as do
from taskd.core import events as ev
from taskd.core.phase import JobPhase
from tests.unit.core.answers import kinds, only


class TestPatience:
    def test_a_rank_that_has_not_come_to_its_function_may_take_as_long_as_a_start(
        self, manager
    ) -> None:
        job = manager(per_node=3).joined(declared=False)
        for rank in range(3):
            job.worker(ev.WorkerDeclared, rank, rank == 0)
        job.lose(1)
        job.pause(0), job.pause(1, None)
        for moment in range(110, 690, 10):
            job.hear_all_until(moment)
            assert job.machine.phase is JobPhase.PAUSING
        kill, _ = job.tick(at=job.now + 25)
        assert (kill.rank, kill.reason) == (2, "did not leave its step")

    def test_one_that_has_is_replaced_after_the_pause_timeout(self, manager) -> None:
        job = manager(per_node=3).joined(declared=False)
        for rank in range(3):
            job.worker(ev.WorkerDeclared, rank, rank != 1)
        job.lose(1)
        job.pause(0), job.pause(1, None)
        job.hear_all_until(120.0)
        kill, _ = job.tick(at=135.0)
        assert (kill.rank, kill.reason) == (2, "did not leave its step")

    def test_a_replacement_has_not_come_to_its_function_yet(self, manager) -> None:
        job = manager(per_node=2).joined()
        job.lose(1)
        assert not job.machine.membership.members[1].entered


class TestEndsBeforeItsFunction:
    def test_a_job_in_which_nobody_trains_succeeds(self, manager) -> None:
        job = manager(per_node=2).joined(declared=False)
        for rank in range(2):
            job.worker(ev.WorkerDeclared, rank)
        assert job.worker(ev.WorkerFinished, 0) == job.worker(ev.WorkerFinished, 1) == []
        assert only(job.send(ev.AgentLeft, 0, "succeeded", ""), do.EndJob).succeeded

    def test_one_that_ended_is_wanted_back_when_another_trains(self, manager) -> None:
        job = manager(per_node=2).joined(declared=False)
        job.worker(ev.WorkerDeclared, 0), job.worker(ev.WorkerDeclared, 1)
        assert job.worker(ev.WorkerFinished, 1) == []
        interrupt, replacement = job.worker(ev.WorkerDeclared, 0, True)
        assert interrupt.reason == (
            "rank 1 ended with exit 0 before it came to its function, while others train"
        )
        assert (replacement.rank, replacement.incarnation) == (1, 1)

    def test_one_that_ends_while_another_trains_is_replaced(self, manager) -> None:
        job = manager(per_node=2).joined(declared=False)
        job.worker(ev.WorkerDeclared, 0, True), job.worker(ev.WorkerDeclared, 1)
        assert kinds(job.worker(ev.WorkerFinished, 1)) == ["Interrupt", "ReplaceWorker"]

    def test_one_that_ends_during_a_recovery_is_replaced_in_it(self, manager) -> None:
        job = manager(per_node=3).joined(declared=False)
        for rank in range(3):
            job.worker(ev.WorkerDeclared, rank, rank != 2)
        job.lose(1)
        assert kinds(job.worker(ev.WorkerFinished, 2)) == ["ReplaceWorker"]
        assert job.pause(0) == job.pause(1, None) == []
        assert kinds(job.pause(2, None)) == ["Resume"]

    def test_one_whose_node_has_left_ends_the_job(self, manager) -> None:
        job = manager(nodes=2, per_node=1).joined(declared=False)
        job.worker(ev.WorkerDeclared, 0), job.worker(ev.WorkerDeclared, 1)
        job.worker(ev.WorkerFinished, 1)
        assert job.send(ev.AgentLeft, 1, "succeeded", "") == []
        give_up = only(job.worker(ev.WorkerDeclared, 0, True), do.GiveUp)
        assert "node 1 has already left" in give_up.reason

    def test_a_manager_that_was_restarted_hears_who_trains(self, manager) -> None:
        job = manager(per_node=2)
        reports = [
            ev.WorkerReport(0, 0, "running", declared=True, entered=True),
            ev.WorkerReport(1, 0, "finished", declared=True),
        ]
        assert kinds(job.register(0, *reports)) == ["Interrupt", "ReplaceWorker"]

    def test_what_was_not_heard_for_a_lost_connection_is_taken_over(self, manager) -> None:
        job = manager(per_node=2).joined(declared=False)
        job.worker(ev.WorkerDeclared, 1)
        reports = [
            ev.WorkerReport(0, 0, "running", declared=True, entered=True),
            ev.WorkerReport(1, 0, "finished", declared=True),
        ]
        assert kinds(job.register(0, *reports)) == ["Interrupt", "ReplaceWorker"]

    def test_nothing_is_wanted_back_after_all_have_returned(self, manager) -> None:
        job = manager(per_node=2).joined()
        job.return_(0), job.return_(1)
        assert job.worker(ev.WorkerFinished, 0) == job.worker(ev.WorkerFinished, 1) == []
