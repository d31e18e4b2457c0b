"""What no agent of ours says changes nothing.

And a machine that takes over from one that failed waits for those who were there.
"""

from __future__ import annotations

import dataclasses

import pytest

from taskd.core import commands as do
from taskd.core import events as ev
from taskd.core import story
from taskd.core.faults import Fault, FaultKind
from taskd.core.job.membership import MAX_CLAIM
from taskd.core.phase import JobPhase
from taskd.core.reduced import reduced
from taskd.core.worker_state import WorkerState

REPORTS = (ev.WorkerReport(0, 0, WorkerState.RUNNING), ev.WorkerReport(1, 0, WorkerState.RUNNING))
REGISTRATION = ev.AgentRegistered(100.0, "c", 0, "agent0", 1, 2, 3, 0, 0, REPORTS)


def with_first(**changes: object) -> tuple[ev.WorkerReport, ...]:
    return (dataclasses.replace(REPORTS[0], **changes), REPORTS[1])


ODD = [
    ({"workers": with_first(state="zombie")}, "a worker is one of"),
    ({"workers": with_first(incarnation=-1)}, "numbers from 0"),
    ({"workers": with_first(incarnation=MAX_CLAIM + 1)}, "numbers from 0"),
    ({"workers": with_first(version=-7)}, "a version is a number"),
    ({"workers": with_first(rank=1)}, "the same rank is given twice"),
    ({"workers": with_first(rank=2)}, "outside of a world of 2"),
    ({"workers": with_first(rank=-1)}, "outside of a world of 2"),
    ({"generation": -1}, "numbers from 0"),
    ({"generation": MAX_CLAIM + 1}, "numbers from 0"),
    ({"restarts_used": -1}, "numbers from 0"),
    ({"max_restarts": -1}, "numbers from 0"),
    ({"node_rank": 1}, "outside of a job of 1 nodes"),
    ({"node_rank": -1}, "outside of a job of 1 nodes"),
    ({"node_count": 3}, "3 nodes cannot share a world of 2"),
]


@pytest.mark.parametrize(("changes", "reason"), ODD, ids=lambda value: str(value)[:40])
def test_an_odd_registration_is_refused_and_changes_nothing(
    manager, changes: dict, reason: str
) -> None:
    driver = manager(1, 2)
    event = dataclasses.replace(REGISTRATION, **changes)
    refusal = driver.machine.refusal(event)
    assert refusal is not None
    assert reason in refusal
    assert driver.machine.handle(event) == []
    assert (
        driver.machine.membership.nodes,
        driver.machine.membership.members,
        driver.machine.next_deadline(),
    ) == ({}, {}, None)
    driver.joined()
    assert driver.machine.phase is JobPhase.RUNNING
    assert driver.machine.refusal(event) is not None  # nor later
    before = dict(driver.machine.membership.members)
    assert driver.machine.handle(event) == []
    assert driver.machine.membership.members == before
    driver.machine.check()


def test_a_node_that_comes_back_has_the_ranks_that_it_had(manager) -> None:
    driver = manager(1, 2).joined()
    fewer = dataclasses.replace(REGISTRATION, workers=REPORTS[:1])
    assert "had other ranks" in driver.machine.refusal(fewer)
    assert driver.machine.refusal(REGISTRATION) is None


def test_agents_that_disagree_about_the_number_of_nodes_are_refused(manager) -> None:
    driver = manager(2, 2)
    driver.register(0)
    other = dataclasses.replace(
        REGISTRATION,
        node_rank=1,
        agent_incarnation="agent1",
        node_count=3,
        world_size=4,
        workers=tuple(dataclasses.replace(report, rank=report.rank + 2) for report in REPORTS),
    )
    assert driver.machine.refusal(other) == "the job has 2 nodes, this agent says 3"
    assert driver.machine.refusal(dataclasses.replace(other, node_count=2)) is None


def test_the_state_of_a_worker_is_the_same_in_a_story_of_before() -> None:
    assert story.from_plain(story.to_plain(REGISTRATION)) == REGISTRATION
    plain = story.to_plain(REGISTRATION)
    for worker in plain["workers"]:
        worker["state"] = "running"  # as it was written before it had a type
    assert story.from_plain(plain) == REGISTRATION


def test_who_was_there_when_the_manager_began_anew_is_waited_for_as_long_as_a_lease(
    manager,
) -> None:
    driver = manager(2, 2)
    assert driver.send(ev.ManagerBeganAnew, (0, 1)) == []
    driver.register(0)
    while driver.machine.phase is JobPhase.JOINING:
        driver.send(ev.AgentHeard, 0, at=driver.machine.next_deadline())
        commands = driver.tick(driver.now)
    give_up = next(command for command in commands if isinstance(command, do.GiveUp))
    assert "the agent of node 1 has been silent for 30 s" in give_up.reason


def test_a_manager_that_began_anew_goes_on_when_all_are_back(manager) -> None:
    driver = manager(2, 2)
    driver.send(ev.ManagerBeganAnew, (0, 1))
    driver.joined()
    assert driver.machine.phase is JobPhase.RUNNING
    for _ in range(200):
        driver.hear_all_until(driver.now + 1.0)
        if driver.machine.next_deadline() <= driver.now:
            assert driver.tick(driver.now) == []
    assert driver.machine.phase is JobPhase.RUNNING


def test_the_least_of_a_death_says_who_and_how() -> None:
    fault = Fault(FaultKind.CRASHED, 3, 1, "SIGSEGV", -7, "step", "SIGSEGV", "Traceback", -11)
    lost = ev.WorkerLost(1.0, "c", 3, 1, fault, -5.0, (-1,), (-2,))
    least = Fault(FaultKind.CRASHED, 3, 1, "SIGSEGV", signature="SIGSEGV")
    assert reduced(lost) == ev.WorkerLost(1.0, "c", 3, 1, least, 0.0)
    assert reduced(ev.WorkerExitKnown(1.0, "c", 3, 1, fault)) == ev.WorkerExitKnown(
        1.0, "c", 3, 1, least
    )
    assert (
        reduced(
            dataclasses.replace(
                REGISTRATION, workers=with_first(version=-7, snapshots=(-1,), shard="x")
            )
        )
        == REGISTRATION
    )
    assert reduced(ev.WorkerStarted(1.0, "c", 3, 1, 10)) is None


def test_an_absurd_world_makes_no_absurd_line(manager) -> None:
    driver = manager(1, 2)
    reports = (
        ev.WorkerReport(0, 0, WorkerState.LOST, True),
        ev.WorkerReport(1, 0, WorkerState.RUNNING, True),
    )
    driver.register(0, *reports, node_count=2, world_size=1 << 20)
    while driver.machine.phase is JobPhase.JOINING:
        driver.send(ev.AgentHeard, 0, at=driver.machine.next_deadline())
        commands = driver.tick(driver.now)
    give_up = next(command for command in commands if isinstance(command, do.GiveUp))
    assert "and 1048558 more are not known" in give_up.reason
    assert len(give_up.reason) < 300


def test_a_job_that_has_begun_learns_no_generation_from_an_agent(manager) -> None:
    """It was taken over in the middle of a recovery.

    Its ranks then reported in a generation that seemed to be over.
    """
    driver = manager(1, 2).joined()
    driver.raise_(0)
    driver.pause(1)
    assert (driver.machine.phase, driver.machine.generation) == (JobPhase.RESUMED, 1)
    claim = dataclasses.replace(REGISTRATION, generation=7)
    assert driver.machine.refusal(claim) == "the job is in generation 1, this agent says 7"
    assert driver.machine.handle(claim) == []
    driver.machine.check()
    driver.recover_all()
    assert driver.machine.phase is JobPhase.RUNNING
