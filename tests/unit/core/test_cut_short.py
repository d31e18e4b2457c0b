"""RecoveryMachine: a restart of all is cut short before every rank has made its first step."""

import pytest

from taskd.core import commands as do
from taskd.core import events as ev
from taskd.core.faults import FaultKind
from taskd.core.policy.ladder import Outcome
from tests.unit.core.answers import acts, only


@pytest.fixture
def restarted(manager):
    """All have started anew after the death of all at step 25, and have declared themselves."""

    def make(*, declared: bool = True, per_node: int = 2, **settings):
        job = manager(per_node=per_node, **settings).joined(declared=declared)
        for rank in job.ranks:
            job.lose(rank, FaultKind.KILLED, "SIGKILL", version=25)
        start(job, declared=declared)
        return job

    return make


def start(job, *, declared: bool = True) -> None:
    """The new processes."""
    for rank in job.ranks:
        assert job.worker(ev.WorkerStarted, rank, 4711) == []
    for rank in job.ranks if declared else ():
        job.worker(ev.WorkerDeclared, rank, True)
    assert job.machine.phase.value == "running"


def record_of(commands) -> do.RecoveryRecord:
    """The one that went out."""
    return only(commands, do.RecordRecovery).record


def test_it_is_not_recovered_and_the_next_one_counts_the_whole_outage(restarted) -> None:
    job = restarted()
    began = 100.0 + 0.01 * 4  # the first death, at about this time
    record = record_of(job.lose(0, version=20))
    assert (record.strategy, record.code) == ("restart", Outcome.FAILED)
    assert record.not_completed == "before every rank had made a new step, rank 0 ended at step 20"
    assert record.total_s == pytest.approx(job.now - began, abs=0.01)
    assert (record.groups_s, record.state_s, record.first_step_s) == (0.0, 0.0, 0.0)
    job.pause_all(20)
    after = record_of(job.recover_all(21))
    assert (after.strategy, after.code) == ("recover-in-place", Outcome.RECOVERED)
    assert after.total_s > record.total_s


def test_in_a_world_of_one(restarted) -> None:
    job = restarted(per_node=1)
    record = record_of(job.lose(0, version=20))
    assert (record.code, record.version, record.steps_redone) == (Outcome.FAILED, 20, 5)


def test_what_the_dead_had_begun_with_says_what_is_done_again(restarted) -> None:
    job = restarted()
    record = record_of(job.lose(0, version=20))
    assert (record.version, record.steps_redone) == (20, 5)
    job.pause_all(20)
    assert record_of(job.recover_all(21)).steps_redone == 0


def test_and_what_others_have_said_with_their_first_step(restarted) -> None:
    job = restarted()
    assert job.recover(1, 20) == []
    record = record_of(job.lose(0, version=None))
    assert (record.version, record.steps_redone) == (20, 5)


def test_if_nobody_has_said_it_the_next_restart_counts_it(restarted) -> None:
    job = restarted()
    record = record_of(job.lose(0, version=None))
    assert acts(job.lose(1, version=None)) == ["RestartGroup"]
    assert (record.version, record.steps_redone) == (None, 0)
    start(job)
    after = record_of(job.recover_all(20))
    assert (after.strategy, after.version, after.steps_redone) == ("restart", 20, 5)


def test_or_the_next_recovery_in_place(restarted) -> None:
    """The other rank has read the checkpoint."""
    job = restarted()
    record = record_of(job.lose(0, version=None))
    assert record.steps_redone == 0
    job.pause_all(20)
    after = record_of(job.recover_all(21))
    assert (after.strategy, after.version, after.steps_redone) == ("recover-in-place", 20, 5)


def test_also_if_nobody_has_read_a_checkpoint_when_all_are_resumed(restarted) -> None:
    job = restarted()
    job.lose(0, version=None)
    assert only(job.pause_all(None), do.Resume).version is None
    after = record_of(job.recover_all(21))
    assert (after.version, after.steps_redone) == (20, 5)


def test_one_that_is_cut_short_before_all_have_started_is_no_different(manager) -> None:
    job = manager(per_node=2).joined()
    for rank in job.ranks:
        job.lose(rank, FaultKind.KILLED, "SIGKILL", version=25)
    job.worker(ev.WorkerStarted, 0, 4711)
    commands = job.lose(0, version=None)
    assert acts(commands) == ["RestartGroup"]
    record = record_of(commands)
    assert (record.code, record.version, record.steps_redone) == (Outcome.FAILED, None, 0)
    start(job)
    assert record_of(job.recover_all(20)).steps_redone == 5


def test_from_the_beginning_all_is_done_again_once(restarted) -> None:
    job = restarted()
    assert record_of(job.lose(0, version=0)).steps_redone == 25
    job.pause_all(0)
    assert record_of(job.recover_all(1)).steps_redone == 0


def test_a_node_is_to_end(restarted) -> None:
    job = restarted(strategies="recover-in-place,dump")
    record = record_of(job.send(ev.AgentDraining, 0, "SIGTERM", 30.0))
    assert (record.strategy, record.code) == ("restart", Outcome.FAILED)
    assert record.not_completed == (
        "before every rank had made a new step, node 0 is to end (SIGTERM)"
    )


def test_the_job_ends_by_it(restarted) -> None:
    job = restarted(max_restarts=2)
    commands = job.lose(0, FaultKind.KILLED, "SIGKILL", version=None)
    records = [one.record for one in commands if isinstance(one, do.RecordRecovery)]
    assert [(one.strategy, one.code) for one in records] == [
        ("restart", Outcome.FAILED),
        ("exit", Outcome.EXIT_ONLY),
    ]
    assert [one.steps_redone for one in records] == [0, 0], "nothing was done again"


class TestUndeclared:
    """It may train without anybody seeing it."""

    def test_soon_after_the_start(self, restarted) -> None:
        job = restarted(declared=False)
        record = record_of(job.lose(0, version=None))
        assert record.code == Outcome.FAILED
        assert record.not_completed == (
            "before every rank was known to have made a new step, rank 0 ended"
        )

    def test_a_minute_later(self, restarted) -> None:
        job = restarted(declared=False)
        started_at = job.now
        for moment in range(110, 180, 10):
            job.hear_all_until(moment)
        record = record_of(job.lose(0, version=None))
        assert (record.code, record.not_completed) == (Outcome.RECOVERED, "")
        assert record.total_s < started_at - 100
        start(job, declared=False)
        assert record_of(job.recover_all(0)).total_s < 1.0, "its own outage"

    def test_a_minute_later_if_others_have_said_that_they_step(self, restarted) -> None:
        job = restarted(declared=False)
        assert job.recover(1, 0) == []
        for moment in range(110, 180, 10):
            job.hear_all_until(moment)
        record = record_of(job.lose(0, version=None))
        assert record.code == Outcome.FAILED
        assert record.not_completed.startswith("before every rank had made a new step")
