"""A node was lost while no manager was there: the next one misses it, and offers its place."""

import pytest

from taskd.core import commands as do
from taskd.core import events as ev
from taskd.core.phase import JobPhase
from tests.unit.core.answers import kinds, only, plan
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
