"""NodeMachine: without a manager, and what a new one learns of it."""

import pytest

from taskd.core import commands as do
from taskd.core import events as ev
from taskd.core.faults import FaultKind
from taskd.core.phase import NodePhase
from tests.unit.core.answers import kinds, passed_on, told


class TestWhatANewManagerLearnsOfARecovery:
    def reports(self, agent) -> dict[int, tuple]:
        workers = agent.machine.registration(agent.now + 2.0).workers
        return {
            report.rank: report.failure
            and (report.failure.replaced, report.failure.fault.detail, report.failure.age_s)
            for report in workers
        }

    def test_how_and_when_a_life_failed(self, node) -> None:
        agent = node()
        agent.alarm(1)
        died_at = agent.now - 0.01
        agent.exit(1)
        assert self.reports(agent) == {
            0: None,
            1: (False, "SIGKILL", pytest.approx(agent.now + 2.0 - died_at)),
        }

    def test_that_it_was_replaced_until_it_has_committed_again(self, node) -> None:
        agent = node()
        agent.alarm(1)
        died_at = agent.now - 0.01
        agent.command(do.Interrupt, 1, "x")
        agent.replace(1)
        agent.worker(ev.WorkerExited, 1, -9, 5, "step", (5,), None, incarnation=0)
        agent.worker(ev.WorkerStarted, 1, 7)
        assert self.reports(agent)[1] == (True, "SIGKILL", pytest.approx(agent.now + 2.0 - died_at))
        agent.command(do.Resume, 1, 5, (), 1)
        agent.worker(ev.WorkerRecovered, 1, 1, 6, 0.1, 0.1, 0.1)
        assert self.reports(agent)[1] is None

    def test_the_first_of_two_that_failed_counts_if_the_second_did_not(self, node) -> None:
        agent = node()
        agent.exit(1)
        agent.replace(1)
        agent.replace(1, 2)
        assert self.reports(agent)[1][:2] == (True, "SIGKILL")


class TestWithoutAManager:
    def test_a_fault_waits_a_little_for_one_that_was_never_there(self, node) -> None:
        agent = node(manager=False)
        assert agent.alarm(1) == []
        assert agent.exit(1) == []
        assert agent.machine.next_deadline() == pytest.approx(agent.now - 0.01 + 2)
        assert agent.tick() == [
            do.FallBack("cause", 0, "rank 1 ended with SIGKILL at step 5, and no manager answers")
        ]
        assert agent.machine.phase is NodePhase.DONE

    def test_and_longer_for_one_that_was(self, node) -> None:
        agent = node()
        agent.exit(1)
        agent.send(ev.ManagerLost)
        assert agent.machine.next_deadline() == pytest.approx(agent.now + 10)
        assert kinds(agent.tick()) == ["FallBack"]

    def test_and_longer_still_where_the_next_one_is_elected(self, node) -> None:
        agent = node()
        agent.exit(1)
        agent.send(ev.ManagerLost, 20.0)
        assert agent.machine.next_deadline() == pytest.approx(agent.now + 30)

    def test_but_not_for_one_that_refused_us(self, node) -> None:
        agent = node(manager=False)
        agent.send(ev.ManagerRefused, "wrong job")
        agent.exit(1)
        assert kinds(agent.tick(at=agent.now)) == ["FallBack"]

    @pytest.mark.parametrize("has_fault", [False, True])
    def test_a_node_whose_place_was_taken_meanwhile_ends(self, node, has_fault) -> None:
        """Its workers may wait for ever in a collective: no fault of theirs need come."""
        agent = node()
        agent.send(ev.ManagerLost)
        assert not has_fault or agent.exit(1) == []
        (finish,) = agent.send(ev.ManagerRefused, "node 0 is taken by another agent", True)
        assert isinstance(finish, do.FinishRun)
        assert finish.outcome == "failed"
        assert finish.reason.startswith("node 0 is taken by another agent: the job goes on ")
        assert [fault.rank for fault in finish.faults] == [1] * has_fault
        assert agent.machine.phase is NodePhase.DONE

    def test_one_that_has_never_joined_goes_on_plainly_whoever_has_the_place(self, node) -> None:
        agent = node(manager=False)
        agent.send(ev.ManagerRefused, "node 0 is taken by another agent", True)
        agent.exit(1)
        assert kinds(agent.tick(at=agent.now)) == ["FallBack"]

    def test_who_returned_and_was_called_out_is_not_released(self, node) -> None:
        """The agent stood still: the manager's call and the end of its patience come together."""
        agent = node(1, manager=False)
        agent.worker(ev.WorkerReturned, 0, 0, 10)
        agent.now += 5
        agent.command(do.Interrupt, 1, "rank 1 is dead")
        assert agent.send(ev.Tick, at=agent.now) == []
        agent.worker(ev.WorkerPaused, 0, 1, 10, True)
        agent.send(ev.ManagerJoined, 1, 0)
        agent.command(do.Resume, 1, 10, (), 1)
        agent.worker(ev.WorkerReturned, 0, 1, 10)
        assert passed_on(agent.command(do.Release, 1)) == [(0, "Release")]

    def test_paused_workers_need_it_too(self, node) -> None:
        agent = node()
        agent.command(do.Interrupt, 1, "x")
        agent.worker(ev.WorkerPaused, 0, 1, 5, True)
        agent.send(ev.ManagerLost)
        tell, fall_back = agent.tick()
        assert passed_on([tell]) == [(0, "GiveUp")]
        assert (tell.command.culprit, fall_back.reason) == (
            None,
            "rank 0 waits, and no manager answers",
        )

    def test_a_worker_that_raised_is_told_to_raise(self, node, make_fault) -> None:
        agent = node(1, manager=False)
        agent.worker(
            ev.WorkerRaised, 0, 0, make_fault(FaultKind.RAISED, 0, 0, "x", version=5), True
        )
        tell, fall_back = agent.tick()
        assert tell.command.culprit == 0
        assert isinstance(fall_back, do.FallBack)

    def test_when_it_is_back_it_hears_everything(self, node, make_fault) -> None:
        agent = node(4)
        agent.send(ev.ManagerLost)
        agent.alarm(0)
        agent.exit(0, -9)
        agent.worker(
            ev.WorkerRaised, 1, 0, make_fault(FaultKind.RAISED, 1, 0, "x", version=5), False
        )
        agent.worker(ev.WorkerReturned, 2, 0, 10)
        registration = agent.machine.registration(agent.now)
        assert [(report.state, report.version,
        report.clean) for report in registration.workers] == [
            ("lost", 5, True), ("paused", 5, False), ("returned", 10, True),
            ("running", None, True),
        ]  # fmt: skip
        events = told(agent.send(ev.ManagerJoined, 3, 7, at=agent.now + 1))
        assert [type(event).__name__ for event in events] == [
            *["WorkerStarted", "WorkerDeclared"] * 3,
            "WorkerLost", "WorkerExitKnown", "WorkerRaised", "WorkerReturned",
        ]  # fmt: skip
        assert events[6].age_s == pytest.approx(1.05, abs=0.02)
        assert all(event.now == agent.now for event in events)
        assert agent.machine.restarts_used == 7
        assert agent.machine.next_deadline() is None

    def test_a_rank_may_declare_itself_before_its_start_is_known_here(self, node) -> None:
        """Its word and the forkserver's come by different ways: the manager hears of both."""
        agent = node(1, manager=False, started=False)
        agent.worker(ev.WorkerDeclared, 0, True)
        (event,) = told(agent.send(ev.ManagerJoined, 0, 0))
        assert (type(event), event.rank, event.entered) == (ev.WorkerDeclared, 0, True)

    def test_what_happens_while_it_takes_our_registration_is_not_lost(self, node) -> None:
        """The registration on its way says less than what is known when it is accepted."""
        agent = node(2, manager=False, started=False)
        registration = agent.machine.registration(agent.now)
        assert [
            (report.state, report.declared, report.entered) for report in registration.workers
        ] == [("starting", False, False)] * 2
        agent.worker(ev.WorkerStarted, 0, 1000)
        agent.worker(ev.WorkerDeclared, 0)
        agent.worker(ev.WorkerDeclared, 0, True)
        agent.worker(ev.WorkerStarted, 1, 1001)
        events = told(agent.send(ev.ManagerJoined, 0, 0))
        assert [(type(event), event.rank) for event in events] == [
            (ev.WorkerStarted, 0),
            (ev.WorkerDeclared, 0),
            (ev.WorkerStarted, 1),
        ]
        assert events[1].entered
        assert all(event.now == agent.now for event in events)

    def test_of_one_that_died_meanwhile_it_hears_after_those_who_can_be_recovered(
        self, node
    ) -> None:
        """Else all would be restarted: at the registration nobody had said that he can be."""
        agent = node(2, manager=False, started=False)
        agent.machine.registration(agent.now)
        for rank in range(2):
            agent.worker(ev.WorkerStarted, rank, 1000 + rank)
            agent.worker(ev.WorkerDeclared, rank, True)
        agent.alarm(0)
        events = told(agent.send(ev.ManagerJoined, 0, 0))
        assert [(type(event), event.rank) for event in events] == [
            (ev.WorkerStarted, 1),
            (ev.WorkerDeclared, 1),
            (ev.WorkerLost, 0),
        ]

    def test_workers_that_returned_are_released_alone(self, node) -> None:
        agent = node(manager=False)
        agent.worker(ev.WorkerReturned, 0, 0, 10)
        assert agent.machine.next_deadline() is None
        agent.worker(ev.WorkerReturned, 1, 0, 10)
        assert passed_on(agent.tick()) == [(0, "Release"), (1, "Release")]
        agent.exit(0, 0)
        assert kinds(agent.exit(1, 0)) == ["FinishRun"]

    def test_registration_says_who_we_are(self, node) -> None:
        agent = node(
            2,
            node_count=3,
            world_size=6,
            max_restarts=9,
            generation=2,
            restarts_used=1,
            incarnations={1: 4},
        )
        event = agent.machine.registration(7.0, "why")
        assert (event.now, event.cause, event.node_rank, event.agent_incarnation) == (
            7.0,
            "why",
            0,
            "me",
        )
        assert (event.node_count, event.world_size, event.max_restarts) == (3, 6, 9)
        assert (event.generation, event.restarts_used) == (2, 1)
        assert [(report.rank, report.incarnation, report.state) for report in event.workers] == [
            (0, 0, "running"), (1, 4, "running"),
        ]  # fmt: skip


AWAITED_S = 300.0


class TestCutOff:
    """In a job that replaces nodes others have a manager, and wait for this node for AWAITED_S."""

    def lost(self, node, **arguments):
        agent = node(awaited_s=AWAITED_S, **arguments)
        agent.send(ev.ManagerLost)
        return agent

    def test_a_fault_waits_for_as_long_as_the_others_wait(self, node) -> None:
        agent = self.lost(node)
        lost_at = agent.now
        agent.exit(1)
        assert agent.machine.next_deadline() == pytest.approx(lost_at + AWAITED_S)
        (finish,) = agent.tick()
        assert isinstance(finish, do.FinishRun)
        assert finish.outcome == "failed"
        assert finish.reason.startswith("rank 1 ended with SIGKILL at step 5, and this node was ")
        assert [fault.rank for fault in finish.faults] == [1]
        assert agent.machine.phase is NodePhase.DONE

    def test_when_the_link_is_whole_again_the_fault_is_told(self, node) -> None:
        agent = self.lost(node)
        agent.exit(1)
        said = told(agent.send(ev.ManagerJoined, 1, 0))
        assert [event.rank for event in said if isinstance(event, ev.WorkerLost)] == [1]
        assert agent.machine.next_deadline() is None

    def test_a_host_that_answers_and_has_no_manager_is_waited_for_as_usual(self, node) -> None:
        """Then the others have none, either."""
        agent = self.lost(node)
        agent.exit(1)
        agent.now += 20
        agent.send(ev.ManagerHostHeard, True)
        assert agent.machine.next_deadline() == pytest.approx(agent.now + 10)
        agent.send(ev.ManagerHostHeard, True)
        assert agent.machine.next_deadline() == pytest.approx(agent.now - 0.01 + 10)
        assert kinds(agent.tick()) == ["FallBack"]

    def test_a_host_that_answers_now_and_then_is_given_time_once(self, node) -> None:
        agent = self.lost(node)
        agent.send(ev.ManagerHostHeard, True)
        answered_at = agent.now
        agent.exit(1)
        for _ in range(3):
            agent.now += 4
            agent.send(ev.ManagerHostHeard, False)
            agent.send(ev.ManagerHostHeard, True)
        assert agent.machine.next_deadline() == pytest.approx(answered_at + 10, abs=0.1)
        assert kinds(agent.tick()) == ["FallBack"]

    def test_a_host_that_answered_and_does_so_no_more(self, node) -> None:
        agent = self.lost(node)
        agent.send(ev.ManagerHostHeard, True)
        answered_at = agent.now
        agent.exit(1)
        agent.send(ev.ManagerHostHeard, False)
        assert agent.machine.next_deadline() == pytest.approx(answered_at + AWAITED_S)

    def test_a_fault_that_comes_when_nobody_waits_any_more(self, node) -> None:
        """The timeout of a collective may be half an hour."""
        agent = self.lost(node)
        agent.now += 2 * AWAITED_S
        agent.exit(1)
        assert agent.machine.next_deadline() == pytest.approx(agent.now - 0.01 + 10, abs=0.1)
        assert kinds(agent.tick()) == ["FinishRun"]

    def test_ranks_that_have_returned_are_released_all_the_same(self, node) -> None:
        agent = self.lost(node)
        for rank in range(2):
            agent.worker(ev.WorkerReturned, rank, 0, 10)
        assert passed_on(agent.tick(at=agent.now + 10)) == [(0, "Release"), (1, "Release")]

    def test_a_script_without_taskd_is_not_waited_for(self, node) -> None:
        agent = self.lost(node, declared=False)
        agent.exit(1)
        assert kinds(agent.tick(at=agent.now + 10)) == ["FallBack"]

    def test_where_nodes_are_not_replaced_nobody_asks(self, node) -> None:
        agent = node()
        agent.send(ev.ManagerLost)
        agent.exit(1)
        agent.send(ev.ManagerHostHeard, False)
        assert kinds(agent.tick(at=agent.now + 10)) == ["FallBack"]

    def test_a_manager_that_was_never_there_does_not_make_it_cut_off(self, node) -> None:
        agent = node(manager=False, awaited_s=AWAITED_S)
        agent.send(ev.ManagerHostHeard, False)
        agent.exit(1)
        assert kinds(agent.tick(at=agent.now + 2)) == ["FallBack"]

    @pytest.mark.parametrize("is_first", [False, True])
    def test_a_refusal_ends_the_wait(self, node, is_first) -> None:
        """The job of the others has ended meanwhile: a manager that is left says so."""
        agent = self.lost(node)
        if is_first:
            assert self.refuse(agent) == []
        assert agent.exit(1) == []
        if not is_first:
            assert self.refuse(agent) == []
        (finish,) = agent.tick()
        assert isinstance(finish, do.FinishRun)
        assert "(the job has ended: of another reason)" in finish.reason

    @staticmethod
    def refuse(agent):
        return agent.send(ev.ManagerRefused, "the job has ended: of another reason")

    def test_a_refusal_costs_nothing_while_nothing_fails(self, node) -> None:
        agent = self.lost(node)
        assert self.refuse(agent) == []
        assert agent.machine.next_deadline() is None
