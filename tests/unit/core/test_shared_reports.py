"""What ranks report alike means what its reports mean one after the other, in any history."""

import dataclasses

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from taskd.core import commands as do
from taskd.core import events as ev
from taskd.core.faults import Fault, FaultKind
from taskd.core.job import shared_reports
from taskd.core.job.machine import RecoveryMachine
from taskd.core.phase import JobPhase
from taskd.core.story import describe
from taskd.replay import dump_lines, load_lines, replay
from taskd.testing.canonical import key
from tests.unit.core.answers import kinds


def known_by(machine: RecoveryMachine) -> dict[str, object]:
    """All that decides something, but for what is told apart by where it is in memory."""
    state = machine._state
    names = {item.name for item in dataclasses.fields(state)}
    left_out = {"story", "now", "cause", "hangs", "stragglers", "peers", "stagnation"}
    return {name: key(getattr(state, name)) for name in names - left_out}


FAULTS = st.sampled_from([FaultKind.KILLED, FaultKind.KILLED, FaultKind.LOST])
BEHIND = st.sampled_from([0, 0, 0, 0, 0, 1])
STEPS = st.sampled_from(
    ["lost", "paused", "paused", "advance", "recovered", "recovered", "returned", "finished"]
)
RANKS = st.lists(st.integers(0, 7), unique=True, min_size=1)


class Both:
    """A job of two nodes with four ranks each, twice: with reports alone, and with those alike."""

    def __init__(self, manager) -> None:
        self.alone, self.together = manager(nodes=2).joined(), manager(nodes=2).joined()

    def send(self, kind: type[ev.Event], *details: object) -> None:
        commands = self.alone.send(kind, *details)
        assert self.together.send(kind, *details) == commands
        self.compare()

    def alike(self, ranks: list[int], kind: type[ev.WorkerEvent], *details: object) -> None:
        machine, now, cause = self.alone.machine, self.alone.now + 0.01, f"e{self.alone.count + 1}"
        lives = [(rank, machine.membership.members[rank].incarnation) for rank in ranks]
        reports = [kind(now, cause, *life, *details) for life in lives]
        commands = [one for report in reports for one in machine.handle(report)]
        self.alone.now, self.alone.count = now, self.alone.count + 1
        assert self.together.send(ev.SharedReport, tuple(lives), reports[0]) == commands
        self.compare()

    def compare(self) -> None:
        self.alone.machine.check()
        assert known_by(self.together.machine) == known_by(self.alone.machine)


@given(data=st.data())
@settings(
    max_examples=settings.default.max_examples * 2,
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # it is a class
)
def test_what_is_told_together_counts_as_if_each_had_told_it_alone(
    manager, data: st.DataObject
) -> None:
    both = Both(manager)
    machine, members = both.alone.machine, both.alone.machine.membership.members
    for _ in range(data.draw(st.integers(5, 30))):
        version = data.draw(st.sampled_from([5, 5, 5, 6, 4, None]))
        ranks, behind = data.draw(RANKS), data.draw(BEHIND)
        generation = max(0, machine.generation - behind)
        match data.draw(STEPS):
            case "lost":
                rank, kind = ranks[0], data.draw(FAULTS)
                life = members[rank].incarnation
                fault = Fault(kind, rank, life, kind.value, version=version)
                both.send(ev.WorkerLost, rank, life, fault, 0.001, (5,))
            case "paused":
                clean = data.draw(st.sampled_from([True, True, True, False]))
                both.alike(ranks, ev.WorkerPaused, generation, version, clean)
            case "advance":
                both.alike(ranks, ev.WorkerMayAdvance, generation, version or 5)
            case "recovered":
                both.alike(ranks, ev.WorkerRecovered, generation, version or 6, 0.1, 0.1, 0.1)
            case "returned":
                both.alike(ranks, ev.WorkerReturned, generation, 7)
            case "finished":
                both.send(ev.WorkerFinished, ranks[0], members[ranks[0]].incarnation)
    fresh, entries = load_lines(dump_lines(both.together.machine))
    assert replay(fresh, entries) == []
    assert known_by(fresh) == known_by(both.together.machine)


def tell(job, ranks, kind, *details) -> list[do.Command]:
    """All of these ranks report the same."""
    lives = tuple((rank, job.incarnation(rank)) for rank in ranks)
    report = kind(job.now, "together", *lives[0], *details)
    return job.send(ev.SharedReport, lives, report)


def test_most_of_what_all_ranks_report_takes_the_short_way(manager, monkeypatch) -> None:
    job, taken = manager(nodes=2).joined(), []
    take = shared_reports.take

    def noted(*arguments) -> bool:
        taken.append(take(*arguments))
        return taken[-1]

    monkeypatch.setattr(shared_reports, "take", noted)
    job.lose(2)
    assert tell(job, (0, 1, 3), ev.WorkerPaused, 1, 5, True) == []
    assert job.pause(2, None) == []
    (resume,) = tell(job, range(4, 8), ev.WorkerPaused, 1, 5, True)
    assert isinstance(resume, do.Resume)
    assert taken == [True] * 6 + [False]  # the last one decides
    taken.clear()
    assert tell(job, range(4), ev.WorkerRecovered, 1, 6, 0.1, 0.1, 0.1) == []
    record = tell(job, range(4, 8), ev.WorkerRecovered, 1, 6, 0.1, 0.2, 0.1)
    assert kinds(record) == ["RecordRecovery"]
    assert record[0].record.state_s == 0.2
    assert taken == [True] * 7 + [False]
    assert job.machine.phase is JobPhase.RUNNING


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_the_story_of_a_rank_has_what_it_has_reported_with_others(manager, rank: int) -> None:
    job = manager(nodes=1).joined()
    job.lose(3)
    tell(job, (0, 1), ev.WorkerPaused, 1, 5, True)
    (told,) = [entry for entry in job.machine.story if isinstance(entry, ev.SharedReport)]
    line = describe(told)
    assert line.startswith(f"{told.now:.6f} WorkerPaused cause={told.cause} rank=0 incarnation=0 ")
    assert line.endswith("and the same of each of 0.0 1.0 (rank.incarnation)")
    assert (line in job.machine.story.of_rank(rank)) == (rank < 2)
