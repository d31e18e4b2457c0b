"""The recovery that is under way, from its first fault to its record.

Owns when an attempt begins, when it is complete, and when its record goes out unfinished. One
recovery is one generation.
"""

from taskd.core import commands as do
from taskd.core.events import WorkerRecovered
from taskd.core.faults import TimedFault, describe
from taskd.core.job.record import Attempt, StartedAnew, duration_of
from taskd.core.job.state import JobState
from taskd.core.phase import JobPhase
from taskd.core.transitions import Commands

# A model is loaded and its first batch is read; then the record goes out without the first step.
FIRST_STEP_S = 600.0


def begin_attempt(job: JobState, faults: list[TimedFault]) -> tuple[Commands, Attempt]:
    """The attempt that answers these faults, and the record of one that they cut short."""
    if job.attempt is not None and job.phase is JobPhase.PAUSING:
        return [], job.attempt
    before = job.attempt
    why = "; ".join(describe(timed.fault) for timed in faults) or "another recovery was needed"
    commands = close_attempt(job, f"before every rank had made a new step, {why}")
    began_at = None if before is None else before.outage_began_at
    job.attempt = Attempt(job.cause, job.now, outage_began_at=began_at)
    is_known = bool(faults or job.inherited or job.suspects or job.growing)
    job.attempt.take_over(job.inherited, is_known=is_known)
    job.inherited = []
    return commands, job.attempt


def close_attempt(job: JobState, not_completed: str) -> Commands:
    """The record of a recovery that does not come to its end. Nothing if none is under way."""
    records = close_restart(job)
    attempt, job.attempt = job.attempt, None
    return records if attempt is None else [*records, _record(job, attempt, not_completed)]


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
    if not attempt.is_restart:
        return [_record(job, attempt)]
    live = {member.rank for member in job.membership.ordered() if member.is_live}
    job.restarted = StartedAnew(
        attempt, job.generation, job.budget.used, job.now, job.now + FIRST_STEP_S, live
    )
    return []


def count_first_step(job: JobState, report: WorkerRecovered) -> Commands:
    """A rank of a group that was started anew has made a step. The last one's completes it."""
    restarted = job.restarted
    if restarted is None or report.rank not in restarted.waiting:
        return []
    restarted.waiting.discard(report.rank)
    before = restarted.went_on_from
    restarted.went_on_from = report.version if before is None else min(before, report.version)
    slowest = restarted.attempt.slowest
    restarted.attempt.slowest = max(slowest or report, report, key=duration_of)
    if restarted.waiting:
        return []
    restarted.complete_at = job.now
    restarted.attempt.went_on_from(restarted.went_on_from)
    return close_restart(job)


def close_restart(job: JobState) -> Commands:
    """The record of a restart whose first steps were seen, or will not be. Nothing: there is none.

    Where not all were seen, it counts until the processes had started.
    """
    restarted, job.restarted = job.restarted, None
    if restarted is None:
        return []
    if restarted.waiting:
        restarted.attempt.slowest = None
    attempt = restarted.attempt
    record = attempt.record(
        restarted.complete_at,
        restarted.generation,
        restarted.restarts_used,
        job.membership.max_restarts,
    )
    return [do.RecordRecovery(attempt.cause, restarted.generation, record)]


def _record(job: JobState, attempt: Attempt, not_completed: str = "") -> do.RecordRecovery:
    budget = job.membership.max_restarts
    record = attempt.record(job.now, job.generation, job.budget.used, budget, not_completed)
    return do.RecordRecovery(attempt.cause, job.generation, record)
