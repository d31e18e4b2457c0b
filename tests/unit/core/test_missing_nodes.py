"""A node was lost while no manager was there: the next one misses it, and offers its place.

Or before it had registered with the first one.
"""

import pytest

from taskd.core import commands as do
from taskd.core import events as ev
from taskd.core.marks import Mark
from taskd.core.phase import JobPhase
from tests.unit.core.answers import kinds, only, plan
from tests.unit.core.conftest import fault
from tests.unit.core.test_meeting import Job


def overdue(job: Job, *here: int, seconds: float = 31.0) -> list[do.Command]:
    """For so long only these have been heard of."""
    until, said = job.now + seconds, []
    while job.now < until:
        job.now = min(job.now + 5.0, until)
        for node in here:
            said += job.send(ev.AgentHeard, node)
        said += job.send(ev.Tick)
    return said


def stopped(*here: int, **more: object) -> Job:
    """These have come to a manager that was started again; their ranks wait at the gate."""
    job = Job(**more)
    for node in here:
        assert job.register(node, state="paused", generation=1, is_declared=True) == []
    return job


def test_its_place_is_offered_after_a_lease() -> None:
    job = stopped(0, 1)
    assert job.machine.phase is JobPhase.JOINING
    assert job.machine.lost_nodes == []
    assert kinds(overdue(job, 0, 1)) == ["Interrupt"]
    assert job.machine.lost_nodes == [2]
    resume = only(job.replace(2), do.Resume)
    assert resume.version == 5
    assert plan(resume) == {2: 0}


def test_nobody_takes_it() -> None:
    job = stopped(0, 1, strategies=("recover", "dump"))
    overdue(job, 0, 1)
    job.pause(0), job.pause(1)
    dump = only(overdue(job, 0, 1, seconds=271.0), do.Dump)
    assert (dump.version, dump.writers, dump.world_size) == (5, (0, 1), 3)
    assert "nobody took its place within 270 s (node 2)" in dump.reason


def test_the_others_go_on_without_it() -> None:
    job = stopped(0, 1, strategies=("recover-in-place", "elastic-training"))
    resume = only(overdue(job, 0, 1), do.Resume)
    assert resume.active == (0, 1)


def test_it_was_only_late() -> None:
    job = stopped(0, 1)
    assert overdue(job, 0, 1, seconds=20.0) == []
    assert kinds(job.register(2, state="paused", generation=1, is_declared=True)) == [
        "Interrupt",
        "Resume",
    ]


def test_node_0_with_the_store_is_lost() -> None:
    job = stopped(1, 2)
    overdue(job, 1, 2)
    assert (job.machine.lost_nodes, job.machine.meeting_store) == ([0], "agent 1:1")


@pytest.mark.parametrize("late", [False, True])
def test_more_than_half_are_missing(late: bool) -> None:
    """They may go on with another manager, so nobody gets their places. New ones do not count."""
    job = stopped(0)
    if late:
        job.register(1, agent="late 1", state="lost", is_late=True, generation=1)
    here = (0, 1) if late else (0,)
    assert overdue(job, *here) == []
    assert job.machine.lost_nodes == []
    reason = only(overdue(job, *here, seconds=270.0), do.GiveUp).reason
    assert reason.endswith("are not known to this manager")


def test_where_no_node_is_replaced_the_job_ends() -> None:
    job = stopped(0, 1, strategies=("recover-in-place",))
    assert only(overdue(job, 0, 1), do.GiveUp).reason.endswith("not known to this manager")


# ---------------------------------------------------------------------- before it has registered


def began(*here: int, **more: object) -> Job:
    """A job that begins: these have registered, whose ranks are on their way to the others."""
    job = Job(**more)
    for node in here:
        assert job.register(node) == []
    return job


def beat(job: Job, node: int, version: int | None) -> list[do.Command]:
    mark = Mark(node, 0, 0, version, "entered", 1.0)
    return job.send(ev.AgentHeard, node, (mark,))


def test_a_node_that_was_lost_before_it_registered_is_replaced() -> None:
    """All have met at the rendezvous when the first registers: the others would wait for ever."""
    job = began(0, 1)
    assert overdue(job, 0, 1, seconds=39.0) == []
    report, interrupt = overdue(job, 0, 1, seconds=2.0)
    assert report.text == (
        "nodes [2] of 3 (ranks [2]) are missing, no other has registered for 41 s, and no step has "
        "been committed since. They count as lost"
    )
    assert interrupt.reason == (
        "the agent of node 2 was lost before it registered with this manager"
    )
    assert job.machine.lost_nodes == [2]
    assert job.pause(0) == job.pause(1) == []
    assert plan(only(job.replace(2), do.Resume)) == {2: 0}


def test_it_is_waited_for_as_long_as_any_lost_node() -> None:
    job = began(0, 1)
    overdue(job, 0, 1, seconds=41.0)
    job.pause(0), job.pause(1)
    reason = only(overdue(job, 0, 1, seconds=271.0), do.GiveUp).reason
    assert "nobody took its place within 270 s (node 2)" in reason


def test_it_was_only_slow_and_keeps_its_processes() -> None:
    job = began(0, 1)
    interrupt = overdue(job, 0, 1, seconds=41.0)[-1]
    job.pause(0), job.pause(1)
    (repeated,) = job.register(2)
    assert (repeated.node_rank, repeated.order) == (2, interrupt)
    assert only(job.pause(2), do.Resume).moves == ()


def test_each_that_registers_gives_the_others_time() -> None:
    job = began(0)
    assert overdue(job, 0, seconds=39.0) == []
    assert job.register(1) == []
    assert overdue(job, 0, 1, seconds=39.0) == []
    assert job.register(2) == []
    assert job.machine.phase is JobPhase.RUNNING
    assert overdue(job, 0, 1, 2, seconds=700.0) == []


def test_where_no_node_is_replaced_they_may_take_as_long_as_a_start() -> None:
    job = began(0, 1, strategies=("recover-in-place",))
    report = only(overdue(job, 0, 1, seconds=41.0), do.ReportNotJoined)
    assert "If both are still so in 560 s, a job that uses taskd.recoverable" in report.text
    assert overdue(job, 0, 1, seconds=558.0) == []
    give_up = only(overdue(job, 0, 1, seconds=2.0), do.GiveUp)
    assert give_up.reason.startswith(
        "ranks [2] have not registered with this manager within 600 s of the others, and no step"
    )


@pytest.mark.parametrize("strategies", [("recover",), ("recover-in-place",)])
def test_a_node_whose_agent_does_not_reach_the_manager_trains_on(strategies) -> None:
    """As plain torchrun. The others could not commit without it."""
    job = began(0, 1, strategies=strategies)
    beat(job, 0, None), beat(job, 0, 7), beat(job, 0, 8)
    report = only(overdue(job, 0, 1, seconds=2000.0), do.ReportNotJoined)
    assert "the others commit steps, so they train" in report.text
    assert job.machine.phase is JobPhase.JOINING
    assert job.machine.lost_nodes == []


def test_what_a_checkpoint_brings_is_no_step() -> None:
    job = began(0, 1)
    beat(job, 0, None), beat(job, 0, 700), beat(job, 1, 700)
    assert kinds(overdue(job, 0, 1, seconds=41.0)) == ["ReportNotJoined", "Interrupt"]


@pytest.mark.parametrize("strategies", [("recover",), ("recover-in-place",)])
def test_who_has_returned_needs_nobody(strategies) -> None:
    job = began(0, 1, strategies=strategies)
    job.send(ev.WorkerReturned, 0, 0, 0, 9)
    said = overdue(job, 0, 1, seconds=2000.0)
    assert kinds(said) == ["ReportNotJoined"]
    job.send(ev.WorkerReturned, 1, 0, 0, 9)
    assert kinds(overdue(job, 0, 1)) == ["Release"]


def test_a_script_that_shows_no_steps_is_left_to_the_timeouts_of_torch() -> None:
    job = Job()
    for node in (0, 1):
        job.register(node, is_declared=False)
    assert kinds(overdue(job, 0, 1, seconds=2000.0)) == ["ReportNotJoined"]
    assert job.machine.phase is JobPhase.JOINING


def test_a_script_that_is_slow_to_declare_itself_is_asked_again() -> None:
    job = Job()
    for node in (0, 1):
        job.register(node, is_declared=False)
    assert kinds(overdue(job, 0, 1, seconds=60.0)) == ["ReportNotJoined"]
    job.send(ev.WorkerDeclared, 0, 0)
    assert kinds(overdue(job, 0, 1, seconds=31.0)) == ["Interrupt"]


def test_a_fault_decides_sooner() -> None:
    """One lease after it, as ever; whoever is missing has not been said by then."""
    job = began(0, 1, strategies=("recover-in-place",))
    job.send(ev.WorkerLost, 0, 0, fault(rank=0), 0.0)
    assert only(overdue(job, 0, 1), do.GiveUp).reason.endswith("not known to this manager")


def test_of_many_nodes_some_are_named() -> None:
    job = began(0, nodes=40, strategies=("recover-in-place",))
    report = only(overdue(job, 0, seconds=41.0), do.ReportNotJoined)
    assert "15, 16] and 23 more of 40 (ranks [1," in report.text
