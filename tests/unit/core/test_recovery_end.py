"""RecoveryMachine: how a job ends, and agents that leave."""

from taskd.core import commands as do
from taskd.core import events as ev
from taskd.core.faults import FaultKind
from taskd.core.phase import JobPhase
from tests.unit.core.answers import acts, kinds, only, plan


class TestTheEnd:
    def test_release_once_when_all_have_returned(self, manager) -> None:
        job = manager(per_node=2).joined()
        assert job.return_(0) == []
        assert job.return_(0) == []
        assert job.return_(1) == [do.Release("e6", 0)]
        assert (
            job.return_(1)
            == job.pause(1)
            == job.recover(1)
            == job.worker(ev.WorkerDeclared, 1)
            == []
        )
        assert job.worker(ev.WorkerFinished, 0) == job.worker(ev.WorkerFinished, 1) == []
        assert only(job.send(ev.AgentLeft, 0, "succeeded", ""), do.EndJob).succeeded
        assert job.machine.next_deadline() is None
        assert job.send(ev.AgentHeard, 0) == []

    def test_a_death_while_others_have_returned_is_recovered(self, manager) -> None:
        job = manager(per_node=2).joined()
        job.return_(0)
        assert kinds(job.lose(1, version=9)) == ["Interrupt", "ReplaceWorker"]
        assert job.return_(0, generation=0) == []
        assert job.pause(0, 10) == []
        resume = only(job.pause(1, None), do.Resume)
        assert (resume.version, plan(resume)) == (10, {1: 0})
        assert job.return_(0) == []
        record, release = job.return_(1)
        assert isinstance(record, do.RecordRecovery)
        assert isinstance(release, do.Release)
        assert record.record.groups_s == 0

    def test_one_returns_and_one_recovers(self, manager) -> None:
        job = manager(per_node=2).joined()
        job.lose(1)
        job.pause_all()
        job.recover(0)
        assert kinds(job.return_(1)) == ["RecordRecovery"]
        assert kinds(job.return_(0)) == ["Release"]

    def test_a_death_after_release_waits_for_the_others_and_ends_the_job(self, manager) -> None:
        job = manager(per_node=2).joined()
        job.return_(0), job.return_(1)
        assert job.lose(0, FaultKind.CRASHED, "SIGSEGV", version=10) == []
        give_up = only(job.worker(ev.WorkerFinished, 1), do.GiveUp)
        assert give_up.reason == (
            "rank 0 ended with SIGSEGV at step 10 after the training "
            "function "
            "had returned everywhere"
        )
        assert only(job.send(ev.AgentLeft, 0, "failed", ""), do.EndJob) == do.EndJob(
            "e8", 0, False, give_up.reason
        )

    def test_a_node_that_went_on_without_us_leaves_nothing_to_decide(self, manager) -> None:
        """The manager was stopped for longer than a fault may wait.

        What it finds when it goes on.
        """
        job = manager(nodes=2, per_node=1).joined()
        assert kinds(job.lose(1)) == ["Interrupt", "ReplaceWorker"]
        record, end = job.send(ev.AgentLeft, 1, "fallback", "rank 1 ended, and no manager answers")
        reason = "the agent of node 1 left (fallback: rank 1 ended, and no manager answers)"
        assert end == do.EndJob(f"e{job.count}", 1, succeeded=True, reason=reason, left_alone=True)
        assert record.record.not_completed == f"training goes on without a manager: {reason}"
        assert job.machine.phase is JobPhase.ENDED

    def test_a_job_that_was_given_up_stays_so_when_a_node_goes_on_without_us(self, manager) -> None:
        job = manager(nodes=2, per_node=1).joined()
        job.send(ev.AgentLeft, 0, "failed", "")
        assert not only(job.send(ev.AgentLeft, 1, "fallback", ""), do.EndJob).succeeded

    def test_it_also_waits_to_learn_how_it_died(self, manager, make_fault) -> None:
        job = manager(per_node=2).joined()
        job.return_(0), job.return_(1)
        assert job.lose(0) == job.worker(ev.WorkerFinished, 1) == []
        how = make_fault(FaultKind.EXITED, 0, 0, "exit 3")
        assert ("rank 0 ended with exit 3 after") in only(
            job.worker(ev.WorkerExitKnown, 0, how), do.GiveUp
        ).reason

    def test_the_first_of_two_late_failures_is_the_reason(self, manager) -> None:
        job = manager(per_node=2).joined()
        job.return_(0), job.return_(1)
        assert job.lose(1, FaultKind.EXITED, "exit 3") == []
        assert only(job.lose(0, FaultKind.EXITED, "exit 4", age=0.0), do.GiveUp).culprit == 1

    def test_others_that_hang_after_release_are_not_waited_for_for_ever(self, manager) -> None:
        job = manager(per_node=2).joined()
        job.return_(0), job.return_(1)
        job.lose(0, FaultKind.EXITED, "exit 3")
        for moment in range(110, 700, 10):
            job.hear_all_until(moment)
        assert only(job.tick(at=job.now + 20), do.GiveUp).culprit == 0

    def test_an_exception_after_release(self, manager) -> None:
        job = manager(per_node=2).joined()
        job.return_(0), job.return_(1)
        assert job.raise_(0) == job.raise_(0) == []
        assert "raised ValueError: x" in only(job.worker(ev.WorkerFinished, 1), do.GiveUp).reason

    def test_a_node_that_falls_silent_after_release_has_ended(self, manager) -> None:
        job = manager(per_node=1).joined()
        job.return_(0)
        job.tick()
        assert only(job.tick(), do.EndJob).succeeded


class TestAgents:
    def test_a_silent_agent_ends_the_job(self, manager) -> None:
        job = manager(nodes=2, per_node=1).joined()
        job.send(ev.AgentHeard, 0, at=115.0)
        assert job.tick() == []
        said = job.tick()
        give_up, record = only(said, do.GiveUp), only(said, do.RecordRecovery).record
        assert (record.strategy, record.code) == ("exit", 499)
        assert set(dict(record.skipped).values()) == {
            give_up.reason,
            "not allowed (recover-strategy)",
        }
        assert give_up.reason == "the agent of node 1 has been silent for 30 s"
        assert job.machine.phase is JobPhase.ENDING
        assert job.send(ev.AgentHeard, 1) == []
        job.tick()
        assert only(job.tick(), do.EndJob) == do.EndJob("e10", 0, False, give_up.reason)

    def test_an_agent_that_was_stopped_ends_the_job(self, manager) -> None:
        job = manager(nodes=2, per_node=1).joined()
        give_up = only(job.send(ev.AgentLeft, 1, "stopped", "SIGTERM"), do.GiveUp)
        assert give_up.reason == "the agent of node 1 left (stopped: SIGTERM)"
        assert job.lose(0) == job.worker(ev.WorkerFinished, 0) == []
        assert only(job.send(ev.AgentLeft, 0, "failed", ""), do.EndJob).succeeded is False

    def test_the_only_agent_leaves(self, manager) -> None:
        assert acts(manager().joined().send(ev.AgentLeft, 0, "failed", "")) == ["GiveUp", "EndJob"]

    def test_a_stranger_that_is_heard_is_not_counted(self, manager) -> None:
        job = manager().joined()
        assert job.send(ev.AgentHeard, 7) == []

    def test_a_tick_before_anything_is_due_leaves_no_trace(self, manager) -> None:
        job = manager().joined()
        before = len(job.machine.story)
        assert job.send(ev.Tick) == []
        assert len(job.machine.story) == before
        assert manager().send(ev.Tick) == []

    def test_thousands_of_ranks_are_handled_in_no_time(self, manager) -> None:
        job = manager(nodes=256, per_node=8)
        job.machine.check = lambda: None  # looks at every rank each time
        job.joined()
        job.lose(77)
        resume = only(job.pause_all(), do.Resume)
        assert plan(resume) == {77: 0}
        assert len(only(job.recover_all(), do.RecordRecovery).record.sources) == 2048


class TestANodeThatLeavesWhileItIsNeeded:
    """Its only rank ended well. That it is wanted back crosses its goodbye."""

    def test_its_new_life_will_never_come(self, manager) -> None:
        job = manager(nodes=2, per_node=1).joined(declared=False)
        job.worker(ev.WorkerDeclared, 0, True)
        job.worker(ev.WorkerDeclared, 1)
        assert kinds(job.worker(ev.WorkerFinished, 1)) == ["Interrupt", "ReplaceWorker"]
        give_up = only(job.send(ev.AgentLeft, 1, "succeeded", ""), do.GiveUp)
        assert give_up.reason == (
            "rank 1 ended with exit 0 before it came to its function, while "
            "others train, and node 1 has already left"
        )

    def test_nor_will_the_one_of_a_restarted_group(self, manager) -> None:
        job = manager(nodes=2, per_node=1).joined(declared=False)
        assert kinds(job.lose(0, FaultKind.EXITED, "exit 3")) == ["RestartGroup"]
        give_up = only(job.send(ev.AgentLeft, 1, "succeeded", ""), do.GiveUp)
        assert give_up.reason == "rank 0 ended with exit 3 at step 5, and node 1 has already left"

    def test_nor_one_that_released_its_ranks_while_the_manager_was_away(self, manager) -> None:
        """The others would meet at `init_process_group` for a rank that is gone (history 457 of
        seed 1316501653)."""
        job = manager(nodes=2, per_node=1).joined()
        assert kinds(job.lose(0, FaultKind.EXITED, "exit 3")) == ["Interrupt", "ReplaceWorker"]
        give_up = only(job.send(ev.AgentLeft, 1, "succeeded", ""), do.GiveUp)
        assert give_up.reason == "rank 0 ended with exit 3 at step 5, and node 1 has already left"

    def test_nor_one_whose_rank_was_released_by_an_earlier_manager(self, manager) -> None:
        """A rank died between `Release` and its end, and the manager with it; another had ended
        (history 158530 of seed 20261123)."""
        job = manager(nodes=2, per_node=2)
        job.register(1, _report(2, "returned"), _report(3, "returned"))
        give_up = only(job.register(0, _report(0, "finished"), _report(1, "lost")), do.GiveUp)
        assert give_up.reason == "rank 1 ended at step 8, and rank 0 has already ended well"

    def test_nor_one_that_ends_while_the_others_are_called_out(self, manager) -> None:
        """It had heard of `Release` from an earlier manager, which this one cannot know."""
        job = manager(nodes=2, per_node=1)
        job.register(1, _report(1, "lost"))
        assert kinds(job.register(0, _report(0, "returned"))) == ["Interrupt", "ReplaceWorker"]
        give_up = only(job.worker(ev.WorkerFinished, 0), do.GiveUp)
        assert "rank 0 has already ended well" in give_up.reason


def _report(rank: int, state: str) -> ev.WorkerReport:
    """Of a rank that was in its function at version 8."""
    return ev.WorkerReport(rank, 0, state, declared=True, entered=True, version=8)
