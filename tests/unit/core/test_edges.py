"""Both machines and their parts: refusals, and reports that concern nobody any more."""

import signal

import pytest

from taskd.core import commands as do
from taskd.core import events as ev
from taskd.core.exits import exit_fault
from taskd.core.faults import Fault, FaultKind
from taskd.core.job.invariants import check
from taskd.core.job.membership import Membership
from taskd.core.job.record import TimedFault
from taskd.core.job.state import JobState
from taskd.core.phase import JobPhase
from taskd.core.policy.cut import Copy, NoCut, plan_cut
from taskd.core.policy.hangs import HangDetector
from taskd.core.policy.ladder import SHORT_LIFE_S
from taskd.core.policy.leases import Leases
from taskd.core.policy.stagnation import DEATH_LIMIT, Stagnation
from taskd.core.profiling import Domain, Domains, Switchboard
from taskd.core.story import describe
from taskd.core.timeouts import Timeouts
from tests.unit.core.answers import kinds, only, passed_on, told


@pytest.mark.parametrize(
    "limits", [(0.0, 10.0), (-1.0, 10.0), (10.0, 10.0), (11.0, 10.0), (1.0, float("inf"))]
)
def test_limits_of_hangs_that_are_not_in_order_are_refused(limits: tuple[float, float]) -> None:
    floor_s, ceiling_s = limits
    with pytest.raises(ValueError, match="must be positive and in order"):
        Timeouts.derive(30.0, hang_floor_s=floor_s, hang_ceiling_s=ceiling_s)


def test_domains_are_shown_in_words() -> None:
    shown = str(Domains(Domain.ON, Domain.EXCEPTION))
    assert shown == "default on, communication exception"


def test_a_change_of_phase_that_no_table_knows_is_written_down_and_breaks_the_invariants() -> None:
    timeouts = Timeouts.derive(30.0)
    job = JobState(
        timeouts=timeouts,
        membership=Membership(),
        leases=Leases(timeouts),
        hangs=HangDetector(timeouts),
    )
    job.phase = JobPhase.RUNNING
    check(job)
    job.declare("a rank started", JobPhase.JOINING, frozenset({JobPhase.RUNNING}))
    assert job.undeclared == []
    job.declare("a rank started", JobPhase.JOINING, frozenset({JobPhase.PAUSING}))
    assert job.undeclared == ["a rank started: joining to running"]
    assert "no table knows that a rank started" in job.story.last()
    with pytest.raises(AssertionError):
        check(job)


def test_no_whole_copy_ends_a_job_that_may_only_retry(manager) -> None:
    job = manager(per_node=2, strategies="retry").joined()
    job.raise_(0, clean=False)
    end = only(job.pause(1, 5, clean=False), do.GiveUp)
    assert end.reason.startswith("no clean copy of the state is left")
    assert job.machine.phase is JobPhase.ENDING


def test_a_fault_that_progress_has_forgotten_is_forgotten_once() -> None:
    """It was a consequence, which is known after new commits only: later deaths still count."""
    stagnation = Stagnation()

    def death(make_rank: int, generation: int, version: int) -> TimedFault:
        fault = Fault(FaultKind.KILLED, make_rank, 0, "SIGKILL", version)
        known = TimedFault(fault, float(generation), float(generation))
        known.generation = generation
        stagnation.saw(float(generation), generation, version)
        stagnation.take(known)
        return known

    old = death(1, 1, 5)
    for generation in range(2, DEATH_LIMIT + 1):
        death(1, generation, 6)
        stagnation.forget(old)
    assert stagnation.verdict() is None
    death(1, DEATH_LIMIT + 1, 6)
    stagnation.forget(old)
    assert stagnation.verdict() is not None


def test_a_node_that_has_nothing_of_a_rank_is_no_source(manager) -> None:
    job = manager(nodes=2, per_node=1, strategies="dump").joined()
    for rank in job.ranks:
        job.worker(ev.WorkerHolds, rank, f"s{rank}")
    job.send(ev.MirrorsHeld, 0, ((1, (4, 5)),))
    assert job.machine.membership.mirrors == {1: {0: (4, 5)}}
    job.send(ev.MirrorsHeld, 0, ((1, ()),))
    assert job.machine.membership.mirrors == {1: {}}
    job.send(ev.AgentLeft, 1, "stopped", "")
    assert "no dump: " in only(job.pause(0, 5, snapshots=(4, 5)), do.GiveUp).reason


class TestNode:
    def test_what_an_earlier_life_held_is_not_taken_for_what_this_one_has(self, node) -> None:
        agent = node()
        agent.worker(ev.WorkerHolds, 0, "a")
        agent.exit(0)
        agent.replace(0)
        (event,) = told(agent.worker(ev.WorkerHolds, 0, "b", incarnation=0))
        assert (event.incarnation, event.shard) == (0, "b"), (
            "the manager knows itself that it is late"
        )
        reports = agent.machine.registration(agent.now).workers
        assert [report.shard for report in reports] == ["a", ""]

    @pytest.mark.parametrize("kind", [do.Dump, do.Publish])
    def test_an_order_for_the_checkpoint_goes_to_every_live_worker(self, node, kind) -> None:
        agent = node(3)
        agent.command(do.Interrupt, 1, "x")
        agent.exit(1)
        details = {do.Dump: (5, (0, 2), 3, "reason", "1-1"), do.Publish: (0, 0, 0, False)}[kind]
        commands = agent.command(kind, 1, *details)
        assert passed_on(commands) == [(0, kind.__name__), (2, kind.__name__)]

    def test_it_begins_with_no_generation_and_no_restart(self, node) -> None:
        event = node().machine.registration(7.0)
        assert (event.generation, event.restarts_used) == (0, 0)

    def test_a_tick_before_anything_is_due_leaves_no_trace(self, node) -> None:
        agent = node()
        agent.worker(ev.AlarmRang, 0, agent.now, 5, "step", (5,))
        deadline = agent.machine.next_deadline()
        told_before = len(agent.machine.story)
        assert agent.send(ev.Tick, at=deadline - 0.001) == []
        assert len(agent.machine.story) == told_before
        agent.send(ev.Tick, at=deadline)
        assert len(agent.machine.story) > told_before

    def test_an_exception_of_a_rank_that_never_declared_says_that_it_is_in_its_function(
        self, node, make_fault
    ) -> None:
        agent = node(1, declared=False)
        agent.worker(ev.WorkerRaised, 0, 0, make_fault(FaultKind.RAISED, 0, 0, "x"), True, 0.0)
        (report,) = agent.machine.registration(agent.now).workers
        assert (report.declared, report.entered) == (True, True)

    def test_a_rank_that_asks_how_far_to_go_is_whole(self, node) -> None:
        """It was inconsistent before it had come so far."""
        agent = node(1)
        agent.command(do.Interrupt, 1, "x")
        agent.worker(ev.WorkerPaused, 0, 1, 5, False)
        agent.command(do.Resume, 1, 5, (), 1)
        agent.command(do.Interrupt, 2, "y")
        agent.worker(ev.WorkerMayAdvance, 0, 2, 7)
        (report,) = agent.machine.registration(agent.now).workers
        assert (report.state, report.version, report.clean) == ("paused", 7, True)

    def test_how_many_failures_one_registration_tells_is_bounded(self, node) -> None:
        """It is one message."""
        agent = node(40)
        for rank in range(40):
            agent.exit(rank)
        reports = agent.machine.registration(agent.now).workers
        told_of = [report.rank for report in reports if report.failure is not None]
        assert told_of == list(range(32))
        assert {str(report.state.value) for report in reports} == {"lost"}

    def test_a_start_that_waits_for_the_old_process_is_called_for_the_newest_generation(
        self, node
    ) -> None:
        agent = node(1)
        agent.command(do.RestartGroup, 1, 1, "all", ((0, 1),))
        assert agent.command(do.Interrupt, 2, "another fault") == []
        (spawn,) = [
            command
            for command in agent.exit(0, -15, incarnation=0)
            if isinstance(command, do.SpawnWorker)
        ]
        assert (spawn.gated, spawn.generation) == (True, 2)
        agent.worker(ev.WorkerStarted, 0, 1001)
        (report,) = agent.machine.registration(agent.now).workers
        assert report.state == "starting", "it waits at the gate"
        resume = agent.command(do.Resume, 2, 5, (), 1)
        assert passed_on(resume) == [(0, "Resume")], "it was started for this generation"


class TestTheStory:
    """Whatever is ignored is written down, with the reason."""

    def said(self, job) -> str:
        return job.machine.story.last(3)

    def test_of_exceptions(self, manager) -> None:
        job = manager().joined()
        job.raise_(0)
        job.pause_all()
        job.raise_(1, generation=0)
        assert "ignored: raised in generation 0, answered already" in self.said(job)

    def test_of_an_exception_that_crosses_a_later_interrupt(self, manager) -> None:
        job = manager().joined()
        job.raise_(0)
        job.pause_all()
        job.lose(1)
        job.raise_(2, generation=0)
        assert "ignored: raised in generation 0, which is over" in self.said(job)

    def test_of_an_exception_that_is_told_again_while_ranks_join(self, manager) -> None:
        job = manager(nodes=2, per_node=1)
        job.register(0)
        job.raise_(0)
        before = len(job.machine.story)
        job.raise_(0)
        assert len(job.machine.story) == before + 2
        assert "answered already" in self.said(job)

    def test_of_a_recovery(self, manager) -> None:
        job = manager().joined()
        job.recover(0)
        assert "ignored: recovered in generation 0, which is over" in self.said(job)

    def test_the_strategy_and_why_no_cheaper_one(self, manager) -> None:
        job = manager().joined()
        job.lose(1)
        lines = "\n".join(describe(entry) for entry in job.machine.story)
        assert "strategy recover-in-place: 1 process is gone, the others hold the state" in lines
        assert "; not retry: 1 process is gone" in lines


def test_leases_are_no_wait_for_something(manager) -> None:
    job = manager().joined()
    assert job.machine.next_deadline() is not None
    assert job.machine.next_deadline(with_leases=False) is None
    job.lose(1)
    assert job.machine.next_deadline(with_leases=False) is not None


def test_the_step_of_a_rank_that_returned_counts_as_committed(manager) -> None:
    """It dies with the only copy: the step before it is done again, which the record says."""
    job = manager(per_node=2).joined()
    job.return_(0, 10)
    job.lose(0, version=None)
    job.pause(1, 9)
    assert only(job.pause(0, None), do.Resume).version == 9
    job.recover(0, 10)
    record = only(job.recover(1, 10), do.RecordRecovery).record
    assert record.steps_redone == 1


def test_what_a_dead_rank_left_half_done_is_not_named_as_a_torn_copy() -> None:
    cut = plan_cut([Copy(0, 5, clean=False, alive=False), Copy(1, None, replaced=True)], 5)
    assert isinstance(cut, NoCut)
    assert cut.reason.startswith("no live rank holds the state")


def test_a_status_that_comes_after_its_recovery_is_no_reason_to_stop_the_next_one(
    manager, make_fault
) -> None:
    """The third equal exit of a rank ends a job; this one is over when it becomes known."""
    job = manager().joined()
    for _ in range(2):
        job.lose(1, FaultKind.EXITED, "exit 3")
        job.pause_all()
        job.recover_all(5)
    life = job.incarnation(1)
    job.lose(1)
    job.pause_all()
    job.recover_all(5)
    job.lose(2, FaultKind.KILLED, "SIGKILL")
    assert job.machine.phase is JobPhase.PAUSING
    how = make_fault(FaultKind.EXITED, 1, life, "exit 3", version=5)
    assert job.worker(ev.WorkerExitKnown, 1, how, incarnation=life) == []
    assert job.machine.phase is JobPhase.PAUSING


def test_a_suspect_of_a_rank_that_has_ended_is_none_any_more(manager) -> None:
    job = manager(nodes=2, per_node=1)
    job.register(0)
    job.raise_(0, kind=FaultKind.COMMUNICATION)
    job.send(ev.AgentLeft, 0, "succeeded", "")
    assert job.register(1) == []
    assert job.machine.phase is JobPhase.RUNNING


def test_a_suspected_exception_is_known_to_a_manager_that_was_restarted(manager) -> None:
    job = manager(nodes=2, per_node=1)
    job.register(0, ev.WorkerReport(0, 0, "running", True, 5), generation=3)
    job.raise_(0, kind=FaultKind.COMMUNICATION, generation=3)
    job.register(1, ev.WorkerReport(1, 0, "running", True, 5), generation=2)
    assert job.machine.phase is JobPhase.PAUSING
    job.pause_all()
    record = only(job.recover_all(), do.RecordRecovery).record
    assert "is not known" not in record.reason


def test_the_names_of_signals_are_those_of_linux() -> None:
    """Spelt out in core, so that a story reads the same on every machine."""
    for number in signal.valid_signals():
        name = getattr(number, "name", None)
        shown = exit_fault(0, 0, -int(number)).detail
        assert shown in {name, f"signal {int(number)}"}
    for number in (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 31):
        assert exit_fault(0, 0, -number).detail == signal.Signals(number).name


def test_a_replacement_that_has_started_waits_at_the_gate(manager) -> None:
    job = manager().joined()
    job.lose(1)
    job.worker(ev.WorkerStarted, 1, 1001)
    assert job.machine.membership.members[1].state.value == "starting"
    for rank in (0, 2, 3):
        assert job.pause(rank) == []
    assert only(job.pause(1, None), do.Resume).version == 5


def test_failures_without_a_version_that_take_turns_are_not_equal(manager) -> None:
    """Each life is long enough to count as progress."""
    job = manager().joined(declared=False)
    for number in range(8):
        for _ in range(7):
            job.hear_all_until(job.now + SHORT_LIFE_S / 6)
        commands = job.lose(1, FaultKind.EXITED, f"exit {3 + number % 2}", version=None)
        assert "RestartGroup" in kinds(commands)
        assert "ReportNoProgress" not in kinds(commands)
        for rank in job.ranks:
            job.worker(ev.WorkerStarted, rank, 1)


def test_a_node_that_is_stopping_starts_nobody_who_waits(node) -> None:
    """A start was held back because those before it had come to nothing."""
    agent = node()
    agent.exit(1)
    for incarnation in (1, 2):
        agent.replace(1, incarnation, incarnation)
        agent.worker(ev.WorkerStartFailed, 1, "[Errno 24]")
    assert agent.replace(1, 3, 3) == []
    held_until = agent.machine.next_deadline()
    assert held_until is not None
    agent.command(do.GiveUp, 4, "enough", None)
    said = kinds(agent.send(ev.Tick, at=held_until)) + kinds(
        agent.send(ev.Tick, at=held_until + 60)
    )
    assert "SpawnWorker" not in said
    assert kinds(agent.exit(0, -15)) == ["FinishRun"]


def test_nobody_to_profile_is_nobody_to_tell() -> None:
    board = Switchboard()
    board.ask(711, 100.0)
    assert board.next_deadline([0]) is not None
    assert board.next_deadline([]) is None
