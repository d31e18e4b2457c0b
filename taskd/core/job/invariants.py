"""What must hold in every state of a job between two events. Tests assert it after each."""

from taskd.core.job.state import JobState
from taskd.core.phase import DUMPING, OVER, JobPhase
from taskd.core.worker_state import WorkerState

_MAY_AWAIT = frozenset({JobPhase.PAUSING, JobPhase.RESTARTING}) | DUMPING


def check(job: JobState) -> None:
    """Assert every invariant that can be seen from inside."""
    assert not job.undeclared, job.undeclared
    job.membership.check()
    members = job.members.values()
    if job.phase is JobPhase.PAUSING:
        assert job.attempt is not None
        running = (member for member in members if member.is_live)
        awaited = {member.rank for member in running if member.state is not WorkerState.PAUSED}
        assert awaited == set(job.awaited.pending()), (awaited, job.awaited.pending())
        is_returning = job.returning is not None and bool(job.returning.pending)
        assert awaited or len(job.absent) or is_returning
        lost = {member.node_rank for member in job.membership.lost()}
        assert lost <= set(job.absent.pending()) or job.dump is not None
    assert not len(job.awaited) or job.phase in _MAY_AWAIT
    assert not len(job.absent) or job.phase is JobPhase.PAUSING
    assert job.returning is None or (job.phase is JobPhase.PAUSING and job.dump is None)
    assert job.dump is not None or job.phase not in DUMPING
    assert job.join_by is None or job.phase is JobPhase.JOINING
    assert (job.suspect_until is None) == (job.phase is not JobPhase.SUSPECTING)
    assert (job.status_by is None) == (job.phase is not JobPhase.CONFIRMING)
    assert (job.end_by is None) == (not job.after_release)
    assert not job.after_release or job.phase is JobPhase.RELEASED
    if job.phase is JobPhase.RESUMED:
        assert job.attempt is not None
        assert job.attempt.waiting
        assert job.resumed_generation == job.generation
    if job.phase is not JobPhase.JOINING:
        assert bool(job.suspects) == (job.phase is JobPhase.SUSPECTING)
        assert not job.unanswered
        assert not job.is_recovery_needed
    if job.phase in (JobPhase.RUNNING, JobPhase.RESUMED):
        stopped = (WorkerState.LOST, WorkerState.PAUSED)
        assert not any(member.state in stopped for member in members), members
    if job.restarted is not None:
        assert job.phase in (JobPhase.RUNNING, JobPhase.SUSPECTING)
    if job.phase in OVER:
        assert job.attempt is None
        assert job.dump is None
