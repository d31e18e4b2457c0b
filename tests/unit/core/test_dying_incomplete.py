"""The dying gasp of a job of which the manager, started again, does not know all ranks."""

import pytest

from taskd.core import commands as do
from taskd.core import events as ev
from taskd.core.faults import FaultKind
from taskd.core.phase import JobPhase
from tests.unit.core.answers import acts, kinds, only

_ALLOWED = "recover-in-place,dump"


def report(rank: int, state: str = "running", version: int = 7, **more: object) -> ev.WorkerReport:
    return ev.WorkerReport(rank, 0, state, True, version, entered=True, **more)


def half(manager, *states: str, strategies: str = _ALLOWED, **more: object):
    """Node 0 of two has come, with two ranks in these states; node 1 has not."""
    job = manager(nodes=2, per_node=2, strategies=strategies)
    reports = [report(rank, state, **more) for rank, state in enumerate(states)]
    job.register(0, *reports, generation=1)
    return job


def overdue(job) -> list[do.Command]:
    """Node 1 has not come in time."""
    job.hear_all_until(120.0)
    return job.tick(at=131.0)


class TestRanksThatNeverCome:
    def test_what_the_others_hold_is_saved(self, manager) -> None:
        job = half(manager, "paused", "paused")
        said = overdue(job)
        assert kinds(said) == ["Interrupt", "Dump"]
        dump = only(said, do.Dump)
        assert (dump.version, dump.writers, dump.world_size) == (7, (0, 1), 4)
        assert dump.reason == (
            "a recovery is under way, and ranks [2, 3] are not known to this manager"
        )
        for rank in (0, 1):
            said = job.worker(ev.WorkerDumped, rank, 2, "written", "")
        assert kinds(said) == ["Publish"]
        end = only(job.worker(ev.WorkerDumped, 0, 2, "published", "/c/dump-7"), do.GiveUp)
        assert end.reason == f"{dump.reason}; step 7 was saved in /c/dump-7"

    def test_who_still_trains_is_called_out_first(self, manager) -> None:
        job = half(manager, "running", "running")
        job.lose(1, FaultKind.KILLED, "SIGKILL")
        assert kinds(overdue(job)) == ["Interrupt"]
        dump = only(job.pause(0, 7), do.Dump)
        assert (dump.writers, dump.world_size) == ((0,), 4)
        assert dump.reason == (
            "rank 1 ended with SIGKILL at step 5, and ranks [2, 3] are not known to this manager"
        )

    def test_they_come_at_last_and_are_stopped_too(self, manager) -> None:
        job = half(manager, "running", "paused")
        assert kinds(overdue(job)) == ["Interrupt"]
        assert kinds(job.register(1, report(2), report(3, "paused"), generation=1)) == ["Interrupt"]
        assert job.pause(0, 7) == []
        assert only(job.pause(2, 7), do.Dump).writers == (0, 1, 2, 3)

    def test_they_come_when_the_others_write(self, manager) -> None:
        job = half(manager, "paused", "paused")
        dump = only(overdue(job), do.Dump)
        assert job.register(1, report(2), report(3), generation=1) == [dump]

    @pytest.mark.parametrize(
        ("strategies", "more", "problem"),
        [
            ("recover-in-place", {}, ""),
            (_ALLOWED, {"version": 0}, "; and no dump: no step was committed yet"),
            (_ALLOWED, {"clean": False}, "; and no dump: "),
        ],
    )
    def test_where_nothing_can_be_saved_the_reason_says_so(
        self, manager, strategies, more, problem
    ) -> None:
        job = half(manager, "paused", "paused", strategies=strategies, **more)
        said = overdue(job)
        assert "Dump" not in acts(said)
        reason = only(said, do.GiveUp).reason
        assert ("; and no dump: " in reason) == bool(problem)
        assert problem in reason

    def test_a_job_that_does_not_use_taskd_recoverable_is_not_saved(self, manager) -> None:
        job = manager(nodes=2, per_node=1, strategies=_ALLOWED)
        job.register(0)
        job.lose(0)
        end = only(overdue(job), do.GiveUp)
        assert end.reason == (
            "rank 0 ended at step 5, and ranks [1] are not known to this manager; and no dump: "
            "no live process uses taskd.recoverable"
        )


class TestOtherEnds:
    def test_a_node_is_to_end(self, manager) -> None:
        job = half(manager, "running", "running")
        assert only(job.send(ev.AgentDraining, 0, "SIGTERM", 30.0), do.Interrupt).finish_step
        assert job.machine.phase is JobPhase.PAUSING
        assert job.pause(0, 8) == []
        assert only(job.pause(1, 8), do.Dump).version == 8

    def test_the_job_has_only_begun(self, manager) -> None:
        job = manager(nodes=2, per_node=1, strategies=_ALLOWED)
        job.register(0, ev.WorkerReport(0, 0, "running", True))
        end = only(job.send(ev.AgentDraining, 0, "SIGTERM", 30.0), do.GiveUp)
        assert end.reason.endswith("; and no dump: rank 0 has not come to its function yet")

    def test_a_node_leaves(self, manager) -> None:
        job = manager(nodes=3, per_node=1, strategies=_ALLOWED)
        for rank in (0, 1):
            job.register(rank, report(rank), generation=1)
        assert kinds(job.send(ev.AgentLeft, 1, "failed", "")) == ["Interrupt"]
        assert only(job.pause(0, 7), do.Dump).world_size == 3
