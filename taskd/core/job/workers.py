"""What workers report, and what that changes.

What is done about it follows in `taskd.core.job.settle`.

Owns one function for each report; where a report means something else in some phase, one more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from taskd.core import events as ev
from taskd.core.faults import FaultKind
from taskd.core.job.accounting import correct_restart_cause, count_exit_status, warn
from taskd.core.job.attempts import count_recovered
from taskd.core.job.dump import end_job, go_on_with_status
from taskd.core.job.ending import fail_after_release, give_up
from taskd.core.job.joining import defer_faults, wait_for_others
from taskd.core.job.stopped import advance
from taskd.core.phase import Phase
from taskd.core.record import TimedFault
from taskd.core.worker_state import WorkerState

if TYPE_CHECKING:
    from taskd.core.job.state import Commands, Job
    from taskd.core.membership import Member


def ignore(job: Job, why: str, rank: int | None = None) -> Commands:
    """Into the story, and no more."""
    job.story.note(job.now, f"ignored: {why}", rank)
    return []


# ---------------------------------------------------------------------- beginnings and ends


def started(job: Job, event: ev.WorkerStarted) -> Commands:
    """There is a process. One that takes part in a recovery counts when it waits at the gate."""
    member = job.membership.members[event.rank]
    if member.state is not WorkerState.STARTING or member.replaced:
        return []
    member.state = WorkerState.RUNNING
    if job.phase is Phase.RESTARTING:
        job.awaited.discard(event.rank)
    is_restart = job.attempt is not None and job.attempt.is_restart
    return count_recovered(job, event.rank, None) if is_restart else []


def declared(job: Job, event: ev.WorkerDeclared) -> Commands:
    """It can be recovered in place. Once one is in its function, every rank is needed."""
    member = job.membership.members[event.rank]
    member.declared, member.entered = True, member.entered or event.entered
    return []


def finished(job: Job, event: ev.WorkerFinished) -> Commands:
    """A process ended as it should."""
    job.membership.finish(job.membership.members[event.rank])
    return []


def holds(job: Job, event: ev.WorkerHolds) -> Commands:
    """Which part of the state it has."""
    job.membership.members[event.rank].shard = event.shard
    return []


# ---------------------------------------------------------------------- deaths


def lost(job: Job, event: ev.WorkerLost) -> Commands:
    """A process is gone."""
    known = _take_loss(job, event)
    if known is None:
        return exit_known(job, event)
    job.unanswered.append(known)
    return []


def lost_while_joining(job: Job, event: ev.WorkerLost) -> Commands:
    """JOINING: its fault waits until every rank is known."""
    commands = lost(job, event)
    defer_faults(job)
    return commands


def lost_while_dumping(job: Job, event: ev.WorkerLost) -> Commands:
    """The job ends already: nobody is replaced.

    It may be a writer; or one that was killed, which leaves its snapshots.
    """
    was_doomed = job.membership.members[event.rank].is_doomed
    known = _take_loss(job, event)
    if known is not None:
        return []
    return go_on_with_status(job) if was_doomed else exit_known_while_dumping(job, event)


def lost_after_release(job: Job, event: ev.WorkerLost) -> Commands:
    """RELEASED: nothing is to be trained any more."""
    known = _take_loss(job, event)
    return exit_known_late(job, event) if known is None else fail_after_release(job, known)


def _take_loss(job: Job, event: ev.WorkerLost) -> TimedFault | None:
    """The fault, or None: it was known. Then the report says more of what the process left."""
    member = job.membership.members[event.rank]
    if member.state is WorkerState.LOST:
        if event.box_versions:
            member.box_versions = event.box_versions
        member.snapshots, member.is_doomed = event.snapshots, False
        return None
    known = job.timed(event.fault, event.age_s)
    member.lose(event.box_versions, event.snapshots)
    job.awaited.discard(event.rank)
    if event.fault.kind is FaultKind.LOST:
        job.without_status[event.rank, event.incarnation] = known
    return known


def lost_before_restart(job: Job, event: ev.WorkerLost) -> Commands:
    """A death in the life before the last restart of the group: perhaps the reason for it."""
    member = job.membership.members.get(event.rank)
    is_former = member is not None and event.incarnation == member.incarnation - 1
    if not is_former or job.phase is Phase.ENDING:
        return []
    earlier = TimedFault(event.fault, event.now - event.age_s, event.now)
    verdict = correct_restart_cause(job, earlier)
    return [] if verdict is None else give_up(job, *verdict)


Status = ev.WorkerExitKnown | ev.WorkerLost


def exit_known(job: Job, event: Status) -> Commands:
    """How it died. May show that trying again is pointless."""
    known = _take_status(job, event)
    if known is None or known.generation is None:
        return []
    verdict = count_exit_status(job, known)
    return warn(job) if verdict is None else end_job(job, *verdict)


def exit_known_while_dumping(job: Job, event: Status) -> Commands:
    """The reason of the end is complete."""
    known = _take_status(job, event)
    return [] if known is None or known.generation is None else go_on_with_status(job)


def exit_known_late(job: Job, event: Status) -> Commands:
    """RELEASED, or ENDING: nothing depends on it but the reason."""
    _take_status(job, event)
    return []


def _take_status(job: Job, event: Status) -> TimedFault | None:
    """The fault whose exit status this is; None: it was known, or is still not known."""
    life = (event.rank, event.incarnation)
    known = job.without_status.get(life)
    if known is None:
        ignore(job, "nobody waits to hear how it ended", event.rank)
        return None
    known.fault = event.fault
    if event.fault.kind is FaultKind.LOST:
        return None
    del job.without_status[life]
    return known


# ---------------------------------------------------------------------- stops


def stopped(job: Job, event: ev.WorkerPaused | ev.WorkerMayAdvance) -> Commands:
    """A rank has stopped outside of its function, or within it, and asks how far to go.

    Here nobody of this manager's called for it: an earlier manager did, and nobody else will resume
    it.
    """
    if _is_over(job, event):
        return _ignore_generation(job, event, "paused for")
    _pause(job, event)
    job.is_recovery_needed = True
    return []


def stopped_while_joining(job: Job, event: ev.WorkerPaused | ev.WorkerMayAdvance) -> Commands:
    """JOINING: it waits until every rank is known."""
    _pause(job, event)
    return []


def stopped_when_called(job: Job, event: ev.WorkerPaused | ev.WorkerMayAdvance) -> Commands:
    """PAUSING: one more has stopped."""
    if _is_over(job, event):
        return _ignore_generation(job, event, "paused for")
    job.membership.note_version(event.version)
    if isinstance(event, ev.WorkerMayAdvance):
        return _gather(job, event, event.version, clean=True, may_advance=True)
    return _gather(job, event, event.version, clean=event.clean, may_advance=False)


def _is_over(job: Job, event: ev.WorkerPaused | ev.WorkerMayAdvance) -> bool:
    return event.generation != job.generation or job.generation == job.resumed_generation


def _ignore_generation(job: Job, event: ev.WorkerEvent, how: str) -> Commands:
    generation = getattr(event, "generation", None)
    return ignore(job, f"{how} generation {generation}, which is over", event.rank)


def _pause(job: Job, event: ev.WorkerPaused | ev.WorkerMayAdvance) -> Member:
    member, asks = job.membership.members[event.rank], isinstance(event, ev.WorkerMayAdvance)
    job.membership.note_version(event.version)
    clean = isinstance(event, ev.WorkerMayAdvance) or event.clean
    member.pause(event.version, clean, event.snapshots, may_advance=asks)
    return member


def _gather(
    job: Job, event: ev.WorkerPaused | ev.WorkerMayAdvance | ev.WorkerRaised, version: int | None,
    *, clean: bool, may_advance: bool,
) -> Commands:  # fmt: skip
    """One more rank has stopped."""
    member = job.membership.members[event.rank]
    if job.attempt is None or not (member.rank in job.awaited or member.may_advance):
        return []
    if may_advance and job.was_told_to_advance(member.rank):
        return ignore(job, "it offers a step that it was told to do", member.rank)
    member.pause(version, clean, event.snapshots, may_advance=may_advance)
    job.attempt.paused(job.now, replaced=member.replaced)
    job.awaited.discard(member.rank)
    members = job.membership.members
    # Replacements hold nothing that could speak for a step more.
    if len(job.awaited) and all(members[rank].replaced for rank in job.awaited):
        return advance(job)
    return []


# ---------------------------------------------------------------------- exceptions


def raised(job: Job, event: ev.WorkerRaised) -> Commands:
    """An exception left the function of a rank, which has stopped.

    It is the culprit, or a victim.
    """
    member = job.membership.members[event.rank]
    is_answered = member.state is WorkerState.PAUSED or not member.is_live
    if event.generation != job.generation or is_answered:
        return _ignore_raised(job, event)
    known = _take_exception(job, event)
    if not _may_be_victim(job, event):
        job.unanswered.append(known)
        return []
    job.suspects.append(known)
    if job.phase is not Phase.SUSPECTING:
        job.phase = Phase.SUSPECTING
        job.awaited.clear()
        job.suspect_until = job.now + job.timeouts.communication_grace_s
    return []


def raised_while_joining(job: Job, event: ev.WorkerRaised) -> Commands:
    """JOINING: the fault waits until every rank is known."""
    member = job.membership.members[event.rank]
    is_kept = member.state is WorkerState.PAUSED and job.has_unanswered(event.fault)
    if is_kept or not member.is_live:
        return _ignore_raised(job, event)
    known = _take_exception(job, event)
    (job.suspects if _may_be_victim(job, event) else job.unanswered).append(known)
    defer_faults(job)
    return []


def raised_when_called(job: Job, event: ev.WorkerRaised) -> Commands:
    """PAUSING: its exception and the Interrupt crossed.

    It has stopped, which is all that is needed, or will say more.
    """
    member = job.membership.members[event.rank]
    if event.generation < job.resumed_generation:
        return _ignore_generation(job, event, "raised in")
    member.enter()
    job.membership.note_version(event.fault.version)
    if member.rank in job.awaited and job.attempt is not None:
        job.attempt.followers.add((event.rank, event.incarnation))
    if event.may_advance:
        return []
    return _gather(job, event, event.fault.version, clean=event.clean, may_advance=False)


def raised_after_release(job: Job, event: ev.WorkerRaised) -> Commands:
    """RELEASED: a second function, say. This rank cannot go on, and is not to be trained again."""
    known = job.timed(event.fault, event.age_s)
    job.membership.members[event.rank].lose()
    return fail_after_release(job, known)


def _take_exception(job: Job, event: ev.WorkerRaised) -> TimedFault:
    member, fault = job.membership.members[event.rank], event.fault
    member.enter()
    job.membership.note_version(fault.version)
    member.pause(fault.version, event.clean, event.snapshots, may_advance=event.may_advance)
    job.awaited.discard(event.rank)
    return job.timed(fault, event.age_s)


def _may_be_victim(job: Job, event: ev.WorkerRaised) -> bool:
    """Whether to wait for news of an earlier death.

    An exception that came back waits, too, before its process is replaced or the job ends.
    """
    came_back = job.repeats.has_come_back(event.fault, job.generation + 1)
    return event.fault.kind is FaultKind.COMMUNICATION or came_back


def _ignore_raised(job: Job, event: ev.WorkerRaised) -> Commands:
    return ignore(job, f"raised in generation {event.generation}, answered already", event.rank)


# ---------------------------------------------------------------------- progress


def recovered(job: Job, event: ev.WorkerRecovered) -> Commands:
    """First new commit of a rank."""
    attempt = job.attempt
    if event.generation != job.generation or attempt is None or attempt.is_restart:
        return _ignore_generation(job, event, "recovered in")
    job.membership.note_version(event.version)
    return count_recovered(job, event.rank, event)


def returned(job: Job, event: ev.WorkerReturned) -> Commands:
    """The function of a rank returned; the rank waits for `Release`."""
    if event.generation != job.generation or not _may_return(job, event):
        return _ignore_returned(job, event)
    _take_return(job, event)
    return count_recovered(job, event.rank, None)


def returned_while_joining(job: Job, event: ev.WorkerReturned) -> Commands:
    """JOINING: the same; the others are not all known."""
    if not _may_return(job, event):
        return _ignore_returned(job, event)
    _take_return(job, event)
    wait_for_others(job)
    return []


def _may_return(job: Job, event: ev.WorkerReturned) -> bool:
    state = job.membership.members[event.rank].state
    return state in (WorkerState.RUNNING, WorkerState.STARTING)


def _take_return(job: Job, event: ev.WorkerReturned) -> None:
    member = job.membership.members[event.rank]
    job.membership.note_version(event.version)
    member.enter()
    member.state, member.version = WorkerState.RETURNED, event.version
    job.awaited.discard(event.rank)


def _ignore_returned(job: Job, event: ev.WorkerReturned) -> Commands:
    return ignore(job, f"returned in generation {event.generation}, answered already", event.rank)
