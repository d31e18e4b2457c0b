"""RecoveryMachine: what heartbeats say of the workers where nobody is to be judged, or not yet."""

from dataclasses import replace

from taskd.core import commands as do
from taskd.core import events as ev
from taskd.core.faults import FaultKind
from taskd.core.marks import Activity, GroupMark, Mark
from taskd.core.phase import JobPhase
from taskd.core.policy.hangs import HangDetector
from taskd.core.timeouts import Timeouts
from tests.unit.core.answers import acts, kinds, only


def mark(rank: int, *, hangs: bool, groups: tuple[int, ...] = (7,), **changes) -> Mark:
    """2.5 s in a step that takes 0.05 s: asleep, or in a collective that the one has not begun."""
    entered = 40 if hangs else 41
    known = tuple(GroupMark(group, "0", entered, 40, "all_reduce") for group in groups)
    fields = {
        "activity": Activity.ASLEEP if hangs else Activity.UNKNOWN,
        "is_waiting": not hangs,
    } | changes
    phase = "forward" if hangs else "backward"
    return Mark(rank, 0, 0, 5, phase, 2.5, groups=known, slowest_s=0.05, **fields)


def test_ranks_that_have_not_started_yet_do_not_hang(manager) -> None:
    job = manager(per_node=2)
    reports = [ev.WorkerReport(rank, 0, "starting") for rank in job.ranks]
    assert job.register(0, *reports) == []
    assert job.machine.phase is JobPhase.RUNNING
    stopped = mark(1, hangs=True, frozen_s=1e4, activity=Activity.STOPPED)
    assert job.send(ev.AgentHeard, 0, (mark(0, hangs=False), stopped)) == []


def test_marks_that_came_before_the_job_was_complete_count_afterwards(manager) -> None:
    job = manager(nodes=2, per_node=2)
    job.register(0)
    job.send(ev.AgentHeard, 0, (mark(0, hangs=False), mark(1, hangs=False)))
    assert job.machine.phase is JobPhase.JOINING
    job.register(1)
    for rank in job.ranks:
        job.worker(ev.WorkerDeclared, rank, True)
    kill = only(
        job.send(ev.AgentHeard, 1, (mark(2, hangs=True), mark(3, hangs=False))), do.KillWorker
    )
    assert kill.rank == 2
    assert "ranks 0, 1, 3 wait for it" in kill.reason


def test_who_says_that_it_does_not_come_back_is_called_and_killed_if_it_does_not_come(
    manager, make_fault
) -> None:
    """All say so at once, as they wait for each other; the others come when they are called."""
    job = manager().joined()
    said = [make_fault(FaultKind.HANG, rank, 0, "the repair handler") for rank in job.ranks]
    answers = [
        job.worker(ev.WorkerRaised, rank, 0, said[rank], True, may_advance=True)
        for rank in (2, 0, 1, 3)
    ]
    assert [acts(commands) for commands in answers] == [["Interrupt"], [], [], []]
    for rank in (0, 1, 2):
        assert job.pause(rank) == []
    job.hear_all_until(job.now + job.timeouts.pause_s - 1)
    kill = only(job.send(ev.Tick, at=job.now + 1), do.KillWorker)
    assert (kill.rank, kill.reason) == (3, "did not leave its step")
    assert job.machine.membership.members[0].version == 5


def test_stacks_belong_to_the_hang_alone(manager) -> None:
    """Another rank dies in the recovery from the hang."""
    job = manager().joined()
    marks = tuple(mark(rank, hangs=rank == 2) for rank in job.ranks)
    assert "KillWorker" in kinds(job.send(ev.AgentHeard, 0, marks))
    job.lose(1, FaultKind.KILLED, "SIGKILL")
    job.worker(ev.WorkerExamined, 1, "File other.py", incarnation=0)
    job.worker(ev.WorkerExamined, 2, "File train.py", incarnation=0)
    job.pause_all()
    record = only(job.recover_all(), do.RecordRecovery).record
    shown = {fault.rank: (fault.kind, fault.traceback) for fault in record.faults}
    assert shown == {2: (FaultKind.HANG, "File train.py"), 1: (FaultKind.KILLED, None)}


def test_where_no_communicator_is_common_any_collective_is_a_wait_for_the_one_that_stands() -> None:
    progress = HangDetector(Timeouts.derive(30.0))
    lives = [(0, 0), (1, 0), (2, 0)]
    culprit = mark(2, hangs=True, groups=(2,))
    for is_waiting, expected in ((True, [2]), (False, [])):
        others = [mark(rank, hangs=False, groups=(rank,), is_waiting=is_waiting) for rank in (0, 1)]
        progress.note(1.0, [*others, culprit])
        verdict = progress.judge(1.0, 0, lives)
        assert [one.rank for one in (verdict.culprits if verdict else ())] == expected


def test_a_job_that_somebody_stopped_while_it_stops_is_left_alone(manager) -> None:
    """All live ranks at once: no fault of theirs."""
    job = manager(per_node=2).joined()
    job.raise_(0)
    frozen = mark(1, hangs=True, frozen_s=60.0, activity=Activity.STOPPED)
    assert kinds(job.send(ev.AgentHeard, 0, (frozen,))) == ["KillWorker", "ReplaceWorker"]
    job = manager(per_node=2, strategies="dump").joined()
    job.send(ev.AgentDraining, 0, "SIGTERM", 1e6)
    assert job.machine.phase is JobPhase.PAUSING
    both = tuple(
        mark(rank, hangs=True, frozen_s=60.0, activity=Activity.STOPPED) for rank in job.ranks
    )
    assert job.send(ev.AgentHeard, 0, both) == []
    assert job.machine.phase is JobPhase.PAUSING


def test_a_rank_that_is_stopped_is_named_once() -> None:
    """It has stood for longer than any limit, too, and others wait for it."""
    progress = HangDetector(Timeouts.derive(30.0))
    stopped = mark(2, hangs=True, frozen_s=400.0, activity=Activity.STOPPED)
    marks = [mark(0, hangs=False), mark(1, hangs=False), stopped]
    progress.note(1.0, [replace(one, still_s=400.0) for one in marks])
    verdict = progress.judge(1.0, 0, [(0, 0), (1, 0), (2, 0)])
    assert verdict is not None
    assert [culprit.rank for culprit in verdict.culprits] == [2]


def test_a_mark_is_fresh_for_two_heartbeats_however_long_these_are() -> None:
    timeouts = Timeouts.derive(5.0)
    assert timeouts.heartbeat_s == 0.5
    lives = [(0, 0), (1, 0)]
    for age_s, is_seen in ((0.9, True), (1.1, False), (3.9, False)):
        progress = HangDetector(timeouts)
        progress.note(
            10.0 - age_s, [mark(1, hangs=True, frozen_s=100.0, activity=Activity.STOPPED)]
        )
        assert bool(progress.frozen(10.0, 0, lives)) is is_seen


def test_the_longer_limit_of_a_second_wait_of_all_is_that_of_the_lowest_rank() -> None:
    """Ranks may be one version apart; the first wait was counted for the lowest."""
    lives = [(0, 0), (1, 0)]
    for versions, ends in (((5, 6), False), ((6, 5), True)):
        progress = HangDetector(Timeouts.derive(30.0))
        ahead = [
            replace(mark(rank, hangs=False), version=version, still_s=31.0)
            for rank, version in zip((0, 1), (5, 6), strict=True)
        ]
        progress.note(1.0, ahead)
        assert progress.judge(1.0, 0, lives) is not None
        progress.count(0)
        again = [
            replace(one, version=version) for one, version in zip(ahead, versions, strict=True)
        ]
        progress.note(2.0, again)
        assert (progress.judge(2.0, 0, lives) is not None) is ends


def test_a_rank_that_holds_the_interpreter_lock_is_said_to_do_so() -> None:
    for activity, shown in ((Activity.ASLEEP, "asleep"), (Activity.BUSY, "busy")):
        progress = HangDetector(Timeouts.derive(30.0))
        culprit = mark(2, hangs=True, python_s=2.5, activity=activity)
        marks = [mark(0, hangs=False), mark(1, hangs=False), culprit]
        progress.note(1.0, [replace(one, still_s=400.0) for one in marks])
        verdict = progress.judge(1.0, 0, [(0, 0), (1, 0), (2, 0)])
        assert verdict is not None
        (found,) = verdict.culprits
        assert found.detail.startswith(f"{shown} with the interpreter lock held for 400.0 s")
