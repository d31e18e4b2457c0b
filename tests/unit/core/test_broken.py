"""RecoveryMachine: an exception that comes back in a rank, whose process may be broken."""

from dataclasses import replace

import pytest

from taskd.core import commands as do
from taskd.core import events as ev
from taskd.core.faults import FaultKind
from taskd.core.phase import JobPhase
from tests.unit.core.answers import acts, kinds, only, plan


def come_back(job, rank: int = 1, version: int = 5) -> list[do.Command]:
    """The same exception twice at one step.

    Returns the answer when everybody waits for the second time.
    """
    job.raise_(rank, version=version)
    job.pause_all(version)
    assert job.machine.phase is JobPhase.RESUMED
    assert job.raise_(rank, version=version) == [], "its cause may be on the way"
    assert acts(job.tick()) == ["Interrupt"]
    return job.pause_all(version)


def sharded(manager, strategies: str = ""):
    """Ranks 0 and 2 hold one part, 1 has the other for itself."""
    job = manager(per_node=3, strategies=strategies).joined()
    for rank, shard in ((0, "a"), (1, "b"), (2, "a")):
        job.worker(ev.WorkerHolds, rank, shard)
    return job


def test_the_second_time_its_process_is_replaced_and_the_third_time_the_job_ends(manager) -> None:
    job = manager().joined()
    assert come_back(job) == [
        do.ReplaceWorker(job.machine.story.to_dicts()[-1]["cause"], 2, 0, 1, 1, restarts_used=2)
    ]
    resume = only(job.pause(1, None), do.Resume)
    assert (resume.version, plan(resume)) == (5, {1: 0})
    assert job.raise_(1) == []
    commands = job.tick()
    assert only(commands, do.GiveUp).reason == (
        "the same exception came back: rank 1 raised ValueError: x at step 5"
    )
    assert only(commands, do.GiveUp).fault.traceback == "Traceback"
    replaced, gave_up = [
        command.record for command in commands if isinstance(command, do.RecordRecovery)
    ]
    assert (replaced.strategy, replaced.generation) == ("recover-in-place", 2)
    assert replaced.reason == (
        "the same exception came back: the process of rank 1 is replaced; others hold what they had"
    )
    assert (gave_up.strategy, gave_up.not_completed.partition(":")[0]) == (
        "exit",
        "the job was given up",
    )


def test_a_new_process_cures_it(manager) -> None:
    job = manager().joined()
    come_back(job)
    job.pause(1, None)
    record = only(job.recover_all(6), do.RecordRecovery).record
    assert (record.strategy, record.not_completed, record.steps_redone) == (
        "recover-in-place",
        "",
        0,
    )
    assert record.sources[1] == (1, "rank 0")
    assert not any("held no extras" in line for line in job.machine.story.of_rank(1)), (
        "its black box has them"
    )


def test_an_earlier_death_that_is_heard_of_meanwhile_explains_it(manager) -> None:
    job = manager().joined()
    job.raise_(1)
    job.pause_all()
    job.raise_(1)
    assert acts(job.lose(2, age=0.5)) == ["Interrupt", "ReplaceWorker"]
    assert kinds(job.pause_all()) == ["Resume"]
    assert [job.incarnation(rank) for rank in job.ranks] == [0, 0, 1, 0]


@pytest.mark.parametrize("hold", ["all the same", "parts"])
def test_an_earlier_death_that_is_heard_of_too_late_explains_it_all_the_same(manager, hold) -> None:
    """It was counted already. Nobody else has what rank 1 holds where each holds a part."""
    job = manager().joined() if hold == "all the same" else sharded(manager)
    job.raise_(1)
    job.pause_all()
    job.raise_(1)
    assert acts(job.tick()) == ["Interrupt"]
    assert acts(job.lose(2, FaultKind.KILLED, "SIGKILL", age=30.0)) == ["ReplaceWorker"]
    assert kinds(job.pause_all()) == ["Resume"]
    assert [job.incarnation(rank) for rank in job.ranks if rank != 2] == [0] * (len(job.ranks) - 1)
    assert job.incarnation(2) == 1


def test_in_all_ranks_one_process_is_kept(manager) -> None:
    """In all of them it is no process that is broken, but nothing is lost by trying."""
    job = manager().joined()
    job.raise_(0)
    job.pause_all()
    for rank in job.ranks:
        assert job.raise_(rank) == []
    commands = job.tick()
    assert acts(commands) == ["Interrupt", "ReplaceWorker"], (
        "the others raised it as well, and wait already"
    )
    assert [only(commands, do.ReplaceWorker).rank] == [0], (
        "one is the cause, the others are its followers"
    )


def test_it_is_taken_for_broken_only_at_the_same_step(manager) -> None:
    job = manager().joined()
    for version in (5, 6, 7):
        assert acts(job.raise_(1, version=version)) == ["Interrupt"]
        assert kinds(job.pause_all(version)) == ["Resume"]


def test_before_any_state_is_there(manager) -> None:
    job = manager().joined()
    for _ in range(2):
        job.raise_(1, version=None)
        if job.machine.phase is JobPhase.SUSPECTING:
            job.tick()
        commands = job.pause_all(None)
    assert kinds(commands) == ["ReplaceWorker"]
    assert only(job.pause(1, None), do.Resume).version is None


def test_where_replacing_is_not_allowed_the_second_time_is_the_last(manager) -> None:
    job = manager(strategies="retry").joined()
    job.raise_(1)
    job.pause_all()
    job.raise_(1)
    assert "the same exception came back" in only(job.tick(), do.GiveUp).reason


class TestTheOnlyHolderOfItsPart:
    def test_a_snapshot_takes_its_place(self, manager) -> None:
        job = sharded(manager)
        for generation in (0, 1):
            job.raise_(1, version=5, snapshots=(3, 4))
            if generation:
                job.tick()
            for rank in (0, 2):
                commands = job.pause(rank, 5, snapshots=(3, 4))
        assert kinds(commands) == ["Resume"] or kinds(commands) == ["ReplaceWorker"]
        assert acts(commands) == ["ReplaceWorker"]
        resume = only(job.pause(1, None, snapshots=(3, 4)), do.Resume)
        assert resume.version == 4
        record = only(job.recover_all(), do.RecordRecovery).record
        assert record.steps_redone == 1
        assert "taken from an older snapshot" in record.reason

    def test_without_one_all_are_replaced(self, manager) -> None:
        restart = only(come_back(sharded(manager)), do.RestartGroup)
        assert restart.reason == (
            "the same exception came back: rank 1 raised ValueError: x at step 5, and only its "
            "process holds its part of the state: all are replaced"
        )

    def test_or_it_is_saved_where_that_is_allowed(self, manager) -> None:
        dump = only(come_back(sharded(manager, "recover-in-place,dump")), do.Dump)
        assert dump.version == 5
        assert "its process cannot be replaced: only it holds its part of the state" in dump.reason


class TestWhatNoRecoveryInPlaceCanCure:
    """The copies are whole, and nobody can go on with them."""

    def incurable(self, job, make_fault) -> list[do.Command]:
        what = make_fault(FaultKind.RAISED, 1, 0, "IncurableError: no repair handler", version=5)
        what = replace(what, is_incurable=True)
        assert acts(job.worker(ev.WorkerRaised, 1, 0, what, True, 0.0)) == ["Interrupt"]
        return job.pause_all()

    def test_all_start_anew(self, manager, make_fault) -> None:
        restart = only(self.incurable(manager().joined(), make_fault), do.RestartGroup)
        assert restart.reason == "rank 1 raised IncurableError: no repair handler at step 5"

    def test_or_it_is_saved_where_that_is_allowed(self, manager, make_fault) -> None:
        job = manager(strategies="recover-in-place,dump").joined()
        assert only(self.incurable(job, make_fault), do.Dump).version == 5

    def test_or_the_job_ends(self, manager, make_fault) -> None:
        job = manager(strategies="retry").joined()
        end = only(self.incurable(job, make_fault), do.GiveUp)
        assert "no repair handler" in end.reason


@pytest.mark.parametrize("kind", [FaultKind.COMMUNICATION, FaultKind.HANG])
def test_other_faults_do_not_replace_anybody(manager, kind) -> None:
    job = manager().joined()
    for _ in range(2):
        job.raise_(1, "reset", kind=kind)
        if job.machine.phase is JobPhase.SUSPECTING:
            job.tick()
        assert "ReplaceWorker" not in kinds(job.pause_all())


def raise_elsewhere(job, rank: int = 1) -> list[do.Command]:
    """Three exceptions without a new step, each at another place.

    Returns the answer when everybody waits for the third time.
    """
    for number in range(3):
        assert "Interrupt" in acts(job.raise_(rank, f"RuntimeError: place {number}"))
        commands = job.pause_all()
        if number < 2:
            assert job.machine.phase is JobPhase.RESUMED
    return commands


def test_one_that_raises_again_and_again_elsewhere_is_replaced_the_third_time(manager) -> None:
    """A device in error says so wherever it is asked next."""
    job = manager().joined()
    assert acts(raise_elsewhere(job)) == ["ReplaceWorker"]
    resume = only(job.pause(1, None), do.Resume)
    assert (resume.version, plan(resume)) == (5, {1: 0})
    record = only(job.recover_all(6), do.RecordRecovery).record
    assert (record.strategy, record.steps_redone) == ("recover-in-place", 0)
    assert record.reason == (
        "3 exceptions without a new step: the process of rank 1 is replaced; others hold what "
        "they had"
    )


def test_exceptions_of_different_ranks_say_nothing_against_one_of_them(manager) -> None:
    job = manager().joined()
    for rank in (0, 1, 2):
        job.raise_(rank, f"RuntimeError: place {rank}")
        assert "ReplaceWorker" not in acts(job.pause_all())


def test_what_only_it_holds_is_not_given_up_for_exceptions_that_differ(manager) -> None:
    assert acts(raise_elsewhere(sharded(manager))) == ["Resume"]


def test_where_no_process_may_be_replaced_it_is_kept(manager) -> None:
    job = manager(strategies="retry").joined()
    assert acts(raise_elsewhere(job)) == ["Resume"]


def test_a_new_step_speaks_for_it(manager) -> None:
    job = manager().joined()
    for version in (5, 6, 7):
        assert "Interrupt" in acts(job.raise_(1, f"RuntimeError: {version}", version=version))
        assert acts(job.pause_all(version)) == ["Resume"]
        job.recover_all(version + 1)


def test_a_death_that_explains_its_last_exception_speaks_for_it(manager) -> None:
    job = manager().joined()
    for number in range(3):
        job.raise_(1, f"RuntimeError: place {number}")
        if number < 2:
            job.pause_all()
    assert acts(job.lose(0, FaultKind.KILLED, "SIGKILL", age=0.5)) == ["ReplaceWorker"]
    resume = only(job.pause_all(), do.Resume)
    assert plan(resume) == {0: 1}
