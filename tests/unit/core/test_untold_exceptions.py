"""Exceptions that no manager has heard of: the next one is told of them with the registration."""

from typing import Any

import pytest

from taskd.core import events as ev
from taskd.core.faults import FaultKind
from taskd.core.phase import JobPhase
from tests.unit.core.answers import acts, kinds

Report, Failure = ev.WorkerReport, ev.ReportedFailure


class TestTheManager:
    def test_finds_a_worker_that_raised_while_nobody_was_there(self, manager, make_fault) -> None:
        job = manager(per_node=2)
        how = make_fault(FaultKind.RAISED, 0, 0, "ValueError: x", version=7)
        commands = job.register(
            0,
            Report(0, 0, "paused", True, 7, entered=True, failure=Failure(how, 5.0)),
            Report(1, 0, "running", True, 7, entered=True),
        )
        died_at = job.now - 5.0
        assert kinds(commands) == ["Interrupt"]
        assert commands[0].reason == "rank 0 raised ValueError: x at step 7"
        # the agent says it once more, with the traceback
        assert job.raise_(0, version=7, generation=0, age=5.0) == []
        job.pause_all(7)
        record = job.recover_all(8)[0].record
        assert (record.strategy, record.restarts_used) == ("retry", 1)
        (told,) = record.faults
        assert (told.detail, told.traceback) == ("ValueError: x", "Traceback")
        assert record.total_s == pytest.approx(job.now - died_at)
        assert record.reason == "every process is alive"

    def test_the_same_while_others_are_missing(self, manager, make_fault) -> None:
        job = manager(nodes=2, per_node=1)
        how = make_fault(FaultKind.RAISED, 0, 0, "ValueError: x", version=7)
        raised = Report(0, 0, "paused", True, 7, entered=True, failure=Failure(how, 5.0))
        assert job.register(0, raised) == []
        assert job.register(0, raised) == [], "and again, over another connection"
        assert job.raise_(0, version=7, generation=0, age=5.0) == []
        (interrupt,) = job.register(1, Report(1, 0, "running", True, 7, entered=True))
        assert interrupt.reason == "rank 0 raised ValueError: x at step 7"

    def test_a_broken_communication_waits_for_its_cause(self, manager, make_fault) -> None:
        job = manager(per_node=2)
        how = make_fault(FaultKind.COMMUNICATION, 0, 0, "Connection closed", version=7)
        raised = Report(0, 0, "paused", True, 7, entered=True, failure=Failure(how, 1.0))
        assert job.register(0, raised, Report(1, 0, "running", True, 7, entered=True)) == []
        assert job.machine.phase is JobPhase.SUSPECTING
        assert acts(job.lose(1, FaultKind.KILLED, "SIGKILL")) == ["Interrupt", "ReplaceWorker"]

    def test_an_exception_says_nothing_of_a_later_death(self, manager, make_fault) -> None:
        job = manager(per_node=2)
        how = make_fault(FaultKind.RAISED, 0, 0, "ValueError: x", version=7)
        raised = Report(0, 0, "paused", True, 7, entered=True, failure=Failure(how, 5.0))
        job.register(0, raised, Report(1, 0, "running", True, 7, entered=True))
        job.register(
            0, Report(0, 0, "lost", True, 7), Report(1, 0, "running", True, 7), generation=1
        )
        job.pause_all(7)
        found = {fault.kind for fault in job.recover_all(8)[0].record.faults}
        assert found == {FaultKind.RAISED, FaultKind.LOST}


class TestTheNode:
    def raised(self, agent, make_fault, rank: int, kind: FaultKind, age_s: float = 0.0) -> None:
        fault = make_fault(kind, rank, 0, "x", version=5, traceback="Traceback")
        agent.worker(ev.WorkerRaised, rank, 0, fault, True, age_s)

    def failures(self, agent) -> dict[int, Any]:
        reports = agent.machine.registration(agent.now).workers
        return {report.rank: report.failure for report in reports if report.failure is not None}

    def test_tells_it_in_its_registration_and_once_more_with_the_traceback(
        self, node, make_fault
    ) -> None:
        agent = node()
        self.raised(agent, make_fault, 0, FaultKind.RAISED, 0.5)
        raised_at = agent.now - 0.5
        agent.now += 3
        failure = self.failures(agent)[0]
        assert (failure.fault.detail, failure.fault.traceback) == ("x", None)
        assert (failure.age_s, failure.replaced) == (pytest.approx(agent.now - raised_at), False)
        agent.machine.check()
        (again,) = [
            event
            for event in agent.machine.lives.said(agent.now)
            if isinstance(event, ev.WorkerRaised)
        ]
        assert again.fault.traceback == "Traceback"
        assert again.age_s == pytest.approx(agent.now - raised_at)

    def test_a_cause_comes_before_victims(self, node, make_fault) -> None:
        """One message has room for the failures of 32 ranks."""
        agent = node(40)
        for rank in range(39):
            self.raised(agent, make_fault, rank, FaultKind.COMMUNICATION)
        self.raised(agent, make_fault, 39, FaultKind.RAISED)
        told = self.failures(agent)
        assert len(told) == 32
        assert told[39].fault.kind is FaultKind.RAISED
