"""What must hold in every state of a job between two events. Tests assert it after each.

Three parts, so that a job of thousands of ranks can be looked at after each event, too: what is
true of the job as a whole, in O(1); what is true of one member; and what needs all of them.
"""

from collections.abc import Iterable

from taskd.core.faults import FaultKind
from taskd.core.job.member import Member
from taskd.core.job.state import JobState
from taskd.core.phase import DUMPING, OVER, JobPhase
from taskd.core.worker_state import WorkerState

_MAY_AWAIT = frozenset({JobPhase.PAUSING, JobPhase.RESTARTING}) | DUMPING


def check(job: JobState) -> None:
    """Assert every invariant that can be seen from inside."""
    check_whole(job)
    check_tables(job)
    for member in job.members.values():
        _check_state(job, member)


def check_some(job: JobState, ranks: Iterable[int]) -> None:
    """Assert what is true of the job as a whole and of these ranks, those that are not known aside.

    As `check`, if nothing else has changed since that was asked.
    """
    check_whole(job)
    for rank in ranks:
        member = job.members.get(rank)
        if member is not None:
            check_member(job, member)


def check_whole(job: JobState) -> None:
    """Assert what is seen without a look at any member. O(1)."""
    assert not job.undeclared, job.undeclared
    if job.phase is JobPhase.PAUSING:
        assert job.attempt is not None
        is_returning = job.returning is not None and bool(job.returning.pending)
        assert len(job.awaited) or len(job.absent) or is_returning
    assert not len(job.awaited) or job.phase in _MAY_AWAIT
    if len(job.absent):
        is_bounded = job.phase is JobPhase.JOINING and job.join_by is not None
        assert job.phase is JobPhase.PAUSING or is_bounded
    assert job.returning is None or (job.phase is JobPhase.PAUSING and job.dump is None)
    assert job.dump is not None or job.phase not in DUMPING
    assert job.join_by is None or job.phase is JobPhase.JOINING
    assert job.joining.ask_at is None or job.phase is JobPhase.JOINING
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
    if job.restarted is not None:
        assert job.phase in (JobPhase.RUNNING, JobPhase.SUSPECTING)
    if job.phase in OVER:
        assert job.attempt is None
        assert job.dump is None


def check_member(job: JobState, member: Member) -> None:
    """Assert what is true of one member, whatever the others do."""
    job.membership.check_member(member)
    _check_state(job, member)


def _check_state(job: JobState, member: Member) -> None:
    phase, state = job.phase, member.state
    if phase is JobPhase.PAUSING:
        must_stop = member.is_live and state is not WorkerState.PAUSED
        assert must_stop == (member.rank in job.awaited), member
        is_lost = state is WorkerState.LOST and job.dump is None
        assert not is_lost or member.node_rank in job.absent, member
    elif phase is JobPhase.RUNNING or phase is JobPhase.RESUMED:
        assert state is not WorkerState.LOST, member
        assert state is not WorkerState.PAUSED, member


def check_tables(job: JobState) -> None:
    """Assert what is seen only with all members at hand: tables that name ranks name these."""
    job.membership.check()
    if job.phase is JobPhase.PAUSING:
        unknown = [rank for rank in job.awaited if rank not in job.members]
        assert not unknown, unknown
    if job.attempt is not None:
        faults = (timed.fault for timed in job.attempt.faults)
        raised = {fault.rank for fault in faults if fault.kind is FaultKind.RAISED}
        suspected = job.attempt.broken | job.attempt.doubtful
        assert suspected <= raised, f"suspected for no exception that counts: {suspected - raised}"
