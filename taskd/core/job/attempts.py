"""The recovery that is under way, from its first fault to its record.

Owns when an attempt begins, when it is complete, and when its record goes out unfinished. One
recovery is one generation.
"""

from taskd.core import commands as do
from taskd.core.events import WorkerRecovered
from taskd.core.faults import TimedFault, describe
from taskd.core.job.record import Attempt
from taskd.core.job.state import JobState
from taskd.core.phase import JobPhase
from taskd.core.transitions import Commands


def begin_attempt(job: JobState, faults: list[TimedFault]) -> tuple[Commands, Attempt]:
    """The attempt that answers these faults, and the record of one that they cut short."""
    if job.attempt is not None and job.phase is JobPhase.PAUSING:
        return [], job.attempt
    before = job.attempt
    why = "; ".join(describe(timed.fault) for timed in faults) or "another recovery was needed"
    commands = close_attempt(job, f"before every rank had made a new step, {why}")
    began_at = None if before is None else before.outage_began_at
    job.attempt = Attempt(job.cause, job.now, outage_began_at=began_at)
    is_known = bool(faults or job.inherited or job.suspects)
    job.attempt.take_over(job.inherited, is_known=is_known)
    job.inherited = []
    return commands, job.attempt


def close_attempt(job: JobState, not_completed: str) -> Commands:
    """The record of a recovery that does not come to its end. Nothing if none is under way."""
    attempt, job.attempt = job.attempt, None
    return [] if attempt is None else [_record(job, attempt, not_completed)]


def count_recovered(job: JobState, rank: int, report: WorkerRecovered | None = None) -> Commands:
    """A rank is back; without a report it started, returned or ended. The last ends the attempt."""
    attempt = job.attempt
    if attempt is not None and attempt.is_restart:
        attempt.paused(job.now, replaced=True)
    if attempt is None or not attempt.recovered(rank, report):
        return []
    job.attempt = None
    if job.phase in (JobPhase.RESUMED, JobPhase.RESTARTING):
        job.phase = JobPhase.RUNNING
        job.awaited.clear()
    return [_record(job, attempt)]


def _record(job: JobState, attempt: Attempt, not_completed: str = "") -> do.RecordRecovery:
    budget = job.membership.max_restarts
    record = attempt.record(job.now, job.generation, job.budget.used, budget, not_completed)
    return do.RecordRecovery(attempt.cause, job.generation, record)
