"""RecoveryMachine: an agent that comes back, and what it has missed."""

from taskd.core import commands as do
from taskd.core import events as ev
from taskd.core.faults import FaultKind
from tests.unit.core.answers import kinds, only

Report, Failure = ev.WorkerReport, ev.ReportedFailure


class TestAnAgentThatComesBack:
    """The same agent registers again: it hears what it may have missed."""

    def again(self, job, *reports, generation=None, node=0):
        known = job.machine.generation if generation is None else generation
        return job.register(node, *reports, generation=known, used=job.machine.restarts_used)

    def test_nothing_was_missed(self, manager) -> None:
        job = manager(per_node=2).joined()
        assert self.again(job) == []

    def test_before_the_job_is_complete(self, manager) -> None:
        job = manager(nodes=2, per_node=1)
        job.register(0)
        assert self.again(job, Report(0, 0, "lost")) == []
        assert kinds(job.register(1)) == ["RestartGroup"]

    def test_interrupt_and_replacement(self, manager) -> None:
        job = manager(per_node=2).joined()
        sent = job.lose(1)
        assert self.again(job, Report(0, 0, "running"), Report(1, 0, "lost"), generation=0) == sent

    def test_its_pauses_were_lost(self, manager) -> None:
        job = manager(per_node=2).joined()
        job.lose(1)
        commands = self.again(job, Report(0, 0, "paused", True, 6), Report(1, 1, "paused"))
        assert kinds(commands) == ["Interrupt", "Resume"]
        assert commands[1].version == 6

    def test_resume(self, manager) -> None:
        job = manager(per_node=2).joined()
        job.lose(1)
        sent = job.pause_all()
        assert self.again(job, Report(0, 0, "paused", True, 5), Report(1, 1, "paused")) == sent
        assert self.again(job, Report(0, 0, "running", True, 5), Report(1, 1, "running")) == []

    def test_the_restart_of_the_group(self, manager) -> None:
        job = manager(per_node=2).joined(declared=False)
        sent = job.lose(1)
        assert self.again(job, Report(0, 0, "running"), Report(1, 0, "lost"), generation=0) == sent

    def test_release(self, manager) -> None:
        job = manager(per_node=2).joined()
        job.return_(0)
        (sent,) = job.return_(1)
        assert self.again(job, Report(0, 0, "returned"), Report(1, 0, "returned")) == [sent]

    def test_the_end(self, manager) -> None:
        job = manager(nodes=2, per_node=1).joined()
        sent = only(job.send(ev.AgentLeft, 1, "failed", ""), do.GiveUp)
        assert self.again(job, Report(0, 0, "running")) == [sent]

    def test_it_lost_a_worker_meanwhile(self, manager) -> None:
        job = manager(per_node=2).joined()
        assert kinds(self.again(job, Report(0, 0, "running", True), Report(1, 0, "lost"))) == [
            "Interrupt",
            "ReplaceWorker",
        ]

    def test_it_lost_a_worker_after_release(self, manager, make_fault) -> None:
        job = manager(per_node=2).joined()
        job.return_(0), job.return_(1)
        assert kinds(self.again(job, Report(0, 0, "finished"), Report(1, 0, "lost"))) == ["Release"]
        assert kinds(
            job.worker(ev.WorkerLost, 1, make_fault(FaultKind.EXITED, 1, 0, "exit 3"), 1.0)
        ) == ["GiveUp"]

    def test_its_workers_returned_meanwhile(self, manager) -> None:
        job = manager(per_node=2).joined()
        assert kinds(self.again(job, Report(0, 0, "returned"), Report(1, 0, "returned"))) == [
            "Release"
        ]

    def test_after_it_was_given_up_for_lost(self, manager) -> None:
        job = manager(nodes=2, per_node=1).joined()
        job.hear_all_until(101.0)
        job.send(ev.AgentHeard, 0, at=115.0)
        job.tick()
        sent = only(job.tick(), do.GiveUp)
        assert self.again(job, Report(1, 0, "running"), node=1) == [sent]
        assert job.send(ev.AgentLeft, 0, "failed", "") == []
        assert kinds(job.send(ev.AgentLeft, 1, "failed", "")) == ["EndJob"]
