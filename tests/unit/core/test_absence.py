"""RecoveryMachine and NodeMachine: a lost node is waited for, and another agent takes its place."""

import pytest

from taskd.core import commands as do
from taskd.core import events as ev
from taskd.core.faults import FaultKind
from taskd.core.node import NodeMachine
from taskd.core.phase import JobPhase, NodePhase
from taskd.core.timeouts import Timeouts
from tests.unit.core.answers import kinds, only, plan

_NOBODY = "nobody took its place within 270 s"


def _waiting(manager, strategies: str = "recover"):
    """Two nodes of two ranks; the second has been silent for a lease."""
    job = manager(nodes=2, per_node=2, strategies=strategies, reschedule_s=270.0).joined()
    job.send(ev.AgentHeard, 0, at=115.0)
    job.tick()
    return job, job.tick()


def _nothing_runs(job, node: int = 1, agent: str = "another") -> list[do.Command]:
    lives = [ev.WorkerReport(rank, 0, "lost") for rank in (2 * node, 2 * node + 1)]
    return job.register(node, *lives, agent=agent)


class TestTheManager:
    def test_all_wait_at_the_gate_for_a_lost_node(self, manager) -> None:
        job, said = _waiting(manager)
        assert kinds(said) == ["Interrupt"]
        assert said[0].reason == "the agent of node 1 has been silent for 30 s"
        assert job.pause(0, 7) == job.pause(1, 7) == []
        assert job.machine.phase is JobPhase.PAUSING
        assert job.machine.next_deadline(with_leases=False) == 400.02  # 270 s after the loss

    def _lost_while_joining(self, manager, *, others: int = 1):
        """Node 1 has been silent for a lease, and another one has not come yet."""
        job = manager(nodes=2 + others, per_node=2, strategies="recover", reschedule_s=20.0)
        for node in range(1 + others):
            job.register(node)
            job.worker(ev.WorkerDeclared, 2 * node, True)
        for node in range(1 + others):
            if node != 1:
                job.send(ev.AgentHeard, node, at=115.0)
        job.tick(), job.tick()
        assert job.machine.lost_nodes == [1]
        assert job.machine.phase is JobPhase.JOINING
        return job

    def test_one_that_is_lost_before_all_have_come_is_not_waited_for_for_ever(
        self, manager
    ) -> None:
        """Nobody can go on: neither without it, nor without the one that has never come."""
        job = self._lost_while_joining(manager)
        ticks = 0
        while job.machine.phase is JobPhase.JOINING:
            deadline = job.machine.next_deadline(with_leases=False)
            assert deadline is not None, "nothing is waited for"
            assert deadline > job.now, "a deadline that has come does nothing"
            job.hear_all_until(deadline - 0.5)
            said = job.tick(at=deadline)
            ticks += 1
            assert ticks < 5
        assert "ranks [4, 5] are not known to this manager" in only(said, do.GiveUp).reason

    def test_the_last_one_comes_and_the_lost_one_is_replaced(self, manager) -> None:
        job = self._lost_while_joining(manager)
        assert kinds(job.register(2)) == ["Interrupt"]
        assert job.machine.phase is JobPhase.PAUSING
        assert kinds(_nothing_runs(job)) == ["Interrupt", "ReplaceWorker", "ReplaceWorker"]

    def test_another_agent_takes_its_place_before_the_last_one_comes(self, manager) -> None:
        job = self._lost_while_joining(manager)
        said = _nothing_runs(job)
        assert kinds(said) == ["ReplaceWorker", "ReplaceWorker"]
        assert job.machine.phase is JobPhase.JOINING
        for rank in (2, 3):
            job.worker(ev.WorkerStarted, rank, 17)
        assert kinds(job.register(2)) == ["Interrupt"]
        for rank in (0, 1, 4, 5):
            job.pause(rank, 7)
        job.pause(2, None)
        resume = only(job.pause(3, None), do.Resume)
        assert resume.version == 7
        record = only(job.recover_all(8), do.RecordRecovery).record
        assert (record.steps_redone, record.restarts_used) == (0, 1)
        assert [fault.kind for fault in record.faults] == [FaultKind.NODE_LOST]

    def test_another_agent_takes_its_place(self, manager) -> None:
        job, _ = _waiting(manager)
        job.pause(0, 7), job.pause(1, 7)
        said = _nothing_runs(job)
        assert kinds(said) == ["Interrupt", "ReplaceWorker", "ReplaceWorker"]
        assert {(order.rank, order.incarnation) for order in said[1:]} == {(2, 1), (3, 1)}
        assert job.pause(2, None) == []
        resume = only(job.pause(3, None), do.Resume)
        assert (resume.version, plan(resume)) == (7, {2: 0, 3: 1})
        record = only(job.recover_all(8), do.RecordRecovery).record
        assert (record.strategy, record.steps_redone, record.restarts_used) == ("recover", 0, 1)
        assert [fault.kind for fault in record.faults] == [FaultKind.NODE_LOST]

    def test_its_own_agent_comes_back_with_its_workers(self, manager) -> None:
        """Only the link was cut: no process is replaced."""
        job, _ = _waiting(manager)
        job.pause(0, 7), job.pause(1, 7)
        lives = [ev.WorkerReport(rank, 0, "running", True, 7, entered=True) for rank in (2, 3)]
        assert kinds(job.register(1, *lives)) == ["Interrupt"]
        assert job.pause(2, 7) == []
        assert plan(only(job.pause(3, 7), do.Resume)) == {}

    def test_of_those_that_come_back_the_dead_alone_are_replaced(self, manager) -> None:
        job, _ = _waiting(manager)
        job.pause(0, 7), job.pause(1, 7)
        alive = ev.WorkerReport(2, 0, "running", True, 7, entered=True)
        said = job.register(1, alive, ev.WorkerReport(3, 0, "lost", True, 7, entered=True))
        assert kinds(said) == ["Interrupt", "ReplaceWorker"]
        assert only(said, do.ReplaceWorker).rank == 3

    def test_nobody_comes(self, manager) -> None:
        job, _ = _waiting(manager)
        job.pause(0, 7), job.pause(1, 7)
        job.hear_all_until(job.now + 265)
        give_up = only(job.tick(at=job.now + 10), do.GiveUp)
        assert (
            give_up.reason
            == f"the agent of node 1 has been silent for 30 s, and {_NOBODY} (node 1)"
        )

    def test_nobody_comes_and_the_others_hold_everything(self, manager) -> None:
        job, _ = _waiting(manager, strategies="recover,dump")
        job.pause(0, 7), job.pause(1, 7)
        job.hear_all_until(job.now + 265)
        dump = only(job.tick(at=job.now + 10), do.Dump)
        assert (dump.version, dump.writers) == (7, (0, 1))

    def test_a_second_node_is_lost_meanwhile(self, manager) -> None:
        job = manager(nodes=3, per_node=1, strategies="recover", reschedule_s=270.0).joined()
        job.send(ev.AgentHeard, 0, at=115.0), job.send(ev.AgentHeard, 2, at=115.0)
        job.tick(), job.tick()
        job.send(ev.AgentHeard, 0, at=140.0)
        job.pause(0, 7)
        job.tick(), job.tick()
        assert job.machine.check() is None
        for node in (2, 1):
            lost = ev.WorkerReport(node, 0, "lost")
            assert "ReplaceWorker" in kinds(job.register(node, lost, agent=f"new {node}"))
        assert job.pause(1, None) == []
        assert plan(only(job.pause(2, None), do.Resume)) == {1: 0, 2: 0}

    @pytest.mark.parametrize(
        ("strategies", "reschedule_s"), [("recover", 0.0), ("recover-in-place", 270.0)]
    )
    def test_not_where_it_is_not_allowed(
        self, manager, strategies: str, reschedule_s: float
    ) -> None:
        job = manager(nodes=2, per_node=1, strategies=strategies, reschedule_s=reschedule_s)
        job.joined().send(ev.AgentHeard, 0, at=115.0)
        job.tick()
        assert only(job.tick(), do.GiveUp).reason == "the agent of node 1 has been silent for 30 s"


class TestAPlaceThatIsHeld:
    def test_who_asks_for_it_gets_no_answer_and_has_the_other_doubted(self, manager) -> None:
        job = manager(nodes=2, per_node=2, strategies="recover", reschedule_s=270.0).joined()
        job.hear_all_until(110.0)
        asks = ev.AgentRegistered(
            job.now, "ask", 1, "another", 2, 4, 3, 0, 0,
            tuple(ev.WorkerReport(rank, 0, "lost") for rank in (2, 3)),
        )  # fmt: skip
        assert job.machine.postpones(asks)
        assert _nothing_runs(job) == []
        assert job.machine.membership.nodes[1].agent_incarnation == "agent1"
        job.send(ev.AgentHeard, 0, at=112.0)
        assert kinds(job.tick()) == ["Interrupt"], "heard last at 110, asked for at 110"
        assert job.now == 113.0
        assert not job.machine.postpones(asks)
        assert kinds(_nothing_runs(job)) == ["Interrupt", "ReplaceWorker", "ReplaceWorker"]

    def test_a_node_that_is_heard_keeps_it(self, manager) -> None:
        job = manager(nodes=2, per_node=2, strategies="recover", reschedule_s=270.0).joined()
        job.hear_all_until(110.0)
        _nothing_runs(job)
        job.hear_all_until(125.0)
        assert job.machine.is_present(1)
        assert job.machine.phase is JobPhase.RUNNING

    def test_the_agent_that_lost_it_is_refused_when_it_comes_back(self, manager) -> None:
        job, _ = _waiting(manager)
        _nothing_runs(job)
        old = ev.AgentRegistered(
            job.now, "again", 1, "agent1", 2, 4, 3, 0, 0,
            tuple(ev.WorkerReport(rank, 0, "running") for rank in (2, 3)),
        )  # fmt: skip
        assert not job.machine.postpones(old)
        assert "node 1 is taken" in job.machine.refusal(old)


class TestTheNode:
    def _substitute(self, until: float = 60.0) -> NodeMachine:
        return NodeMachine(
            1, (2, 3), Timeouts.derive(), node_count=2, world_size=4, substitute_until=until
        )

    def test_it_says_that_nothing_runs_and_starts_what_it_is_told(self) -> None:
        node = self._substitute()
        registered = node.registration(1.0)
        assert registered.is_substitute
        assert node.handle(ev.ManagerJoined(1.0, "accepted", 3, 2)) == []
        order = do.ReplaceWorker("node", 3, 1, 2, 1, 3)
        (spawn,) = node.handle(ev.CommandReceived(1.0, "order", order))
        assert (spawn.rank, spawn.incarnation, spawn.gated, spawn.generation) == (2, 1, True, 3)
        assert node.next_deadline() is None
        node.check()

    def test_it_does_not_ask_for_ever(self) -> None:
        node = self._substitute()
        assert node.next_deadline() == 60.0
        (finish,) = node.handle(ev.Tick(60.0, "tick"))
        assert finish.outcome == "failed"
        assert "no manager has given it this place" in finish.reason
        assert node.phase is NodePhase.DONE

    def test_a_refusal_is_final(self) -> None:
        node = self._substitute()
        (finish,) = node.handle(ev.ManagerRefused(1.0, "refused", "the job has 3 nodes"))
        assert (finish.outcome, finish.reason) == ("failed", "the job has 3 nodes")

    def test_a_node_with_workers_does_not_look_like_one(self) -> None:
        node = NodeMachine(1, (2, 3), Timeouts.derive(), node_count=2, world_size=4)
        assert not node.registration(1.0).is_substitute
        assert node.next_deadline() is None
