"""RecoveryMachine: recoveries that follow each other and lead to no new step."""

import itertools

import pytest

from taskd.core import commands as do
from taskd.core import events as ev
from taskd.core.faults import FaultKind
from taskd.core.phase import JobPhase
from taskd.core.policy.ladder import SHORT_LIFE_S
from taskd.core.policy.stagnation import DEATH_LIMIT, OWN_LIMIT
from tests.unit.core.answers import kinds, only


def warnings(commands) -> list[str]:
    return [command.text for command in commands if isinstance(command, do.ReportNoProgress)]


def records(commands) -> list[do.RecoveryRecord]:
    return [command.record for command in commands if isinstance(command, do.RecordRecovery)]


def let_all_in(job, version: int | None = 5) -> None:
    while job.machine.phase is JobPhase.PAUSING:
        job.pause_all(version)


class TestInPlace:
    def test_exceptions_that_differ_each_time(self, manager) -> None:
        job = manager().joined()
        said, written = [], []
        for number in range(OWN_LIMIT):
            commands = job.raise_(number % 4, f"RuntimeError: bad {number}")
            said += warnings(commands)
            written += records(commands)
            let_all_in(job)
        give_up = only(commands, do.GiveUp)
        assert give_up.reason == (
            "no new step since step 5 in 6 recoveries: ranks 0, 1, 2, 3 6 times raised; last, rank "
            "1 raised RuntimeError: bad 5 at step 5"
        )
        assert (give_up.culprit, give_up.fault.traceback) == (1, "Traceback")
        assert len(said) == 1
        assert said[0] == (
            "no new step since step 5 in 3 recoveries: ranks 0, 1, 2 3 times raised; last, rank 2 "
            "raised RuntimeError: bad 2 at step 5. The job ends after "
            "6 failures of its own, or 32 of one rank, unless it commits a new step"
        )
        assert [record.generation for record in written] == [1, 2, 3, 4, 5, 5], (
            "the last fault is not answered any more"
        )
        assert all(record.not_completed for record in written)

    def test_a_new_step_in_between_is_progress(self, manager) -> None:
        job = manager().joined()
        for version in range(5, 40):
            commands = job.raise_(1, f"RuntimeError: bad {version}", version=version)
            assert kinds(commands) == ["Interrupt"]
            let_all_in(job, version)
            job.recover_all(version + 1)

    def test_a_step_that_is_done_again_is_none(self, manager) -> None:
        """It dies at step 6 each time, and with it the only copy of that step."""
        job = manager().joined()
        for number in range(OWN_LIMIT):
            commands = job.lose(2, FaultKind.CRASHED, f"SIGSEGV at {number}", version=6)
            let_all_in(job, 5)
            job.recover_all(6) if number % 2 else None
        assert "no new step since step 6" in only(commands, do.GiveUp).reason

    def test_different_kinds(self, manager) -> None:
        job = manager().joined()
        faults = itertools.cycle(
            [
                (FaultKind.CRASHED, "SIGSEGV"),
                (FaultKind.EXITED, "exit 3"),
                (FaultKind.EXITED_EARLY, "exit 0"),
            ]
        )
        for number, (kind, detail) in zip(range(OWN_LIMIT), faults, strict=False):
            commands = job.lose(number % 4, kind, detail)
            let_all_in(job)
        reason = only(commands, do.GiveUp).reason
        assert "2 times crashed, 2 times exited, 2 times exited early" in reason

    def test_starts_that_fail_in_one_recovery(self, manager) -> None:
        job = manager().joined()
        job.lose(2, FaultKind.KILLED, "SIGKILL")
        for number in range(OWN_LIMIT):
            commands = job.lose(
                2, FaultKind.START_FAILED, f"fork {number}: no memory", version=None
            )
        assert "6 times start failed" in only(commands, do.GiveUp).reason

    def test_a_kill_storm_is_one_recovery(self, manager) -> None:
        job = manager(per_node=40).joined()
        for rank in range(1, 40):
            assert not warnings(job.lose(rank, FaultKind.CRASHED, f"SIGSEGV at {rank}"))

    def test_victims_do_not_count(self, manager) -> None:
        job = manager().joined()
        for number in range(2 * OWN_LIMIT):
            job.raise_(1, f"RuntimeError: {number}")
            assert "GiveUp" not in kinds(job.lose(2, FaultKind.KILLED, "SIGKILL", age=0.5))
            let_all_in(job)


class TestFromOutside:
    def test_one_rank_again_and_again_at_one_step(self, manager) -> None:
        job = manager().joined()
        said = {}
        for number in range(1, DEATH_LIMIT + 1):
            commands = job.lose(2, FaultKind.KILLED, "SIGKILL, cgroup oom_kill 0 → 1")
            said |= dict.fromkeys([number], text) if (text := warnings(commands)) else {}
            let_all_in(job)
        assert list(said) == [3, 6, 12, 24], "again each time that the count has doubled"
        assert (
            "in 3 recoveries: rank 2 3 times killed; last, rank 2 ended with SIGKILL, cgroup "
            "oom_kill 0 → 1 at step 5"
        ) in said[3][0]
        assert "32 times killed" in only(commands, do.GiveUp).reason

    def test_the_last_one_whose_exit_status_is_known_is_shown(self, manager, make_fault) -> None:
        """The job ends on the alarm of the last death, and names what ended those before."""
        job = manager().joined()
        for _ in range(DEATH_LIMIT):
            life = job.incarnation(2)
            commands = job.lose(2)
            how = make_fault(FaultKind.KILLED, 2, life, "SIGKILL, cgroup oom_kill", version=5)
            job.worker(ev.WorkerExitKnown, 2, how, incarnation=life)
            let_all_in(job)
        give_up = only(commands, do.GiveUp)
        assert give_up.reason.endswith("last, rank 2 ended with SIGKILL, cgroup oom_kill at step 5")
        assert give_up.fault.kind is FaultKind.KILLED

    def test_every_rank_once_is_somebody_at_work(self, manager) -> None:
        job = manager(per_node=2 * DEATH_LIMIT).joined()
        for rank in job.ranks:
            assert not warnings(job.lose(rank, FaultKind.KILLED, "SIGKILL"))
            let_all_in(job)

    def test_what_it_was_may_be_known_only_later(self, manager, make_fault) -> None:
        job = manager().joined()
        said = []
        for number in range(OWN_LIMIT):
            life = job.incarnation(1)
            said += warnings(job.lose(1))
            how = make_fault(FaultKind.CRASHED, 1, life, f"SIGSEGV {number}", version=5)
            commands = job.worker(ev.WorkerExitKnown, 1, how, incarnation=life)
            said += warnings(commands)
            let_all_in(job)
        assert len(said) == 2, (
            "the third time and the sixth, which was not known yet to be the last"
        )
        assert "6 times crashed" in only(commands, do.GiveUp).reason


class TestWithoutVersions:
    def restart(self, job) -> list[do.Command]:
        return [command for rank in job.ranks for command in job.worker(ev.WorkerStarted, rank, 1)]

    def test_short_lives_that_end_differently_each_time(self, manager) -> None:
        job = manager().joined(declared=False)
        for number in range(OWN_LIMIT):
            commands = job.lose(1, FaultKind.EXITED, f"exit {number}", version=None)
            self.restart(job)
        assert ("no new step so far in 6 recoveries: rank 1 6 times exited") in only(
            commands, do.GiveUp
        ).reason

    def test_long_lives_are_told_of_and_end_nothing(self, manager) -> None:
        job = manager().joined(declared=False)
        said = []
        for _ in range(13):
            for _ in range(7):
                job.hear_all_until(job.now + SHORT_LIFE_S / 6)
            commands = job.lose(1, FaultKind.EXITED, "exit 1", version=None)
            assert "RestartGroup" in kinds(commands)
            said += warnings(commands)
            self.restart(job)
        assert [text.partition(" times")[0] for text in said] == [
            f"the same failure came {count}" for count in (3, 6, 12)
        ]
        assert "cannot be seen without a TrainState" in said[0]

    @pytest.mark.parametrize("declared", [True, False])
    def test_an_exception_before_the_first_state_hours_apart(self, manager, declared) -> None:
        job = manager().joined(declared=declared)
        for number in range(12):
            job.hear_all_until(job.now + 10.0), job.hear_all_until(job.now + SHORT_LIFE_S)
            commands = job.lose(1, FaultKind.EXITED, f"exit {number}", version=None)
            assert "GiveUp" not in kinds(commands)
            let_all_in(job, None)
            self.restart(job)


def test_a_new_manager_counts_anew(manager) -> None:
    """It cannot know of what was before: docs/assumptions.md."""
    for _ in range(2):
        job = manager().joined()
        for number in range(OWN_LIMIT - 1):
            assert "GiveUp" not in kinds(job.raise_(1, f"RuntimeError: bad {number}"))
            let_all_in(job)
