"""The ends of a job.

Owns giving up (agents stop their workers first), the end itself, and failures after `Release`, when
every function has returned and nothing is to be trained any more.
"""

from taskd.core import commands as do
from taskd.core import events as ev
from taskd.core.faults import Fault, FaultKind, TimedFault, describe
from taskd.core.job.attempts import close_attempt, open_attempt
from taskd.core.job.state import JobState
from taskd.core.phase import JobPhase
from taskd.core.policy.ladder import Strategy
from taskd.core.transitions import Commands


def give_up(job: JobState, reason: str, fault: Fault | None = None, *, dump: str = "") -> Commands:
    """End the job as failed: agents stop their workers. `dump`: the checkpoint that it leaves."""
    job.phase, job.reason = JobPhase.ENDING, reason
    attempt = open_attempt(job)
    if attempt is not None:
        attempt.end_by(Strategy.DUMP if dump else Strategy.EXIT, reason)
    records = close_attempt(job, f"the job was given up: {reason}")
    _wait_for_nothing(job)
    job.story.note(job.now, f"given up: {reason}")
    rank = None if fault is None else fault.rank
    order = do.GiveUp(job.cause, job.generation, reason, rank, fault, dump)
    return [*job.order_all(order), *records, *end_if_all_left(job)]


def order_dropped(job: JobState, event: ev.OrderDropped) -> Commands:
    """Whoever waits for this order waits in vain, and would be taken for hung."""
    return give_up(job, event.reason)


def end_if_all_left(job: JobState) -> Commands:
    """A job that was given up is over when no agent is there any more."""
    if any(node.is_present for node in job.membership.nodes.values()):
        return []
    return end(job, succeeded=False, reason=job.reason)


def end(job: JobState, *, succeeded: bool, reason: str, left_alone: bool = False) -> Commands:
    """The job is over; `left_alone`: its agents have gone on without a manager."""
    job.phase, job.reason = JobPhase.ENDED, reason
    over = "training goes on without a manager" if left_alone else "the job has ended"
    records = close_attempt(job, f"{over}: {reason}")
    _wait_for_nothing(job)
    return [*records, do.EndJob(job.cause, job.generation, succeeded, reason, left_alone)]


def fail_after_release(job: JobState, timed: TimedFault) -> Commands:
    """A process failed after Release. The others may be writing results, and get time to end."""
    job.after_release.append(timed)
    if job.end_by is None:
        job.end_by = job.now + job.timeouts.start_s
    return []


def end_after_release(job: JobState) -> Commands:
    """Give up because of the earliest failure after Release."""
    fault = min(job.after_release, key=TimedFault.order).fault
    where = "after the training function had returned everywhere"
    return give_up(job, f"{describe(fault)} {where}", fault)


def may_end_after_release(job: JobState) -> bool:
    """Whether a process failed after Release, and it is known how, and all others have ended."""
    statuses_known = all(timed.fault.kind is not FaultKind.LOST for timed in job.after_release)
    return bool(job.after_release) and statuses_known and not job.membership.live()


def _wait_for_nothing(job: JobState) -> None:
    job.awaited.clear()
    job.absent.clear()
    job.join_by = job.suspect_until = job.status_by = job.end_by = job.joining.ask_at = None
    job.attempt, job.dump, job.is_recovery_needed = None, None, False
    job.suspects, job.unanswered, job.after_release = [], [], []
