"""Where the ranks meet when the node is lost that hosts their store."""

from __future__ import annotations

from typing import Any

import pytest

from taskd.core import commands as do
from taskd.core import events as ev
from taskd.core.faults import Fault, FaultKind
from taskd.core.job.machine import RecoveryMachine
from taskd.core.node import NodeMachine
from taskd.core.phase import JobPhase
from taskd.core.timeouts import Timeouts
from tests.unit.core.answers import acts, kinds, only

_TIMEOUTS = Timeouts.derive(30.0)


class Job:
    """Nodes of one rank each, which have stores unless they are not `able`."""

    def __init__(
        self,
        nodes: int = 3,
        able: tuple[int, ...] = (0, 1, 2),
        strategies: tuple[str, ...] = ("recover",),
    ) -> None:
        self.machine = RecoveryMachine("job", _TIMEOUTS, nodes, 1, strategies, reschedule_s=270.0)
        self.now, self.nodes, self.able = 100.0, nodes, able

    def send(self, kind: type[ev.Event], *fields: Any) -> list[do.Command]:
        said = self.machine.handle(kind(self.now, "test", *fields))
        self.machine.check()
        return said

    def register(
        self,
        node: int,
        *,
        agent: str = "",
        state: str = "running",
        met_at: str = "",
        is_late: bool = False,
        generation: int = 0,
        first_host: int | None = None,
        is_declared: bool | None = None,
    ) -> list[do.Command]:
        agent = agent or f"agent {node}"
        has_entered = state == "running" if is_declared is None else is_declared
        report = ev.WorkerReport(
            node, 0, state, declared=has_entered, entered=has_entered, version=5
        )
        store = f"{agent}:1" if node in self.able else ""
        size = self.nodes
        return self.send(
            ev.AgentRegistered, node, agent, size, size, 10, generation, 0, (report,), store,
            met_at, is_late, "", 0, first_host,
        )  # fmt: skip

    def joined(self, first_host: int | None = None) -> Job:
        for node in range(self.nodes):
            self.register(node, first_host=first_host)
        return self

    def lose(self, *lost: int) -> list[do.Command]:
        """These nodes have been silent for a lease, the others not."""
        said: list[do.Command] = []
        for later_s in (20.0, 15.0):
            self.now += later_s
            for node in set(range(self.nodes)) - set(lost):
                said += self.send(ev.AgentHeard, node)
            said += self.send(ev.Tick)
            self.now += 2.1
            said += self.send(ev.Tick)
        return said

    def pause(self, rank: int, version: int | None = 5, incarnation: int = 0) -> list[do.Command]:
        generation = self.machine.generation
        return self.send(ev.WorkerPaused, rank, incarnation, generation, version, True)

    def replace(self, node: int) -> list[do.Command]:
        """Another torchrun takes the place, and its rank comes to the gate."""
        self.register(node, agent=f"late {node}", state="lost", is_late=True)
        incarnation = self.machine.membership.members[node].incarnation
        self.send(ev.WorkerStarted, node, incarnation, 1)
        return self.pause(node, None, incarnation)


def test_the_ranks_stay_where_they_are_while_node_0_is_there() -> None:
    job = Job().joined()
    assert kinds(job.lose(2)) == ["Interrupt"]
    assert job.pause(0) == job.pause(1) == []
    assert only(job.replace(2), do.Resume).store == ""


def test_without_node_0_they_meet_on_the_first_that_is_left() -> None:
    job = Job().joined()
    assert kinds(job.lose(0)) == ["Interrupt"]
    assert job.machine.meeting_store == "agent 1:1", "who takes the place asks for it already"
    assert job.pause(1) == job.pause(2) == []
    assert only(job.replace(0), do.Resume).store == "agent 1:1"


def test_the_store_of_the_rendezvous_is_lost_and_was_not_that_of_node_0() -> None:
    """Who comes late would look for the others there."""
    job = Job().joined(first_host=2)
    job.lose(2)
    assert job.machine.meeting_store == "agent 0:1"
    job.pause(0), job.pause(1)
    assert only(job.replace(2), do.Resume).store == "agent 0:1"


def test_node_0_has_a_store_of_its_own_beside_that_of_the_rendezvous() -> None:
    job = Job().joined(first_host=2)
    job.lose(0)
    assert job.machine.meeting_store == "agent 1:1"


def test_another_node_than_those_two_is_lost() -> None:
    job = Job().joined(first_host=2)
    job.lose(1)
    assert not job.machine.meeting_store


@pytest.mark.parametrize("able", [(), (2,)])
def test_nobody_else_has_one_but_the_host_of_the_rendezvous(able: tuple[int, ...]) -> None:
    assert acts(Job(able=able).joined(first_host=2).lose(2)) == ["GiveUp"]


def test_a_manager_that_was_started_again_hears_who_had_the_store_of_the_rendezvous() -> None:
    """In any order: the torchrun in the place of that node does not know it."""
    job = Job()
    job.register(2, agent="late 2", state="lost", is_late=True)
    job.register(0, first_host=2)
    said = job.register(1, first_host=2)
    assert kinds(said)[0] == "Interrupt"
    job.pause(0), job.pause(1)
    incarnation = job.machine.membership.members[2].incarnation
    job.send(ev.WorkerStarted, 2, incarnation, 1)
    assert only(job.pause(2, None, incarnation), do.Resume).store == "agent 0:1"


def test_a_store_cannot_be_on_a_node_that_does_not_exist() -> None:
    job = Job()
    event = ev.AgentRegistered(0.0, "", 0, "agent", 3, 3, 10, 0, 0, (), first_host=3)
    assert job.machine.refusal(event) == "node 3 is outside of a job of 3 nodes"


def test_who_is_started_again_does_not_meet_the_others_at_a_store_that_is_lost() -> None:
    """With static rendezvous the number of a node says where it belongs, and not that it may."""
    job = Job().joined()
    assert not job.machine.is_late(1)
    job.lose(0, 1)
    assert job.machine.is_late(1)


def test_the_node_is_lost_to_which_they_have_moved() -> None:
    job = Job().joined()
    job.lose(0)
    job.pause(1), job.pause(2)
    job.replace(0)
    for rank in range(3):
        incarnation = job.machine.membership.members[rank].incarnation
        generation = job.machine.generation
        job.send(ev.WorkerRecovered, rank, incarnation, generation, 6, 0.0, 0.0, 0.0, "")
    assert job.machine.phase is JobPhase.RUNNING
    job.lose(1)
    assert job.machine.meeting_store == "late 0:1"


def test_both_are_lost_at_once() -> None:
    job = Job().joined()
    job.lose(0, 1)
    assert job.machine.meeting_store == "agent 2:1"


@pytest.mark.parametrize("able", [(), (0,)])
def test_nobody_else_has_a_store(able: tuple[int, ...]) -> None:
    job = Job(able=able).joined()
    assert acts(job.lose(0)) == ["GiveUp"]


def test_the_last_store_goes_while_a_node_is_waited_for() -> None:
    """What all of them hold is saved, where that is allowed."""
    job = Job(able=(1,), strategies=("recover", "dump")).joined()
    job.lose(0)
    job.able = ()
    job.register(1, agent="agent 1", state="paused", generation=1)
    job.pause(1), job.pause(2)
    dump = only(job.replace(0), do.Dump)
    assert (dump.version, dump.writers) == (5, (1, 2))
    assert dump.reason.endswith(", and no node has a store to meet at")


def test_a_manager_that_was_started_again_hears_where_they_are() -> None:
    job = Job()
    job.register(0, agent="late 0", met_at="agent 1:1", is_late=True, generation=1)
    job.register(1, met_at="agent 1:1", generation=1)
    job.register(2, met_at="agent 1:1", generation=1)
    assert job.machine.meeting_store == "agent 1:1"


def test_a_manager_that_was_started_again_sees_that_node_0_is_another_one() -> None:
    """It was lost while no manager was there: nobody was told where to meet."""
    job = Job()
    job.register(1)
    job.register(2)
    said = job.register(0, agent="late 0", state="lost", is_late=True)
    assert kinds(said)[0] == "Interrupt"
    job.pause(1), job.pause(2)
    incarnation = job.machine.membership.members[0].incarnation
    job.send(ev.WorkerStarted, 0, incarnation, 1)
    assert only(job.pause(0, None, incarnation), do.Resume).store == "late 0:1"


def test_a_node_tells_where_it_was_told_to_meet() -> None:
    node = NodeMachine(1, (1,), _TIMEOUTS, node_count=3, world_size=3, store="own:1")
    registered = node.registration(1.0)
    assert (registered.store, registered.met_at, registered.is_late) == ("own:1", "", False)
    resume = do.Resume("test", 1, 5, (), 0, "other:1")
    node.handle(ev.CommandReceived(1.0, "test", resume))
    assert node.registration(2.0).met_at == "other:1"
    node.handle(ev.CommandReceived(1.0, "test", do.Resume("test", 2, 5, (), 0)))
    assert node.registration(2.0).met_at == "other:1", "nothing new was said"


def test_a_node_says_that_it_came_late() -> None:
    node = NodeMachine(1, (1,), _TIMEOUTS, node_count=3, world_size=3, substitute_until=9.0)
    assert node.registration(1.0).is_late


def test_processes_cannot_all_start_anew_while_a_node_is_lost() -> None:
    """The reason says so, and not that a restart were forbidden."""
    job = Job().joined()
    job.lose(0)
    job.pause(1)
    for rank in (1, 2):
        fault = Fault(FaultKind.KILLED, rank, 0, "SIGKILL", version=5)
        said = job.send(ev.WorkerLost, rank, 0, fault, 0.0)
    reason = only(said, do.GiveUp).reason
    assert "and all processes cannot start anew without node 0" in reason
    assert "recover-strategy" not in reason
