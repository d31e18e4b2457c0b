"""What is asserted after most events of a large job finds what a look at all members finds."""

from __future__ import annotations

import copy
import os
from typing import TYPE_CHECKING, Any

import pytest

from taskd.core import events as ev
from taskd.core.job.invariants import check, check_some
from taskd.core.job.state import Joining, Returning
from taskd.core.phase import JobPhase
from taskd.core.worker_state import WorkerState
from taskd.testing import FaultScript, SimulatedJob, Trouble, histories, simulation, watching
from taskd.testing.watching import Checks, PartialWatch

if TYPE_CHECKING:
    from collections.abc import Callable

    from taskd.core.job.machine import RecoveryMachine
    from taskd.core.job.state import JobState
    from taskd.core.transitions import Commands

SEED = int(os.environ["TASKD_TEST_SEED"])
HISTORIES = 150


def seen_of_each(machine: RecoveryMachine) -> dict[int, object]:
    """By rank all that the invariants of one member look at."""
    job = machine._state
    return {
        rank: (
            copy.copy(member),
            rank in job.awaited,
            member.node_rank in job.absent,
            job.dump is None,
            rank in job.membership.away,
            member.node_rank in job.membership.nodes,
        )
        for rank, member in job.members.items()
    }


class BothWatches(PartialWatch):
    """Asserts as in a large job, and that nothing was overlooked."""

    def handle(self, event: ev.Event) -> Commands:
        before, whole = seen_of_each(self.machine), self.checks.whole
        commands = super().handle(event)
        if self.checks.whole == whole:
            self.machine.check()
            after = seen_of_each(self.machine)
            changed = {
                rank for rank in before.keys() | after.keys() if before.get(rank) != after.get(rank)
            }
            assert changed <= set(self._named(event) or ()), event
        return commands


def test_nothing_changes_but_what_was_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulation, "Watch", BothWatches)
    partial = whole = 0
    for number in range(HISTORIES):
        job = histories.make(SEED, number)
        histories.judge(job, job.run())
        partial, whole = partial + job.checks.partial, whole + job.checks.whole
    assert partial > whole > 0


def in_phase(phase: JobPhase) -> JobState:
    """A job of two nodes with two ranks, one of which was killed, when it is in this phase."""
    script = FaultScript.of([Trouble(0.3, "kill", 1)])
    job = SimulatedJob(nodes=2, ranks_per_node=2, script=script)
    assert job.manager is not None
    while job.manager.machine.phase is not phase:
        assert job.clock.run_next()
    job.manager.machine.check()
    return job.manager.machine._state


def put(**values: Any) -> Callable[[JobState], None]:
    def set_them(job: JobState) -> None:
        for name, value in values.items():
            setattr(job, name, value)

    return set_them


def put_member(rank: int, **values: Any) -> Callable[[JobState], None]:
    def set_them(job: JobState) -> None:
        for name, value in values.items():
            setattr(job.members[rank], name, value)

    return set_them


RUNNING, PAUSING, RESUMED = JobPhase.RUNNING, JobPhase.PAUSING, JobPhase.RESUMED
BREAKS_OF_ALL: dict[str, tuple[JobPhase, Callable[[JobState], None]]] = {
    "a change of phase in no table": (RUNNING, put(undeclared=["running to ended"])),
    "a rank is awaited": (RUNNING, lambda job: job.awaited.set(0, 9.0)),
    "a node is absent": (RUNNING, lambda job: job.absent.set(0, 9.0)),
    "snapshots are on their way": (RUNNING, put(returning=Returning(1, 9.0))),
    "no dump while saving": (RUNNING, put(phase=JobPhase.SAVING)),
    "ranks join": (RUNNING, put(join_by=9.0)),
    "nodes are asked after": (RUNNING, put(joining=Joining(ask_at=9.0))),
    "a suspect is waited for": (RUNNING, put(suspect_until=9.0)),
    "nobody is suspected": (RUNNING, put(phase=JobPhase.SUSPECTING, suspect_until=9.0)),
    "an exit status is waited for": (RUNNING, put(status_by=9.0)),
    "an end without a fault": (RUNNING, put(end_by=9.0)),
    "a fault after release": (RUNNING, put(after_release=["a fault"], end_by=9.0)),
    "a suspect": (RUNNING, put(suspects=["a fault"])),
    "a fault without an answer": (RUNNING, put(unanswered=["a fault"])),
    "a recovery is needed": (RUNNING, put(is_recovery_needed=True)),
    "a restart is not complete": (PAUSING, put(restarted="a restart")),
    "over, and a recovery": (PAUSING, put(phase=JobPhase.ENDED)),
    "over, and a dump": (RUNNING, put(phase=JobPhase.ENDED, dump="a dump")),
    "no attempt while pausing": (PAUSING, put(attempt=None)),
    "nobody is awaited": (PAUSING, lambda job: job.awaited.clear()),
    "no attempt when resumed": (RESUMED, put(attempt=None)),
    "nobody is to go on": (RESUMED, lambda job: job.attempt.waiting.clear()),
    "resumed another generation": (RESUMED, put(resumed_generation=0)),
}  # fmt: skip
BREAKS_OF_RANK_2: dict[str, tuple[JobPhase, Callable[[JobState], None]]] = {
    "lost": (RUNNING, put_member(2, state=WorkerState.LOST)),
    "paused": (RUNNING, put_member(2, state=WorkerState.PAUSED)),
    "lost when resumed": (RESUMED, put_member(2, state=WorkerState.LOST)),
    "paused when resumed": (RESUMED, put_member(2, state=WorkerState.PAUSED)),
    "not awaited": (PAUSING, lambda job: job.awaited.discard(2)),
    "awaited, and has paused": (PAUSING, put_member(2, state=WorkerState.PAUSED)),
    "awaited, and is lost": (PAUSING, put_member(2, state=WorkerState.LOST)),
    "lost, and its node is there": (
        PAUSING,
        lambda job: (job.awaited.discard(2), put_member(2, state=WorkerState.LOST)(job)),
    ),
    "on another node": (RUNNING, put_member(2, node_rank=0)),
    "on no node": (RUNNING, put_member(2, node_rank=7)),
    "not known to its node": (
        RUNNING, lambda job: setattr(job.membership.nodes[1], "ranks", (3,))
    ),
    "away, too": (RUNNING, lambda job: job.membership.away.update({2: job.members[2]})),
}  # fmt: skip


@pytest.mark.parametrize("name", [*BREAKS_OF_ALL, *BREAKS_OF_RANK_2])
def test_each_invariant_that_is_broken_is_found_either_way(name: str) -> None:
    phase, break_it = (BREAKS_OF_ALL | BREAKS_OF_RANK_2)[name]
    job = in_phase(phase)
    break_it(job)
    with pytest.raises(AssertionError):
        check(job)
    with pytest.raises(AssertionError):
        check_some(job, () if name in BREAKS_OF_ALL else (2,))


def test_an_awaited_rank_that_is_not_known_is_found_with_all_at_hand() -> None:
    job = in_phase(PAUSING)
    job.awaited.set(9, 9.0)
    check_some(job, range(4))
    with pytest.raises(AssertionError):
        check(job)


class BrokenMachine:
    """Loses a rank with each event, and does not say so."""

    def __init__(self, machine: RecoveryMachine, rank: int) -> None:
        self._machine, self._rank = machine, rank

    def __getattr__(self, name: str) -> Any:
        return getattr(self._machine, name)

    def handle(self, _event: ev.Event) -> Commands:
        self._machine.membership.members[self._rank].lose()
        return []


def broken(rank: int) -> PartialWatch:
    job = SimulatedJob(nodes=2, ranks_per_node=2)
    assert job.manager is not None
    while job.manager.machine.phase is not RUNNING:
        assert job.clock.run_next()
    machine: Any = BrokenMachine(job.manager.machine, rank)
    return PartialWatch(machine, Checks())


@pytest.mark.parametrize("event", [
    ev.WorkerHolds(1.0, "test", 2, 0, ""),
    ev.SharedReport(1.0, "test", ((3, 0), (2, 0)), ev.WorkerStarted(1.0, "test", 3, 0, 1)),
    ev.AgentLeft(1.0, "test", 1, "succeeded", ""),
    ev.AgentDraining(1.0, "test", 0, "SIGTERM", 1.0),
])  # fmt: skip
def test_what_an_event_does_to_a_rank_that_it_names_is_seen_at_once(event: ev.Event) -> None:
    with pytest.raises(AssertionError):
        broken(2).handle(event)


def test_what_it_does_to_another_rank_is_seen_when_all_are_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watching, "_EVENTS_BETWEEN", 3)
    watch = broken(2)
    watch.handle(ev.AgentHeard(1.0, "test", 1))
    watch.handle(ev.WorkerHolds(1.0, "test", 1, 0, ""))
    with pytest.raises(AssertionError):
        watch.handle(ev.AgentHeard(1.0, "test", 1))
    assert (watch.checks.events, watch.checks.partial) == (3, 2)
