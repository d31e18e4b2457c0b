"""RecoveryMachine: what comes while an emergency checkpoint is prepared or written."""

import pytest

from taskd.core import commands as do
from taskd.core import events as ev
from taskd.core.faults import FaultKind
from taskd.core.phase import JobPhase
from taskd.core.policy.stagnation import OWN_LIMIT
from tests.unit.core.answers import kinds, only


@pytest.fixture
def saving(manager):
    """Rank 1 of four is dead; the others write."""
    job = manager(strategies="dump").joined()
    job.lose(1, FaultKind.KILLED, "SIGKILL")
    job.pause_all()
    assert job.machine.phase is JobPhase.SAVING
    return job


def dumped(job, rank: int, stage: str, detail: str = "") -> list[do.Command]:
    return job.worker(ev.WorkerDumped, rank, job.machine.generation, stage, detail)


@pytest.fixture
def publishing(saving):
    """All have written; rank 0 is to publish."""
    for rank in (0, 2, 3):
        answer = dumped(saving, rank, "written")
    assert only(answer, do.Publish).rank == 0
    return saving


def test_an_agent_that_comes_back_while_the_exit_status_is_awaited_is_told_again(
    manager,
) -> None:
    job = manager(strategies="dump").joined()
    interrupt = only(job.lose(1), do.Interrupt)
    job.pause_all()
    assert job.machine.phase is JobPhase.CONFIRMING
    reports = [
        ev.WorkerReport(rank, 0, "lost" if rank == 1 else "paused", True, 5, True, True)
        for rank in job.ranks
    ]
    assert job.register(0, *reports, generation=1) == [interrupt]
    assert job.machine.phase is JobPhase.CONFIRMING


def test_a_writer_that_reports_again_while_another_publishes_changes_nothing(publishing) -> None:
    assert dumped(publishing, 2, "written") == []
    assert dumped(publishing, 2, "failed", "gone") == []
    assert dumped(publishing, 0, "written") == []
    assert publishing.machine.phase is JobPhase.PUBLISHING
    end = only(dumped(publishing, 0, "published", "/c/dump-5"), do.GiveUp)
    assert end.dump == "/c/dump-5"


def test_a_publisher_that_is_not_done_in_time_ends_the_job_without_a_checkpoint(publishing) -> None:
    deadline = publishing.now + publishing.timeouts.dump_s
    while publishing.now < deadline - 2:
        publishing.hear_all_until(publishing.now + 1)
    publishing.hear_all_until(deadline)
    end = only(publishing.send(ev.Tick, at=deadline + 0.1), do.GiveUp)
    assert end.reason.endswith("; and no dump: rank 0 was not done after 1800 s")
    assert end.dump == ""


def test_while_writers_come_to_an_end_only_those_that_have_not_count(saving) -> None:
    assert dumped(saving, 2, "failed", "no space") == []
    assert saving.machine.phase is JobPhase.DISCARDING
    assert dumped(saving, 2, "written") == [], "it has said that it failed"
    assert dumped(saving, 0, "withdrawn") == [], "nobody has told it to remove anything yet"
    assert dumped(saving, 0, "written") == []
    assert only(dumped(saving, 3, "written"), do.Publish).withdraw


def test_a_shard_that_no_writer_reaches_ends_the_job_without_a_checkpoint(manager) -> None:
    """Shard b is left in the memory of node 1 alone, whose only live rank has no whole copy.

    The rank that starts anew to write it dies.
    """
    job = manager(nodes=2, per_node=2, strategies="dump").joined()
    for rank in job.ranks:
        job.worker(ev.WorkerHolds, rank, "ab"[rank % 2])
    job.lose(1, FaultKind.KILLED, "SIGKILL", version=4)
    job.lose(3, FaultKind.KILLED, "SIGKILL", version=4, snapshots=(4,))
    job.pause(0, 4)
    assert only(job.pause(2, 4, clean=False), do.ReplaceWorker).rank == 3, "to write it"
    end = only(job.lose(3, FaultKind.KILLED, "SIGKILL", version=None, snapshots=(4,)), do.GiveUp)
    assert end.dump == ""
    assert "; and no dump: " in end.reason
    assert "b" in end.reason.rpartition("; and no dump: ")[2]


def test_the_fault_that_is_shown_may_be_of_an_earlier_recovery(manager) -> None:
    """No new step in six recoveries: the newest fault with a traceback tells most of it."""
    job = manager(strategies="recover-in-place,dump").joined()
    for number in range(OWN_LIMIT - 1):
        rank = (number + 2) % 3  # the last one is rank 0
        assert "Interrupt" in kinds(job.raise_(rank, f"RuntimeError: bad {number}"))
        job.pause_all()
    job.lose(1, FaultKind.CRASHED, "SIGSEGV")
    job.pause_all()
    for rank in (0, 2, 3):
        dumped(job, rank, "written")
    end = only(dumped(job, 0, "published", "/c"), do.GiveUp)
    assert (end.fault.detail, end.fault.traceback) == ("RuntimeError: bad 4", "Traceback")
    assert end.culprit == 0


def test_a_node_that_is_lost_later_does_not_hide_the_death_that_ends_the_job(saving) -> None:
    """Only a broken communication is explained by a lost node."""
    saving.send(ev.AgentDraining, 0, "SIGTERM", 30.0)
    for rank in (0, 2, 3):
        dumped(saving, rank, "written")
    end = only(dumped(saving, 0, "published", "/c"), do.GiveUp)
    assert end.reason == "rank 1 ended with SIGKILL at step 5; step 5 was saved in /c"


def test_a_node_that_leaves_before_all_have_stopped_is_not_the_reason(manager) -> None:
    job = manager(nodes=2, per_node=2, strategies="dump").joined()
    job.lose(1, FaultKind.KILLED, "SIGKILL")
    job.send(ev.AgentLeft, 1, "failed", "")
    assert only(job.pause(0), do.Dump).reason == "rank 1 ended with SIGKILL at step 5"


BARRED = "; no restart is allowed (recover-strategy)"
NO_DUMP = "; and no dump: no live process uses taskd.recoverable"


@pytest.mark.parametrize(
    ("strategies", "declared", "why"),
    [
        ("dump", False, BARRED + NO_DUMP),
        ("exit", False, BARRED),
        ("exit", True, BARRED),
        ("elastic-training", True, BARRED),
        ("retry,dump", False, BARRED + NO_DUMP),
    ],
)
def test_an_end_without_restart_and_dump_says_why_there_was_neither(
    manager, strategies: str, declared: bool, why: str
) -> None:
    job = manager(strategies=strategies).joined(declared=declared)
    end = only(job.lose(2, FaultKind.KILLED, "SIGKILL", version=None), do.GiveUp)
    assert end.reason == "rank 2 ended with SIGKILL" + why


def test_a_job_that_has_no_restarts_left_says_why_it_is_not_saved(manager) -> None:
    job = manager(strategies="recover,dump", max_restarts=0).joined(declared=False)
    end = only(job.lose(2, FaultKind.KILLED, "SIGKILL", version=None), do.GiveUp)
    assert end.reason.startswith("restart budget spent")
    assert end.reason.endswith("when rank 2 ended with SIGKILL" + NO_DUMP)


def test_a_job_that_ends_while_all_are_restarted_says_why_it_is_not_saved(manager) -> None:
    job = manager(strategies="recover,dump", max_restarts=1).joined(declared=False)
    only(job.lose(2, FaultKind.KILLED, "SIGKILL", version=None), do.RestartGroup)
    end = only(job.lose(1, FaultKind.KILLED, "SIGKILL", version=None), do.GiveUp)
    assert end.reason.endswith("; and no dump: its ranks are not training (phase restarting)")
