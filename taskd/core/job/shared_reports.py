"""Reports that many ranks make alike, when all of them stop, and when all have gone on.

A node with its ranks tells them as one event (`SharedReport`). It means what its reports mean one
after the other, and most of them change nothing but what is known of their rank. Owns the way of
those that is short: a manager of thousands of nodes takes them in while all wait for the last one.
"""

from taskd.core import events as ev
from taskd.core.job.member import Member
from taskd.core.job.state import JobState
from taskd.core.phase import JobPhase


def take(job: JobState, report: ev.WorkerEvent, rank: int, incarnation: int) -> bool:
    """Take in what this rank reports, if nothing follows from it. False: nothing was done."""
    member = job.members.get(rank)
    if member is None or member.incarnation != incarnation or not member.is_live:
        return False
    if isinstance(report, ev.WorkerPaused):
        return job.phase is JobPhase.PAUSING and _take_stop(job, report, member)
    if isinstance(report, ev.WorkerRecovered):
        return job.phase is JobPhase.RESUMED and _take_step(job, report, member)
    return False


def _take_stop(job: JobState, report: ev.WorkerPaused, member: Member) -> bool:
    """As `workers.stopped_when_called`, while another rank is awaited that was not replaced."""
    is_over = report.generation != job.generation or job.generation == job.resumed_generation
    rank, awaited, members = member.rank, job.awaited, job.members
    if is_over or job.attempt is None or rank not in awaited:
        return False
    if all(members[other].replaced for other in awaited if other != rank):
        return False
    job.membership.note_version(report.version)
    member.pause(report.version, report.clean, report.snapshots)
    job.attempt.paused(job.now, replaced=member.replaced)
    awaited.discard(rank)
    return True


def _take_step(job: JobState, report: ev.WorkerRecovered, member: Member) -> bool:
    """As `workers.recovered`, while another rank has not gone on."""
    attempt = job.attempt
    is_over = report.generation != job.generation or job.restarted is not None
    if is_over or attempt is None or attempt.is_restart:
        return False
    if member.rank not in attempt.waiting or len(attempt.waiting) == 1:
        return False
    job.membership.note_version(report.version)
    attempt.recovered(member.rank, report)
    return True
