"""RecoveryMachine.

Registrations, refusals, reconnections, and a manager that was started again in the middle.
"""

import pytest

from taskd.core import commands as do
from taskd.core import events as ev
from taskd.core.faults import FaultKind
from taskd.core.job.machine import RecoveryMachine
from taskd.core.phase import JobPhase
from taskd.core.timeouts import Timeouts
from tests.unit.core.answers import acts, kinds, only

Report, Failure = ev.WorkerReport, ev.ReportedFailure


@pytest.mark.parametrize(("nodes", "until_s"), [(1200, 28.0), (2400, 26.0)])
def test_agents_of_a_very_large_job_speak_less_often(manager, nodes: int, until_s: float) -> None:
    """The last look at the mail before a lease ends comes two heartbeats earlier."""
    job = manager(nodes=nodes, per_node=1)
    job.register(0)
    deadline = job.machine.next_deadline()
    assert deadline is not None
    assert deadline - job.now == pytest.approx(until_s)


class TestJoining:
    def test_nothing_happens_until_every_rank_is_known(self, manager) -> None:
        job = manager(nodes=2, per_node=1)
        job.register(0)
        assert job.machine.phase is JobPhase.JOINING
        job.register(1)
        assert job.machine.phase is JobPhase.RUNNING

    def test_ranks_are_kept_in_order_whichever_node_comes_first(self, manager) -> None:
        job = manager(nodes=3, per_node=2)
        for node in (2, 0, 1):
            job.register(node)
        assert list(job.machine.membership.members) == [0, 1, 2, 3, 4, 5]

    def test_faults_are_kept_until_then(self, manager, make_fault) -> None:
        job = manager(nodes=2, per_node=2)
        job.register(0)
        job.worker(ev.WorkerDeclared, 0)
        assert job.lose(1) == []
        assert job.worker(ev.WorkerExitKnown, 1, make_fault(FaultKind.EXITED, 1, 0, "exit 3")) == []
        commands = job.register(1)
        assert kinds(commands) == ["Interrupt", "ReplaceWorker"]
        assert "rank 1 ended with exit 3" in commands[0].reason

    def test_but_not_for_ever(self, manager) -> None:
        job = manager(nodes=2, per_node=1)
        job.register(0)
        job.lose(0)
        job.hear_all_until(120.0)
        give_up = only(job.tick(at=131.0), do.GiveUp)
        assert give_up.reason == (
            "rank 0 ended at step 5, and ranks [1] are not known to this manager"
        )

    def test_who_was_there_before_a_recovery_is_missed(self, manager) -> None:
        """Its agent may have left while no manager was there: the others wait for its ranks."""
        job = manager(nodes=2, per_node=1)
        job.register(0, Report(0, 0, "running", declared=True), generation=1)
        job.hear_all_until(120.0)
        assert job.machine.phase is JobPhase.JOINING
        give_up = only(job.tick(at=131.0), do.GiveUp)
        assert give_up.reason == (
            "an earlier manager knew all ranks, and ranks [1] are not known to this manager"
        )

    @pytest.mark.parametrize(
        ("generation", "report"),
        [
            (0, Report(0, 0, "running", declared=True)),
            (1, Report(0, 0, "running")),
            (1, Report(0, 0, "returned", declared=True, entered=True)),
        ],
        ids=["no recovery was", "not recoverable", "has returned"],
    )
    def test_but_not_if_the_others_may_do_without_it(self, manager, generation, report) -> None:
        job = manager(nodes=2, per_node=1)
        job.register(0, report, generation=generation)
        job.hear_all_until(120.0)
        assert "GiveUp" not in kinds(job.tick(at=131.0))
        assert job.machine.phase in (JobPhase.JOINING, JobPhase.RELEASED)

    def test_exceptions_are_kept_too(self, manager) -> None:
        job = manager(nodes=2, per_node=1)
        job.register(0)
        assert job.raise_(0, "reset", kind=FaultKind.COMMUNICATION) == []
        assert job.register(1) == []
        assert job.machine.phase is JobPhase.SUSPECTING
        assert kinds(job.tick()) == ["Interrupt"]
        job = manager(nodes=2, per_node=1)
        job.register(0)
        assert job.raise_(0) == []
        assert kinds(job.register(1)) == ["Interrupt"]

    def test_an_exception_is_kept_once_however_often_it_is_told(self, manager) -> None:
        """An agent tells it again with each registration, and messages come twice."""
        for kind in (FaultKind.RAISED, FaultKind.COMMUNICATION):
            job = manager(nodes=2, per_node=1)
            for _ in range(8):
                job.register(0)
                assert job.raise_(0, kind=kind) == []
            job.register(1)
            commands = job.tick() if kind is FaultKind.COMMUNICATION else []
            assert job.machine.phase is JobPhase.PAUSING, commands
            assert job.machine.restarts_used == 1

    def test_a_recovery_that_is_reported_before_that_is_anothers(self, manager) -> None:
        job = manager(nodes=2, per_node=1)
        job.register(0)
        assert job.recover(0) == []

    def test_the_smallest_budget_counts(self, manager) -> None:
        job = manager(nodes=2, per_node=1)
        job.register(0, max_restarts=7)
        job.register(1, max_restarts=3)
        assert job.machine.membership.max_restarts == 3

    def test_a_node_that_never_comes_is_waited_for(self, manager) -> None:
        job = manager(nodes=2, per_node=1)
        assert job.machine.next_deadline() is None
        job.register(0)
        job.tick()
        assert acts(job.tick()) == ["GiveUp", "EndJob"]

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"agent": "other"}, "node 0 is taken by another agent"),
            ({"world_size": 9}, "the job has 4 ranks, this agent says 9"),
            (
                {"reports": [Report(9, 0, "running"), Report(3, 0, "running")], "node": 1},
                "rank 9 is outside of a world of 4",
            ),
            (
                {"reports": [Report(0, 0, "running"), Report(3, 0, "running")], "node": 1},
                "rank 0 belongs to node 0",
            ),
            (
                {"reports": [Report(3, 0, "running"), Report(3, 0, "running")], "node": 1},
                "the same rank is given twice",
            ),
        ],
    )
    def test_who_is_refused(self, manager, change, words) -> None:
        job = manager(nodes=2, per_node=2)
        job.register(0)
        reports = change.pop("reports", [])
        node = change.pop("node", 0)
        before = job.machine.membership
        assert job.register(node, *reports, **change) == []
        assert any(words in str(entry) for entry in job.machine.story)
        assert sorted(before.members) == [0, 1]

    def test_a_node_that_has_left_does_not_come_back(self, manager) -> None:
        job = manager(nodes=2, per_node=1).joined(declared=False)
        job.worker(ev.WorkerFinished, 1)
        job.send(ev.AgentLeft, 1, "succeeded", "")
        assert job.register(1, agent="a new one") == []
        assert any(
            "node 1 has left this job (succeeded)" in str(entry) for entry in job.machine.story
        )

    @pytest.mark.parametrize(
        ("nodes", "per_node", "words"),
        [(3, None, "started for 3 nodes, this agent says 2"), (2, 4, "for 4 ranks per node")],
    )
    def test_what_the_user_promised_is_checked(self, nodes, per_node, words) -> None:
        machine = RecoveryMachine("job", Timeouts.derive(), nodes, per_node)
        reports = (Report(0, 0, "running"), Report(1, 0, "running"))
        event = ev.AgentRegistered(0.0, "c", 0, "me", 2, 4, 3, 0, 0, reports)
        assert words in machine.refusal(event)
        assert machine.handle(event) == []

    def test_an_ended_job_takes_nobody(self, manager) -> None:
        job = manager().joined()
        job.send(ev.AgentLeft, 0, "succeeded", "")
        event = ev.AgentRegistered(job.now, "c", 0, "new", 1, 4, 3, 0, 0, ())
        assert job.machine.refusal(event) == "the job has ended: every node succeeded"

    def test_nobody_is_refused_without_a_reason(self, manager) -> None:
        event = ev.AgentRegistered(0.0, "c", 0, "me", 1, 1, 3, 0, 0, (Report(0, 0, "running"),))
        assert manager().machine.refusal(event) is None


class TestANewManager:
    """It knows only what the registrations say."""

    def test_takes_over_a_healthy_job(self, manager) -> None:
        job = manager(per_node=2)
        reports = [Report(rank, 3, "running", declared=True, version=7) for rank in range(2)]
        assert job.register(0, *reports, generation=5, used=4) == []
        assert (job.machine.generation, job.machine.restarts_used, job.machine.phase) == (
            5,
            4,
            JobPhase.RUNNING,
        )
        interrupt, replacement = job.lose(0)
        assert (interrupt.generation, replacement.incarnation, replacement.restarts_used) == (
            6,
            4,
            5,
        )

    def test_finds_a_paused_worker(self, manager) -> None:
        job = manager(per_node=2)
        reports = [Report(0, 0, "paused", True, 7, clean=False), Report(1, 0, "running", True, 7)]
        (interrupt,) = job.register(0, *reports, generation=1)
        assert interrupt.reason == "a recovery was under way when this manager came"
        (resume,) = job.pause(1, 7)
        assert resume.moves == (do.Move(0, 1),)
        record = job.recover_all()[0].record
        assert (record.faults, record.detect_s) == ((), 0)

    def test_finds_everybody_paused(self, manager) -> None:
        job = manager(per_node=2)
        reports = [Report(rank, 0, "paused", True, 7) for rank in range(2)]
        assert kinds(job.register(0, *reports, generation=1)) == ["Interrupt", "Resume"]

    def test_finds_a_lost_worker_and_learns_the_rest(self, manager, make_fault) -> None:
        job = manager(per_node=2)
        reports = [Report(0, 0, "lost", True, 7), Report(1, 0, "running", True, 7)]
        commands = job.register(0, *reports)
        assert kinds(commands) == ["Interrupt", "ReplaceWorker"]
        job.worker(ev.WorkerLost, 0, make_fault(FaultKind.LOST, 0), 3.0, (7,), incarnation=0)
        job.worker(
            ev.WorkerExitKnown, 0, make_fault(FaultKind.KILLED, 0, 0, "SIGKILL"), incarnation=0
        )
        job.pause_all(7)
        assert [fault.detail for fault in job.recover_all(8)[0].record.faults] == ["SIGKILL"]

    def test_finds_a_lost_worker_and_is_told_how_and_when(self, manager, make_fault) -> None:
        job = manager(per_node=2)
        how = make_fault(FaultKind.KILLED, 0, 0, "SIGKILL", version=7)
        commands = job.register(
            0,
            Report(0, 0, "lost", True, 7, failure=Failure(how, 5.0)),
            Report(1, 0, "running", True, 7),
        )
        died_at = job.now - 5.0
        assert kinds(commands) == ["Interrupt", "ReplaceWorker"]
        assert job.worker(ev.WorkerLost, 0, how, 5.0, (7,), incarnation=0) == [], (
            "the agent says it once more"
        )
        job.pause_all(7)
        record = job.recover_all(8)[0].record
        assert (
            record.strategy,
            [fault.detail for fault in record.faults],
            record.restarts_used,
        ) == ("recover-in-place", ["SIGKILL"], 1)
        assert record.total_s == pytest.approx(job.now - died_at)

    def test_finds_a_worker_that_was_just_replaced(self, manager, make_fault) -> None:
        """The earlier manager had ordered it, and had counted it."""
        job = manager(per_node=2)
        how = make_fault(FaultKind.KILLED, 0, 0, "SIGKILL", version=7)
        commands = job.register(
            0,
            Report(0, 1, "paused", True, failure=Failure(how, 5.0, replaced=True)),
            Report(1, 0, "paused", True, 7),
            generation=1,
            used=1,
        )
        died_at = job.now - 5.0
        assert kinds(commands) == ["Interrupt", "Resume"]
        record = job.recover_all(8)[0].record
        assert (
            record.strategy,
            [fault.detail for fault in record.faults],
            record.restarts_used,
        ) == ("recover-in-place", ["SIGKILL"], 1)
        assert record.total_s == pytest.approx(job.now - died_at)
        assert record.reason == "the manager was restarted meanwhile"

    def test_what_it_cannot_learn_it_says(self, manager) -> None:
        job = manager(per_node=2)
        job.register(0, *[Report(rank, 0, "paused", True, 7) for rank in range(2)], generation=1)
        record = job.recover_all(8)[0].record
        assert (record.strategy, record.faults) == ("retry", ())
        assert record.reason.endswith(
            "this manager came later, and what came before is not known: the time counts from then"
        )

    def test_a_replacement_that_trains_already_is_no_reason_to_stop(
        self, manager, make_fault
    ) -> None:
        job = manager(per_node=2)
        how = make_fault(FaultKind.KILLED, 0, 0, "SIGKILL", version=7)
        assert (
            job.register(
                0,
                Report(0, 1, "running", True, 7, failure=Failure(how, 5.0, replaced=True)),
                Report(1, 0, "running", True, 7),
                generation=1,
            )
            == []
        )
        job.lose(1)
        job.pause_all(7)
        assert [fault.rank for fault in job.recover_all(8)[0].record.faults] == [1]

    def test_hears_the_details_before_it_is_complete(self, manager, make_fault) -> None:
        job = manager(nodes=2, per_node=1)
        job.register(0, Report(0, 0, "lost", True, 7))
        assert (
            job.worker(ev.WorkerLost, 0, make_fault(FaultKind.LOST, 0, version=7), 3.0, (7,)) == []
        )
        assert (
            job.worker(
                ev.WorkerLost, 0, make_fault(FaultKind.KILLED, 0, 0, "SIGKILL", version=7), 3.0
            )
            == []
        )
        commands = job.register(1, Report(1, 0, "running", True, 7))
        assert kinds(commands) == ["Interrupt", "ReplaceWorker"]
        assert "SIGKILL" in commands[0].reason

    def test_hears_of_a_pause_before_it_is_complete(self, manager) -> None:
        job = manager(nodes=2, per_node=1)
        job.register(0, Report(0, 0, "running", True))
        assert job.pause(0, generation=1) == []
        assert kinds(job.register(1, Report(1, 0, "running", True), generation=1)) == ["Interrupt"]

    def test_agents_that_heard_different_generations_mean_an_unfinished_recovery(
        self, manager
    ) -> None:
        job = manager(nodes=2, per_node=1)
        job.register(0, Report(0, 0, "running", True, 7), generation=3)
        (interrupt,) = job.register(1, Report(1, 0, "running", True, 7), generation=2)
        assert interrupt.generation == 4

    def test_a_pause_that_it_did_not_order_is_answered(self, manager) -> None:
        job = manager(per_node=2)
        job.register(0, *[Report(rank, 0, "running", True, 7) for rank in range(2)], generation=3)
        assert kinds(job.pause(0, 7, generation=3)) == ["Interrupt"]
        assert kinds(job.pause(1, 7)) == ["Resume"]

    def test_everybody_has_returned(self, manager) -> None:
        job = manager(per_node=2)
        assert kinds(
            job.register(0, Report(0, 0, "returned", True, 9), Report(1, 0, "finished", True, 9))
        ) == ["Release"]

    def test_the_others_left_before_it_came(self, manager) -> None:
        job = manager(nodes=2, per_node=1)
        assert job.send(ev.AgentLeft, 1, "succeeded", "") == []
        assert kinds(job.register(0, Report(0, 0, "returned", True, 9))) == ["Release"]
        job.worker(ev.WorkerFinished, 0)
        assert job.send(ev.AgentLeft, 0, "succeeded", "")[0].succeeded

    def test_the_others_leave_while_it_waits(self, manager) -> None:
        job = manager(nodes=2, per_node=1)
        job.register(0, Report(0, 0, "returned", True, 9))
        assert kinds(job.send(ev.AgentLeft, 1, "succeeded", "")) == ["Release"]

    def test_the_others_left_and_were_never_heard_of(self, manager) -> None:
        job = manager(nodes=2, per_node=1)
        job.register(0)
        assert job.return_(0) == []
        job.hear_all_until(120.0)
        assert kinds(job.tick(at=131.0)) == ["Release"]
        assert job.worker(ev.WorkerFinished, 0) == []
        assert job.send(ev.AgentLeft, 0, "succeeded", "")[0].succeeded

    def test_all_processes_had_ended_when_it_came_and_the_agent_leaves_late(self, manager) -> None:
        """The other nodes have left: nobody is waited for any more when the last one goes."""
        job = manager(nodes=2, per_node=1)
        job.register(0, Report(0, 0, "lost", True, 9))
        job.register(0, Report(0, 0, "finished", True, 9))
        job.hear_all_until(120.0)
        assert job.tick(at=131.0) == []
        assert job.machine.phase is JobPhase.RUNNING
        (end,) = job.send(ev.AgentLeft, 0, "succeeded", "")
        assert end.succeeded
        assert end.reason == "every node that joined succeeded"

    def test_some_returned_and_the_others_are_not_here(self, manager) -> None:
        job = manager(nodes=2, per_node=2)
        job.register(0)
        job.return_(0)
        job.hear_all_until(120.0)
        assert "GiveUp" not in kinds(job.tick(at=131.0))
        assert job.machine.phase in (JobPhase.JOINING, JobPhase.RELEASED)

    def test_everybody_who_came_has_left(self, manager) -> None:
        job = manager(nodes=2, per_node=1)
        job.register(0)
        assert job.send(ev.AgentLeft, 0, "succeeded", "") == []
        (end,) = job.tick()
        assert end.succeeded

    def test_paused_workers_do_not_wait_for_ever_for_ranks_that_never_come(self, manager) -> None:
        job = manager(nodes=2, per_node=1)
        job.register(0, Report(0, 0, "paused", True, 9))
        job.hear_all_until(120.0)
        assert job.tick(at=131.0)[0].reason == (
            "a recovery is under way, and ranks [1] are not known to this manager"
        )


def test_an_early_end_on_one_node_waits_for_the_other_node(manager) -> None:
    """A rank of the first node ends without training, and its neighbour trains.

    The others are not known yet.
    """
    job = manager(nodes=2, per_node=2)
    job.register(0)
    job.worker(ev.WorkerDeclared, 0)
    job.worker(ev.WorkerDeclared, 1, True)
    assert job.worker(ev.WorkerFinished, 0) == []
    assert job.machine.phase is JobPhase.JOINING
    commands = job.register(1)
    assert "RestartGroup" not in kinds(commands)
    assert only(commands, do.ReplaceWorker).rank == 0
