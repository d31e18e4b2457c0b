"""Ranks that were called out could do one step more: which of them should, so that all meet in one version.

Two reasons. A vote that broke for some had passed for others, who have stepped: those do it after them (`cut.who_advances`). And a job that is
to end in good time (`Interrupt.finish_step`) does not leave a step half done: as some ranks may be one step ahead, all do the one that the first has begun.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from taskd.core import commands as do
from taskd.core.cut import who_advances
from taskd.core.membership import WorkerState

if TYPE_CHECKING:
    from taskd.core.job import Commands, Job


def was_sent_on(job: Job, rank: int) -> bool:
    """Whether this rank was told to do a step more, and has not come yet. Until then an offer of it is one that was answered."""
    return isinstance(job.last, do.Advance) and rank in job.last.ranks and rank in job.awaited


def advance(job: Job) -> Commands:
    """Everybody who holds state waits: send those on who should do one step more. Nothing if nobody should."""
    members = job.membership.members
    able = sorted(member.rank for member in members.values() if member.may_advance and member.state is WorkerState.PAUSED)
    ends_at = job.dying.finish_by
    if ends_at is not None:
        ranks = tuple(able)
    else:
        held = (member.copy() for member in members.values() if member.is_live)
        ranks = who_advances(held, job.membership.committed) if able else ()
        ends_at = job.now + job.timeouts.pause_s
    if not ranks:
        return []
    version = 1 + max(members[rank].version or 0 for rank in ranks)
    for rank in ranks:
        members[rank].go_on()
        job.awaited.set(rank, ends_at)
    job.story.note(job.now, f"to go on to version {version}: ranks {', '.join(map(str, ranks))}")
    job.last = do.Advance(job.cause, job.generation, version, ranks)
    return [job.last]
