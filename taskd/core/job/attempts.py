"""The recovery that is under way, from its first fault to its record.

Owns when an attempt begins, when it is complete, and when its record goes out unfinished. One
recovery is one generation.
"""

from taskd.core import commands as do
from taskd.core.commands import RecoveryRecord
from taskd.core.events import WorkerRecovered
from taskd.core.faults import TimedFault, describe
from taskd.core.job.record import Attempt, StartedAnew, duration_of
from taskd.core.job.state import JobState
from taskd.core.phase import JobPhase
from taskd.core.policy.ladder import SHORT_LIFE_S
from taskd.core.transitions import Commands

# A model is loaded and its first batch is read; then the record goes out without the first step.
FIRST_STEP_S = 600.0


def begin_attempt(job: JobState, faults: list[TimedFault]) -> tuple[Commands, Attempt]:
    """The attempt that answers these faults, and the record of one that they cut short."""
    if job.attempt is not None and job.phase is JobPhase.PAUSING:
        return [], job.attempt
    if job.restarted is not None:
        for timed in faults:  # who has made no step yet died with what it had begun with
            if timed.fault.rank in job.restarted.waiting:
                job.restarted.learn(timed.fault.version)
    why = "; ".join(describe(timed.fault) for timed in faults) or "another recovery was needed"
    commands, attempt = next_attempt(job, why)
    is_known = bool(faults or job.inherited or job.suspects or job.growing)
    attempt.take_over(job.inherited, is_known=is_known)
    job.inherited = []
    return commands, attempt


def next_attempt(job: JobState, why: str) -> tuple[Commands, Attempt]:
    """A new attempt, and the record of the one that it cuts short. `why`: for that."""
    before = open_attempt(job)
    attempt = Attempt(job.cause, job.now)
    if before is not None:
        if job.restarted is not None:
            job.restarted.tell()
        attempt.follow(before)
    what = "had made" if _sees_steps(job) else "was known to have made"
    commands = close_attempt(job, f"before every rank {what} a new step, {why}")
    job.attempt = attempt
    return commands, attempt


def open_attempt(job: JobState) -> Attempt | None:
    """The attempt that is not complete."""
    restarted = job.restarted
    if restarted is None:
        return job.attempt
    return restarted.attempt if _is_open(job, restarted) else None


def unfinished_record(job: JobState, why: str) -> RecoveryRecord | None:
    """What there is to tell of the recovery under way if its end is never seen, because of `why`.

    None: there is none, or its end was seen.
    """
    attempt = open_attempt(job)
    if attempt is None:
        return None
    restarted = job.restarted
    generation = job.generation if restarted is None else restarted.generation
    used = job.budget.used if restarted is None else restarted.restarts_used
    return attempt.record(job.now, generation, used, job.membership.max_restarts, why)


def _is_open(job: JobState, restarted: StartedAnew) -> bool:
    """Whether there is a rank that has not made its first step yet, and is known to train.

    Of a script of which nothing is seen, a minute says that it does: see `SHORT_LIFE_S`.
    """
    waiting = [job.members[rank] for rank in restarted.waiting if rank in job.members]
    if all(member.is_done for member in waiting):
        return False
    return _sees_steps(job) or job.now - restarted.complete_at < SHORT_LIFE_S


def _sees_steps(job: JobState) -> bool:
    """Whether ranks of this script report their first step."""
    is_told = job.restarted is None or job.restarted.went_on_from is not None
    return is_told or any(member.has_declared for member in job.members.values())


def close_attempt(job: JobState, not_completed: str) -> Commands:
    """The record of a recovery that does not come to its end. Nothing if none is under way."""
    records = close_restart(job, not_completed)
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
    restarted.learn(report.version)
    slowest = restarted.attempt.slowest
    restarted.attempt.slowest = max(slowest or report, report, key=duration_of)
    if restarted.waiting:
        return []
    restarted.complete_at = job.now
    return close_restart(job)


def close_restart(job: JobState, not_completed: str = "") -> Commands:
    """The record of a restart whose first steps were seen, or will not be. Nothing: there is none.

    Where not all were seen, it counts until the processes had started; where they were still to
    come, until now.
    """
    restarted = job.restarted
    if restarted is None:
        return []
    attempt, is_open = restarted.attempt, bool(not_completed) and _is_open(job, restarted)
    job.restarted = None
    restarted.tell()
    if restarted.waiting:
        attempt.slowest = None
    record = attempt.record(
        job.now if is_open else restarted.complete_at,
        restarted.generation,
        restarted.restarts_used,
        job.membership.max_restarts,
        not_completed if is_open else "",
    )
    return [do.RecordRecovery(attempt.cause, restarted.generation, record)]


def _record(job: JobState, attempt: Attempt, not_completed: str = "") -> do.RecordRecovery:
    budget = job.membership.max_restarts
    record = attempt.record(job.now, job.generation, job.budget.used, budget, not_completed)
    return do.RecordRecovery(attempt.cause, job.generation, record)
