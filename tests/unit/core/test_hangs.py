"""RecoveryMachine and NodeMachine: what is done about ranks that stand still."""

import pytest

from taskd.core import commands as do
from taskd.core import events as ev
from taskd.core.faults import FaultKind
from taskd.core.marks import Activity, GroupMark, Mark
from taskd.core.phase import JobPhase
from tests.unit.core.answers import acts, kinds, only


def mark(
    rank: int,
    *,
    hangs: bool,
    still_s: float = 2.5,
    generation: int = 0,
    incarnation: int = 0,
    **changes,
) -> Mark:
    group = GroupMark(7, "0", 40 if hangs else 41, 40, "all_reduce")
    fields = {
        "activity": Activity.ASLEEP if hangs else Activity.UNKNOWN,
        "is_waiting": not hangs,
        "slowest_s": 0.05,
    } | changes
    return Mark(
        rank,
        incarnation,
        generation,
        5,
        "forward" if hangs else "backward",
        still_s,
        groups=(group,),
        **fields,
    )


def look(job, culprit: int | None = 2, **changes) -> list[do.Command]:
    marks = tuple(mark(rank, hangs=rank == culprit, **changes) for rank in range(4))
    return job.send(ev.AgentHeard, 0, marks)


def test_the_culprit_is_killed_after_its_stacks_and_replaced(manager) -> None:
    job = manager().joined()
    kill, interrupt, replacement = look(job)
    assert isinstance(kill, do.KillWorker)
    assert (kill.rank, kill.incarnation, kill.examine) == (2, 0, True)
    assert isinstance(interrupt, do.Interrupt)
    assert interrupt.reason.startswith(
        "rank 2 hangs: asleep for 2.5 s in forward; ranks 0, 1, 3 wait for it in all_reduce 41"
    )
    assert (replacement.rank, replacement.incarnation) == (2, 1)
    assert job.machine.phase is JobPhase.PAUSING


def test_the_record_has_the_stacks_and_counts_from_the_beginning_of_the_hang(manager) -> None:
    job = manager().joined()
    look(job)
    assert job.worker(ev.WorkerExamined, 2, "File train.py, line 3", incarnation=0) == []
    job.pause_all()
    record = only(job.recover_all(), do.RecordRecovery).record
    (fault,) = record.faults
    assert (fault.kind, fault.rank, fault.traceback) == (FaultKind.HANG, 2, "File train.py, line 3")
    assert record.detect_s == pytest.approx(2.5)
    assert record.total_s > 2.5
    assert record.steps_redone == 0


def test_stacks_that_come_late_are_no_error(manager) -> None:
    job = manager().joined()
    look(job)
    job.pause_all()
    job.recover_all()
    assert job.worker(ev.WorkerExamined, 2, "File train.py, line 3", incarnation=0) == []
    assert job.machine.phase is JobPhase.RUNNING


def test_nothing_is_done_about_a_healthy_job(manager) -> None:
    job = manager().joined()
    assert look(job, culprit=None, still_s=0.01) == []
    assert job.machine.phase is JobPhase.RUNNING


def test_a_killed_rank_is_waited_for_until_its_end_is_told(manager) -> None:
    """Its memory may be large: no thread of it runs, the one with the interpreter lock neither."""
    job = manager().joined()
    for still_s in (2.5, 29.0):
        dying = {"still_s": still_s, "python_s": still_s, "activity": Activity.ENDING}
        marks = [mark(rank, hangs=rank == 2, **(dying if rank == 2 else {})) for rank in range(4)]
        assert job.send(ev.AgentHeard, 0, tuple(marks)) == []
    interrupt, replacement = job.lose(2)
    assert interrupt.reason == "rank 2 ended at step 5"
    assert (replacement.rank, replacement.incarnation) == (2, 1)


def test_one_that_never_comes_to_its_end_hangs(manager) -> None:
    job = manager().joined()
    _, interrupt, _ = look(job, still_s=31.0, python_s=31.0, activity=Activity.ENDING)
    assert interrupt.reason.startswith(
        "rank 2 hangs: killed or exiting, and not gone for 31.0 s in forward"
    )


def test_all_waiting_is_answered_without_replacing_anybody(manager) -> None:
    job = manager().joined()
    (interrupt,) = look(job, culprit=None, still_s=31.0)
    assert isinstance(interrupt, do.Interrupt)
    assert "all ranks wait in all_reduce 41" in interrupt.reason
    job.pause_all()
    assert only(job.recover_all(), do.RecordRecovery).record.strategy == "retry"


def test_a_rank_stopped_while_it_is_called_out_is_not_waited_for(manager) -> None:
    job = manager().joined()
    job.lose(2)
    for rank in (0, 3):
        job.pause(rank)
    stopped = mark(1, hangs=True, frozen_s=2.1, activity=Activity.STOPPED)
    kill, replacement = job.send(ev.AgentHeard, 0, (stopped,))
    assert isinstance(kill, do.KillWorker)
    assert (replacement.rank, replacement.incarnation) == (1, 1)


def test_a_second_hang_at_the_same_step_needs_longer_and_the_fourth_ends_the_job(manager) -> None:
    job = manager().joined()
    incarnation = 0
    for limit_s in (2.0, 16.0, 128.0):
        generation = job.machine.generation
        same = {"generation": generation}

        def again(still_s: float, same=same, incarnation=incarnation) -> list[do.Command]:
            marks = tuple(
                mark(
                    rank,
                    hangs=rank == 2,
                    still_s=still_s,
                    incarnation=incarnation if rank == 2 else 0,
                    **same,
                )
                for rank in range(4)
            )
            return job.send(ev.AgentHeard, 0, marks)

        assert again(limit_s - 0.5) == []
        assert acts(again(limit_s + 0.5)) == ["KillWorker", "Interrupt", "ReplaceWorker"]
        incarnation += 1
        job.worker(ev.WorkerDeclared, 2, True)
        job.pause_all()
        job.recover_all(version=5)
    marks = tuple(
        mark(
            rank,
            hangs=rank == 2,
            still_s=1100.0,
            incarnation=incarnation if rank == 2 else 0,
            generation=job.machine.generation,
        )
        for rank in range(4)
    )
    give_up = only(job.send(ev.AgentHeard, 0, marks), do.GiveUp)
    assert "the same failure came 4 times: rank 2 hangs" in give_up.reason


def test_without_recoverable_only_a_stopped_process_counts_and_later(manager) -> None:
    job = manager().joined(declared=False)
    assert look(job) == []
    marks = [
        mark(
            rank,
            hangs=rank == 2,
            still_s=29.0,
            frozen_s=29.0 if rank == 2 else 0.0,
            activity=Activity.STOPPED,
        )
        for rank in range(4)
    ]
    assert job.send(ev.AgentHeard, 0, tuple(marks)) == []
    marks[2] = mark(2, hangs=True, still_s=31.0, frozen_s=31.0, activity=Activity.STOPPED)
    assert "RestartGroup" in kinds(job.send(ev.AgentHeard, 0, tuple(marks)))


def test_without_recoverable_a_job_that_somebody_stopped_is_left_alone(manager) -> None:
    job = manager().joined(declared=False)
    marks = tuple(
        mark(rank, hangs=True, still_s=99.0, frozen_s=99.0, activity=Activity.STOPPED)
        for rank in range(4)
    )
    assert job.send(ev.AgentHeard, 0, marks) == []
    assert job.machine.phase is JobPhase.RUNNING


class TestNode:
    def kill(self, node) -> list[do.Command]:
        return node.send(
            ev.CommandReceived, do.KillWorker("hang", 1, 0, 1, 0, "hangs", examine=True)
        )

    def replace(self, node) -> list[do.Command]:
        return node.send(ev.CommandReceived, do.ReplaceWorker("hang", 1, 0, 1, 1, 1))

    def test_stacks_come_first_then_the_signal_then_the_successor(self, node) -> None:
        job = node()
        assert kinds(self.kill(job)) == ["ExamineWorker"]
        assert self.replace(job) == []
        signal, tell, spawn = job.worker(ev.WorkerExamined, 1, "stacks", incarnation=0)
        assert (signal.rank, signal.incarnation, signal.signal_number) == (1, 0, 9)
        assert tell.event.traceback == "stacks"
        assert (spawn.rank, spawn.incarnation, spawn.gated) == (1, 1, True)

    def test_a_rank_that_cannot_write_its_stacks_is_killed_without(self, node) -> None:
        job = node()
        self.kill(job)
        self.replace(job)
        deadline = job.machine.next_deadline()
        assert deadline == pytest.approx(job.now - 0.01 + job.timeouts.examine_s)
        assert kinds(job.send(ev.Tick, at=deadline)) == ["SignalWorker", "SpawnWorker"]
        assert job.worker(ev.WorkerExamined, 1, "too late", incarnation=0) == []

    def test_one_that_dies_meanwhile_is_replaced_at_once(self, node) -> None:
        job = node()
        self.kill(job)
        self.replace(job)
        assert kinds(job.worker(ev.WorkerExited, 1, -9, 5, "step", incarnation=0)) == [
            "SpawnWorker"
        ]


@pytest.mark.parametrize("is_locked", [True, False])
def test_a_rank_that_stays_at_the_gate_is_replaced(manager, *, is_locked: bool) -> None:
    """It was told to go on, and does not: the others wait for it where no collective is seen."""
    job = manager().joined()
    job.raise_(1)
    for rank in (0, 2, 3):
        job.pause(rank, 5)
    assert job.machine.phase is JobPhase.RESUMED
    resumed_at = job.now
    job.hear_all_until(resumed_at + 20)
    python_s = 29.0 if is_locked else 0.0

    def heard(later_s: float) -> list[do.Command]:
        marks = [mark(rank, hangs=False, generation=1, still_s=later_s) for rank in range(3)]
        marks += [gated(3, still_s=later_s, python_s=python_s)]
        return job.send(ev.AgentHeard, 0, tuple(marks), at=resumed_at + later_s)

    assert heard(29.0) == []
    kill = only(heard(30.5), do.KillWorker)
    assert (kill.rank, kill.examine) == (3, True)
    assert kill.reason.startswith("still paused after 30.5 s, told to go on")
    assert ("with the interpreter lock held" in kill.reason) is is_locked


def test_a_rank_that_is_stopped_at_the_gate_is_replaced_as_soon_as_in_a_step(manager) -> None:
    job = manager().joined()
    job.raise_(1)
    for rank in (0, 2, 3):
        job.pause(rank, 5)
    resumed_at = job.now

    def heard(later_s: float, *stopped: int) -> list[do.Command]:
        marks = [
            gated(rank, still_s=later_s, python_s=later_s, frozen_s=later_s)
            if rank in stopped
            else mark(rank, hangs=False, generation=1, still_s=later_s)
            for rank in range(4)
        ]
        return job.send(ev.AgentHeard, 0, tuple(marks), at=resumed_at + later_s)

    floor_s = job.timeouts.hang_floor_s
    assert floor_s < job.timeouts.pause_s - 1
    assert heard(floor_s - 0.5, 3) == []
    assert heard(floor_s + 0.1, 0, 1, 2, 3) == [], "all of them are: somebody has stopped the job"
    kill = only(heard(floor_s + 0.5, 3), do.KillWorker)
    assert kill.rank == 3
    assert kill.reason == f"stopped by a signal for {floor_s + 0.5:.1f} s in paused"


def gated(rank: int, *, still_s: float, python_s: float, frozen_s: float = 0.0) -> Mark:
    """Of a rank that waits at the gate of generation 1."""
    activity = Activity.STOPPED if frozen_s else Activity.UNKNOWN
    return Mark(
        rank, 0, 0, 5, "paused", still_s, python_s=python_s, frozen_s=frozen_s, activity=activity
    )


def test_a_rank_that_returns_before_the_others_ends_the_job_after_one_retry(manager) -> None:
    """It waits for them at the gate, and they wait for it in a collective."""
    job = manager(per_node=2).joined()
    job.return_(0)
    assert job.send(ev.AgentHeard, 0, (mark(1, hangs=False, still_s=29.0),)) == []
    (interrupt,) = job.send(ev.AgentHeard, 0, (mark(1, hangs=False, still_s=31.0),))
    assert "all have to make equal steps" in interrupt.reason
    assert acts(job.pause_all()) == ["Resume"]
    job.return_(0)
    again = mark(1, hangs=False, still_s=31.0, generation=1)
    assert job.send(ev.AgentHeard, 0, (again,)) == [], "the second time it has more time"
    again = mark(1, hangs=False, still_s=241.0, generation=1)
    assert only(job.send(ev.AgentHeard, 0, (again,)), do.GiveUp).reason == (
        "the same failure came 2 times: rank 1 hangs: rank 1 waits in all_reduce 41 of group 0 for "
        "241.0 s, and the function of rank 0 has returned: all have to make equal steps at step 5"
    )
