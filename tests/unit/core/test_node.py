"""NodeMachine: what one node does about its workers."""

from dataclasses import replace

import pytest

from taskd.core import commands as do
from taskd.core import events as ev
from taskd.core.exits import SIGKILL, SIGTERM
from taskd.core.faults import FaultKind
from taskd.core.phase import NodePhase
from tests.unit.core.answers import kinds, passed_on, told


class TestADeath:
    def test_a_declared_worker_is_lost_when_the_alarm_rings(self, node) -> None:
        agent = node()
        (lost,) = told(agent.alarm(1))
        assert (lost.fault.kind, lost.fault.version, lost.fault.phase) == (
            FaultKind.LOST,
            5,
            "step",
        )
        assert (lost.rank, lost.incarnation, lost.box_versions) == (1, 0, (5,))
        assert lost.age_s == pytest.approx(0.01)
        (known,) = told(agent.exit(1, -9))
        assert (known.fault.kind, known.fault.detail) == (FaultKind.KILLED, "SIGKILL")

    def test_without_an_alarm_the_exit_tells(self, node) -> None:
        (lost,) = told(node().exit(1, 3))
        assert (lost.fault.kind, lost.fault.detail, lost.fault.exit_code) == (
            FaultKind.EXITED,
            "exit 3",
            3,
        )

    def test_last_words_describe_the_exit(self, node, make_fault) -> None:
        words = make_fault(
            FaultKind.EXITED,
            1,
            0,
            "exit 1 after ValueError: x",
            signature="ValueError: x",
            traceback="Trace",
        )
        (lost,) = told(node().exit(1, 1, words=words))
        assert (lost.fault.detail, lost.fault.signature, lost.fault.traceback) == (
            "exit 1 after ValueError: x",
            "ValueError: x",
            "Trace",
        )

    @pytest.mark.parametrize(
        ("declared", "phase"), [(True, "exiting"), (False, "step"), (False, "boot")]
    )
    def test_who_may_be_ending_as_it_should_is_judged_by_the_exit_code(
        self, node, declared, phase
    ) -> None:
        agent = node(declared=declared)
        assert agent.alarm(1, phase) == []
        (lost,) = told(agent.exit(1, -11, phase))
        assert lost.fault.detail == "SIGSEGV"
        assert lost.age_s == pytest.approx(0.02)

    def test_a_second_alarm_changes_nothing(self, node) -> None:
        agent = node()
        agent.alarm(1)
        assert agent.alarm(1) == agent.alarm(0, incarnation=7) == []

    def test_a_dying_process_that_does_not_end_is_killed(self, node) -> None:
        agent = node()
        agent.alarm(1)
        (signal,) = agent.tick()
        assert (signal.rank, signal.incarnation, signal.signal_number) == (1, 0, SIGKILL)
        assert agent.machine.next_deadline() is None

    def test_a_worker_that_exits_0_in_its_function_has_failed(self, node) -> None:
        (lost,) = told(node().exit(1, 0, "exiting"))
        assert lost.fault.kind is FaultKind.EXITED_EARLY

    @pytest.mark.parametrize("phase", ["boot", "exiting"])
    def test_a_worker_that_declared_and_never_came_to_its_function_may_end_well(
        self, node, phase
    ) -> None:
        agent = node(2, declared=False)
        agent.worker(ev.WorkerDeclared, 1)
        assert agent.alarm(1, phase) == []
        (finished,) = told(agent.exit(1, 0, phase))
        assert isinstance(finished, ev.WorkerFinished)

    @pytest.mark.parametrize("is_alarm_heard", [True, False])
    def test_but_not_from_the_gate_where_all_others_are_to_meet_it(
        self, node, is_alarm_heard: bool
    ) -> None:
        agent = node(2, declared=False)
        agent.worker(ev.WorkerDeclared, 1)
        agent.command(do.Interrupt, 1, "rank 0 is dead")
        agent.worker(ev.WorkerPaused, 1, 1, None, True)
        (lost, *known) = told(
            (agent.alarm(1, "paused") if is_alarm_heard else []) + agent.exit(1, 0, "paused")
        )
        assert isinstance(lost, ev.WorkerLost)
        assert (known[0] if is_alarm_heard else lost).fault.kind is FaultKind.EXITED_EARLY

    def test_that_it_came_to_its_function_is_registered(self, node) -> None:
        agent = node(2, declared=False)
        agent.worker(ev.WorkerDeclared, 0)
        agent.worker(ev.WorkerDeclared, 1, True)
        assert [
            (report.declared, report.entered) for report in agent.machine.registration(0.0).workers
        ] == [(True, False), (True, True)]

    def test_a_replacement_that_exits_0_before_it_declares_has_failed(self, node) -> None:
        agent = node()
        agent.alarm(1)
        agent.exit(1)
        agent.replace(1)
        (lost,) = told(agent.exit(1, 0, "exiting"))
        assert lost.fault.kind is FaultKind.EXITED_EARLY

    def test_it_could_not_be_started(self, node) -> None:
        agent = node(started=False)
        (lost,) = told(agent.worker(ev.WorkerStartFailed, 1, "no memory"))
        assert (lost.fault.kind, lost.fault.detail) == (FaultKind.START_FAILED, "no memory")

    def test_its_end_is_known_once(self, node) -> None:
        agent = node()
        agent.exit(1)
        assert agent.exit(1) == agent.exit(1, incarnation=9) == []


class TestReplacement:
    def test_it_starts_at_once_and_the_old_process_is_killed_first(self, node) -> None:
        agent = node()
        agent.alarm(1)
        signal, spawn = agent.replace(1)
        assert (signal.incarnation, signal.signal_number) == (0, SIGKILL)
        assert spawn == do.SpawnWorker(
            "c", 1, 1, 1, gated=True, restarts_used=1, after_reaped=False
        )
        (known,) = told(agent.exit(1, incarnation=0))
        assert known.incarnation == 0
        assert kinds(agent.worker(ev.WorkerStarted, 1, 4711)) == ["TellManager"]

    def test_or_when_the_old_process_is_gone(self, node) -> None:
        agent = node(wait_for_exit=True)
        agent.alarm(1)
        assert kinds(agent.replace(1)) == ["SignalWorker"]
        *_, spawn = agent.exit(1, incarnation=0)
        assert spawn == do.SpawnWorker("c", 1, 1, 1, gated=True, restarts_used=1, after_reaped=True)

    def test_which_may_be_so_already(self, node) -> None:
        agent = node(wait_for_exit=True)
        agent.exit(1)
        (spawn,) = agent.replace(1)
        assert not spawn.after_reaped

    def test_orders_for_lives_that_are_over_or_not_here_are_ignored(self, node) -> None:
        agent = node()
        assert agent.replace(1, incarnation=0) == agent.replace(7) == []
        assert (
            agent.command(do.KillWorker, 1, 0, 7, 0, "x")
            == agent.command(do.KillWorker, 1, 0, 1, 5, "x")
            == []
        )
        agent.replace(1, generation=3)
        assert agent.replace(1, incarnation=2, generation=2) == []

    def test_a_signal_that_came_before_the_process_is_sent_again(self, node) -> None:
        agent = node()
        agent.exit(1)
        agent.replace(1)
        assert kinds(agent.command(do.KillWorker, 1, 0, 1, 1, "late")) == ["SignalWorker"]
        assert kinds(agent.replace(1, incarnation=2)) == ["SignalWorker", "SpawnWorker"]
        (signal,) = agent.worker(ev.WorkerStarted, 1, 4711, incarnation=1)
        assert (signal.incarnation, signal.signal_number) == (1, SIGKILL)
        assert agent.worker(ev.WorkerStarted, 1, 4711, incarnation=0) == []

    def test_kill_and_replace(self, node) -> None:
        agent = node()
        (signal,) = agent.command(do.KillWorker, 1, 0, 1, 0, "did not leave its step")
        assert signal.signal_number == SIGKILL
        assert agent.command(do.KillWorker, 1, 0, 1, 0, "again") == []
        assert kinds(agent.replace(1)) == ["SignalWorker", "SpawnWorker"]
        assert agent.exit(1, incarnation=0) == []

    def test_killed_before_it_was_asked_for(self, node) -> None:
        agent = node(wait_for_exit=True)
        agent.alarm(1)
        agent.replace(1)
        assert agent.command(do.KillWorker, 1, 0, 1, 1, "x") == []
        assert kinds(agent.exit(1, incarnation=0)) == ["TellManager"]

    def test_an_interrupt_reaches_a_replacement_that_is_held_back(self, node) -> None:
        agent = node(wait_for_exit=True)
        agent.alarm(1)
        agent.replace(1)
        assert passed_on(agent.command(do.Interrupt, 2, "x")) == [(0, "Interrupt")]
        *_, spawn = agent.exit(1, incarnation=0)
        assert (spawn.generation, spawn.gated) == (2, True)


class TestARecovery:
    def test_commands_go_to_live_workers_once(self, node) -> None:
        agent = node(3)
        agent.alarm(1)
        assert passed_on(agent.command(do.Interrupt, 1, "x")) == [
            (0, "Interrupt"),
            (2, "Interrupt"),
        ]
        agent.replace(1)
        assert agent.command(do.Interrupt, 1, "x") == []
        for rank, version in ((0, 5), (1, None), (2, 5)):
            (event,) = told(agent.worker(ev.WorkerPaused, rank, 1, version, True))
            assert event.rank == rank
        assert passed_on(agent.command(do.Resume, 1, 5, (), 1)) == [
            (0, "Resume"),
            (1, "Resume"),
            (2, "Resume"),
        ]
        assert agent.command(do.Resume, 1, 5, (), 1) == []
        assert agent.command(do.Resume, 0, 5, (), 1) == []
        assert agent.worker(ev.WorkerPaused, 0, 1, 5, True) == []
        (event,) = told(agent.worker(ev.WorkerRecovered, 0, 1, 6, 0.1, 0.1, 0.1))
        assert event.version == 6
        assert agent.worker(ev.WorkerRecovered, 0, 0, 6, 0.1, 0.1, 0.1) == []
        assert agent.machine.restarts_used == 1

    def test_an_interrupt_said_again_is_answered_again(self, node) -> None:
        agent = node()
        agent.command(do.Interrupt, 1, "x")
        agent.worker(ev.WorkerPaused, 0, 1, 5, False)
        (again,) = told(agent.command(do.Interrupt, 1, "x"))
        assert (again.rank, again.version, again.clean) == (0, 5, False)

    def test_who_could_do_a_step_more_waits_in_its_function(self, node) -> None:
        agent = node()
        agent.command(do.Interrupt, 1, "x", 5, True)
        (offer,) = told(agent.worker(ev.WorkerMayAdvance, 0, 1, 5))
        assert (offer.rank, offer.version) == (0, 5)
        report = agent.machine.registration(agent.now).workers[0]
        assert (report.state, report.may_advance) == ("paused", True)
        assert told(agent.command(do.Interrupt, 1, "x", 5, True)) == [
            replace(offer, now=agent.now)
        ], "it is told again"
        assert passed_on(agent.command(do.Advance, 1, 6, (0, 1))) == [(0, "Advance")], (
            "rank 1 has not asked"
        )
        agent.worker(ev.WorkerPaused, 0, 1, 6, True)
        assert agent.command(do.Advance, 1, 6, (0, 1)) == [], "it is there already"
        assert agent.machine.registration(agent.now).workers[0].state == "paused"

    def test_an_interrupt_that_was_lost_comes_with_the_resume(self, node, make_fault) -> None:
        agent = node(1)
        agent.worker(
            ev.WorkerRaised, 0, 0, make_fault(FaultKind.RAISED, 0, 0, "x", version=5), True
        )
        assert passed_on(agent.command(do.Resume, 1, 5, (), 1)) == [(0, "Interrupt"), (0, "Resume")]

    def test_what_an_earlier_life_says_is_ignored(self, node) -> None:
        agent = node()
        agent.exit(1)
        assert agent.worker(ev.WorkerPaused, 1, 1, 5, True) == []
        agent.replace(1)
        for kind, details in (
            (ev.WorkerPaused, (1, 5, True)), (ev.WorkerReturned, (1, 5)), (ev.WorkerDeclared, ()),
            (ev.WorkerRecovered, (1, 5, 0.1, 0.1, 0.1)),
        ):  # fmt: skip
            assert agent.worker(kind, 1, *details, incarnation=0) == []

    def test_what_is_no_command_for_an_agent_is_ignored(self, node) -> None:
        agent = node()
        assert agent.command(do.EndJob, 1, True, "") == []
        assert agent.send(ev.CommandReceived, "nonsense") == []


class TestSigtermToAWorker:
    def test_the_node_is_to_end(self, node) -> None:
        (drain,) = node().worker(ev.WorkerDraining, 1)
        assert drain == do.Drain(drain.cause, 0, "SIGTERM to rank 1")

    def test_one_that_is_being_ended_got_ours(self, node) -> None:
        agent = node(declared=False)
        agent.command(do.RestartGroup, 1, 1, "why", tuple((rank, 1) for rank in range(4)))
        assert agent.worker(ev.WorkerDraining, 0, incarnation=0) == []
        agent = node()
        agent.command(do.KillWorker, 0, 0, 1, 0, "hangs")
        assert agent.worker(ev.WorkerDraining, 1) == []
        agent.command(do.GiveUp, 0, "why", None, None)
        assert agent.worker(ev.WorkerDraining, 0) == []


class TestRestartOfTheGroup:
    def restart(self, agent, generation=1, incarnation=1):
        lives = tuple((rank, incarnation) for rank in range(4))
        return agent.command(do.RestartGroup, generation, 1, "why", lives)

    def test_processes_end_and_new_ones_follow(self, node) -> None:
        agent = node(declared=False)
        agent.exit(1, 1)
        store, *signals, spawn = self.restart(agent)
        assert store == do.OpenStore("c", 1)
        assert [(signal.rank, signal.signal_number) for signal in signals] == [(0, SIGTERM)]
        assert (spawn.rank, spawn.incarnation, spawn.gated, spawn.generation) == (1, 1, False, 1)
        assert self.restart(agent) == []
        (spawn,) = agent.exit(0, -15, incarnation=0)
        assert (spawn.rank, spawn.incarnation, spawn.after_reaped) == (0, 1, True)

    def test_who_does_not_end_is_killed(self, node) -> None:
        agent = node(1, declared=False)
        self.restart(agent)
        assert agent.machine.next_deadline() == pytest.approx(agent.now + 5)
        (signal,) = agent.tick()
        assert (signal.incarnation, signal.signal_number) == (0, SIGKILL)

    def test_a_second_restart_before_the_first_is_done(self, node) -> None:
        agent = node(1, declared=False)
        self.restart(agent)
        assert self.restart(agent, 2, 2) == [do.OpenStore("c", 2)]
        (spawn,) = agent.exit(0, -15, incarnation=0)
        assert (spawn.incarnation, spawn.generation) == (2, 2)

    def test_a_worker_that_was_dying_may_be_the_reason(self, node) -> None:
        agent = node(1, declared=False)
        agent.alarm(0)
        self.restart(agent)
        lost, spawn = agent.exit(0, -9, incarnation=0)
        assert (lost.event.incarnation, lost.event.fault.detail) == (0, "SIGKILL")
        assert lost.event.age_s == pytest.approx(0.03)
        assert isinstance(spawn, do.SpawnWorker)

    def test_a_worker_that_was_ended_for_it_is_not(self, node) -> None:
        agent = node(1, declared=False)
        self.restart(agent)
        assert kinds(agent.exit(0, -15, incarnation=0)) == ["SpawnWorker"]


class TestTheEnd:
    def test_released_workers_finish(self, node) -> None:
        agent = node()
        for rank in range(2):
            agent.worker(ev.WorkerReturned, rank, 0, 10)
        assert passed_on(agent.command(do.Release, 0)) == [(0, "Release"), (1, "Release")]
        assert agent.command(do.Release, 0) == []
        assert agent.alarm(0, "returned") == []
        (finished,) = told(agent.exit(0, 0))
        assert isinstance(finished, ev.WorkerFinished)
        *_, finish = agent.exit(1, 0)
        assert finish == do.FinishRun("cause", 0, "succeeded", "every worker of this node finished")
        assert agent.machine.phase is NodePhase.DONE
        assert agent.send(ev.Tick) == agent.worker(ev.WorkerDeclared, 0) == []

    def test_a_released_worker_that_fails_is_reported(self, node) -> None:
        agent = node()
        agent.command(do.Release, 0)
        (lost,) = told(agent.exit(0, 3))
        assert lost.fault.detail == "exit 3"

    def test_undeclared_workers_finish_by_themselves(self, node) -> None:
        agent = node(1, declared=False)
        assert kinds(agent.exit(0, 0, "boot")) == ["TellManager", "FinishRun"]

    def test_giving_up_lets_the_culprit_speak_and_stops_the_others(self, node, make_fault) -> None:
        agent = node(3)
        what = make_fault(FaultKind.RAISED, 1, 0, "ValueError: x", version=5)
        agent.worker(ev.WorkerRaised, 1, 0, what, True)
        agent.exit(2, 3)
        commands = agent.command(do.GiveUp, 0, "why", 1, what)
        assert passed_on(commands) == [(1, "GiveUp")]
        (signal,) = [command for command in commands if isinstance(command, do.SignalWorker)]
        assert (signal.rank, signal.signal_number) == (0, SIGTERM)
        assert agent.worker(ev.WorkerDeclared, 0) == agent.send(ev.ManagerLost) == []
        assert agent.exit(0, -15) == []
        (finish,) = agent.exit(1, 1)
        assert (finish.outcome, finish.reason) == ("failed", "why")
        assert [(fault.rank, fault.detail) for fault in finish.faults] == [
            (1, "ValueError: x"),
            (2, "exit 3"),
        ]

    def test_giving_up_is_obeyed_whatever_an_earlier_manager_ordered(self, node) -> None:
        """Its restart came after the registration with the manager that gives up."""
        agent = node(1)
        agent.command(do.RestartGroup, 2, 1, "an earlier manager", ((0, 2),))
        agent.exit(0, -15, incarnation=0)
        agent.worker(ev.WorkerStarted, 0, 4711)
        assert agent.machine.generation == 2
        (signal,) = agent.command(do.GiveUp, 0, "why", None, None)
        assert (signal.rank, signal.signal_number) == (0, SIGTERM)
        assert kinds(agent.exit(0, -15)) == ["FinishRun"]

    def test_who_does_not_stop_is_killed(self, node) -> None:
        agent = node(1)
        agent.command(do.GiveUp, 0, "why", None, None)
        assert agent.machine.next_deadline() == pytest.approx(agent.now + 30)
        assert [signal.signal_number for signal in agent.tick()] == [SIGKILL]
        assert kinds(agent.exit(0, -9)) == ["FinishRun"]

    def test_who_has_not_stopped_when_the_time_of_the_node_is_over_is_killed(self, node) -> None:
        agent = node(2)
        agent.command(do.GiveUp, 0, "why", None, None)
        agent.exit(1, -15)
        assert agent.send(ev.AgentDraining, 0, "SIGTERM", 25.0) == []  # it has begun only now
        (signal,) = agent.send(ev.AgentDraining, 0, "SIGTERM", 0.0)
        assert (signal.rank, signal.signal_number) == (0, SIGKILL)
        assert kinds(agent.exit(0, -9)) == ["FinishRun"]

    def test_nobody_is_left_to_be_stopped(self, node) -> None:
        agent = node(1)
        agent.exit(0, 3)
        (finish,) = agent.command(do.GiveUp, 0, "why", 7, None)
        assert [fault.detail for fault in finish.faults] == ["exit 3"]

    def test_a_worker_that_was_being_started_is_stopped_too(self, node) -> None:
        agent = node(2)
        agent.exit(1)
        agent.replace(1)
        agent.command(do.GiveUp, 1, "why", None, None)
        (signal,) = agent.worker(ev.WorkerStarted, 1, 4711)
        assert signal.signal_number == SIGTERM
        agent.exit(1, -15)
        assert agent.worker(ev.WorkerStarted, 1, 4711) == []
        agent.exit(0, -15)

    def test_a_start_that_fails_while_stopping(self, node) -> None:
        agent = node(1, started=False)
        agent.command(do.GiveUp, 0, "why", None, None)
        assert kinds(agent.worker(ev.WorkerStartFailed, 0, "no memory")) == ["FinishRun"]

    def test_how_it_died_is_told_even_if_it_was_only_known_while_stopping(self, node) -> None:
        agent = node(1)
        agent.alarm(0)
        agent.command(do.GiveUp, 0, "why", None, None)
        (finish,) = agent.exit(0, -11)
        assert [fault.detail for fault in finish.faults] == ["SIGSEGV"]


def test_a_process_that_nobody_needs_is_not_killed_when_its_alarm_rings(node) -> None:
    """It may have executed another program, which runs on."""
    agent = node(declared=False)
    assert agent.alarm(0, "boot", None) == []
    assert agent.machine.next_deadline() is None
    (finished,) = agent.exit(0, 0, "boot", None)
    assert isinstance(finished.event, ev.WorkerFinished)
