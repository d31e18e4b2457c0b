"""What workers report, and what that changes.

Owns one function for each report; where a report means something else in some phase, one more. What
is done about it follows in `taskd.core.job.settle`.
"""

from taskd.core import events as ev
from taskd.core.faults import FaultKind, TimedFault
from taskd.core.job.accounting import (
    complete_exception,
    correct_restart_cause,
    count_exit_status,
    take_exception,
    warn,
)
from taskd.core.job.attempts import count_first_step, count_recovered
from taskd.core.job.dump import blame, end_job, is_status_missing, proceed_with_status
from taskd.core.job.ending import fail_after_release, give_up
from taskd.core.job.joining import defer_faults, wait_for_others
from taskd.core.job.state import JobState
from taskd.core.job.stopped import advance
from taskd.core.phase import JobPhase
from taskd.core.transitions import Commands
from taskd.core.worker_state import WorkerState

# ---------------------------------------------------------------------- beginnings and ends


def started(job: JobState, event: ev.WorkerStarted) -> Commands:
    """There is a process. One that takes part in a recovery counts when it waits at the gate."""
    member = job.members[event.rank]
    if member.state is not WorkerState.STARTING or member.replaced:
        return []
    member.state = WorkerState.RUNNING
    if job.phase is JobPhase.RESTARTING:
        job.awaited.discard(event.rank)
    is_restart = job.attempt is not None and job.attempt.is_restart
    return count_recovered(job, event.rank) if is_restart else []


def declared(job: JobState, event: ev.WorkerDeclared) -> Commands:
    """It can be recovered in place. Once one is in its function, every rank is needed."""
    member = job.members[event.rank]
    member.declared, member.entered = True, member.entered or event.entered
    return []


def finished(job: JobState, event: ev.WorkerFinished) -> Commands:
    """A process ended as it should."""
    job.membership.finish(job.members[event.rank])
    return []


def holds(job: JobState, event: ev.WorkerHolds) -> Commands:
    """Which part of the state it has."""
    job.members[event.rank].shard = event.shard
    return []


# ---------------------------------------------------------------------- deaths


def lost(job: JobState, event: ev.WorkerLost) -> Commands:
    """A process is gone."""
    timed = _take_loss(job, event)
    if timed is None:
        return exit_known(job, event)
    job.unanswered.append(timed)
    return []


def lost_while_joining(job: JobState, event: ev.WorkerLost) -> Commands:
    """JOINING: its fault waits until every rank is known."""
    commands = lost(job, event)
    job.membership.stopped_early.add(event.rank)
    defer_faults(job)
    return commands


def lost_while_dumping(job: JobState, event: ev.WorkerLost) -> Commands:
    """The job ends already: nobody is replaced.

    It may be a writer; or one that was killed, which leaves its snapshots.
    """
    was_kill_ordered = job.members[event.rank].is_kill_ordered
    timed = _take_loss(job, event)
    if timed is not None:
        return blame(job, timed)
    return proceed_with_status(job) if was_kill_ordered else exit_known_while_dumping(job, event)


def lost_after_release(job: JobState, event: ev.WorkerLost) -> Commands:
    """RELEASED: nothing is to be trained any more."""
    timed = _take_loss(job, event)
    return exit_known_late(job, event) if timed is None else fail_after_release(job, timed)


def _take_loss(job: JobState, event: ev.WorkerLost) -> TimedFault | None:
    """The fault, or None: it was known. Then the report says more of what the process left."""
    member = job.members[event.rank]
    if member.state is WorkerState.LOST:
        if event.box_versions:
            member.box_versions = event.box_versions
        member.snapshots, member.is_kill_ordered = event.snapshots, False
        return None
    timed = job.timed_fault(event.fault, event.age_s)
    member.lose(event.box_versions, event.snapshots)
    job.awaited.discard(event.rank)
    if event.fault.kind is FaultKind.LOST:
        job.without_status[event.rank, event.incarnation] = timed
    return timed


def lost_before_restart(job: JobState, event: ev.WorkerLost) -> Commands:
    """A death in the life before the last restart of the group: perhaps the reason for it."""
    member = job.members.get(event.rank)
    if (
        member is None
        or event.incarnation != member.incarnation - 1
        or job.phase is JobPhase.ENDING
    ):
        return []
    earlier = TimedFault(event.fault, event.now - event.age_s, event.now)
    verdict = correct_restart_cause(job, earlier)
    return [] if verdict is None else give_up(job, *verdict)


Status = ev.WorkerExitKnown | ev.WorkerLost


def exit_known(job: JobState, event: Status) -> Commands:
    """How it died. May show that trying again is pointless."""
    timed = _take_status(job, event)
    if timed is None or timed.generation is None:
        return []
    verdict = count_exit_status(job, timed)
    return warn(job) if verdict is None else end_job(job, *verdict)


def exit_known_while_dumping(job: JobState, event: Status) -> Commands:
    """The reason of the end is complete, if this was the last one."""
    timed = _take_status(job, event)
    is_counted = timed is not None and timed.generation is not None
    return proceed_with_status(job) if is_counted and not is_status_missing(job) else []


def exit_known_late(job: JobState, event: Status) -> Commands:
    """RELEASED: nothing depends on it but the reason."""
    _take_status(job, event)
    return []


def _take_status(job: JobState, event: Status) -> TimedFault | None:
    """The fault whose exit status this is; None: it was known, or is still not known."""
    life = (event.rank, event.incarnation)
    timed = job.without_status.get(life)
    if timed is None:
        job.ignore("nobody waits to hear how it ended", event.rank)
        return None
    timed.fault = event.fault
    if event.fault.kind is FaultKind.LOST:
        return None
    return job.without_status.pop(life)


# ---------------------------------------------------------------------- stops

Stop = ev.WorkerPaused | ev.WorkerMayAdvance


def stopped(job: JobState, event: Stop) -> Commands:
    """A rank waits at the gate, or asks in its function how far to go.

    Nobody of this manager's called for it: an earlier manager did, and nobody else will resume it.
    """
    if _is_over(job, event):
        return _ignore(job, event, "paused for")
    job.is_recovery_needed = True
    return stopped_while_joining(job, event)


def stopped_while_joining(job: JobState, event: Stop) -> Commands:
    """JOINING: it waits until every rank is known."""
    job.membership.note_version(event.version)
    is_offer = isinstance(event, ev.WorkerMayAdvance)
    member, clean = job.members[event.rank], isinstance(event, ev.WorkerMayAdvance) or event.clean
    member.pause(event.version, clean, event.snapshots, may_advance=is_offer)
    job.membership.stopped_early.add(event.rank)
    return []


def stopped_when_called(job: JobState, event: Stop) -> Commands:
    """PAUSING: one more has stopped."""
    if _is_over(job, event):
        return _ignore(job, event, "paused for")
    job.membership.note_version(event.version)
    if isinstance(event, ev.WorkerMayAdvance):
        return _gather(job, event, event.version, clean=True, may_advance=True)
    return _gather(job, event, event.version, clean=event.clean)


def _is_over(job: JobState, event: Stop) -> bool:
    return event.generation != job.generation or job.generation == job.resumed_generation


def _ignore(
    job: JobState, event: Stop | ev.WorkerRaised | ev.WorkerRecovered | ev.WorkerReturned,
    what: str, why: str = "which is over",
) -> Commands:  # fmt: skip
    return job.ignore(f"{what} generation {event.generation}, {why}", event.rank)


def _gather(
    job: JobState, event: Stop | ev.WorkerRaised, version: int | None,
    *, clean: bool, may_advance: bool = False,
) -> Commands:  # fmt: skip
    """One more rank has stopped."""
    member, awaited = job.members[event.rank], job.awaited
    if job.attempt is None or not (member.rank in awaited or member.may_advance):
        return []
    if may_advance and job.was_told_to_advance(member.rank):
        return job.ignore("it offers a step that it was told to do", member.rank)
    member.pause(version, clean, event.snapshots, may_advance=may_advance)
    job.attempt.paused(job.now, replaced=member.replaced)
    awaited.discard(member.rank)
    # Replacements hold nothing that could speak for a step more.
    is_last = len(awaited) and all(job.members[rank].replaced for rank in awaited)
    return advance(job) if is_last else []


# ---------------------------------------------------------------------- exceptions

_ANSWERED = "answered already"


def raised(job: JobState, event: ev.WorkerRaised) -> Commands:
    """An exception left the function of a rank, which has stopped: the culprit, or a victim."""
    member = job.members[event.rank]
    is_answered = member.state is WorkerState.PAUSED or not member.is_live
    if event.generation != job.generation or is_answered:
        complete_exception(job, event.fault)
        return _ignore(job, event, "raised in", _ANSWERED)
    if _take_exception(job, event) is job.suspects and job.phase is not JobPhase.SUSPECTING:
        job.phase = JobPhase.SUSPECTING
        job.awaited.clear()
        job.suspect_until = job.now + job.timeouts.communication_grace_s
    return []


def raised_while_joining(job: JobState, event: ev.WorkerRaised) -> Commands:
    """JOINING: the fault waits until every rank is known."""
    member = job.members[event.rank]
    is_kept = member.state is WorkerState.PAUSED and job.has_unanswered(event.fault)
    if is_kept or not member.is_live:
        complete_exception(job, event.fault)
        return _ignore(job, event, "raised in", _ANSWERED)
    _take_exception(job, event)
    job.membership.stopped_early.add(event.rank)
    defer_faults(job)
    return []


def raised_when_called(job: JobState, event: ev.WorkerRaised) -> Commands:
    """PAUSING: its exception and the Interrupt crossed.

    It has stopped, which is all that is needed, or will say more.
    """
    if event.generation < job.resumed_generation:
        return _ignore(job, event, "raised in")
    complete_exception(job, event.fault)
    job.members[event.rank].enter()
    job.membership.note_version(event.fault.version)
    if event.rank in job.awaited and job.attempt is not None:
        job.attempt.followers.add((event.rank, event.incarnation))
    if event.may_advance:
        return []
    return _gather(job, event, event.fault.version, clean=event.clean)


def raised_after_release(job: JobState, event: ev.WorkerRaised) -> Commands:
    """RELEASED: a second function, say. This rank cannot go on, and is not to be trained again."""
    timed = job.timed_fault(event.fault, event.age_s)
    job.members[event.rank].lose()
    return fail_after_release(job, timed)


def _take_exception(job: JobState, event: ev.WorkerRaised) -> list[TimedFault]:
    """Where its fault waits now."""
    member, fault = job.members[event.rank], event.fault
    member.enter()
    job.membership.note_version(fault.version)
    member.pause(fault.version, event.clean, event.snapshots, may_advance=event.may_advance)
    job.awaited.discard(event.rank)
    return take_exception(job, fault, event.age_s)


# ---------------------------------------------------------------------- progress


def recovered(job: JobState, event: ev.WorkerRecovered) -> Commands:
    """First new commit of a rank; after a restart of the group, its first step."""
    attempt = job.attempt
    if event.generation == job.generation and job.restarted is not None:
        return count_first_step(job, event)
    if event.generation != job.generation or attempt is None or attempt.is_restart:
        return _ignore(job, event, "recovered in")
    job.membership.note_version(event.version)
    return count_recovered(job, event.rank, event)


def returned(job: JobState, event: ev.WorkerReturned) -> Commands:
    """The function of a rank returned; the rank waits for `Release`."""
    if event.generation != job.generation or not _take_return(job, event):
        return _ignore(job, event, "returned in", _ANSWERED)
    return count_recovered(job, event.rank)


def returned_while_joining(job: JobState, event: ev.WorkerReturned) -> Commands:
    """JOINING: the same; the others are not all known."""
    if not _take_return(job, event):
        return _ignore(job, event, "returned in", _ANSWERED)
    job.membership.stopped_early.add(event.rank)
    wait_for_others(job)
    return []


def _take_return(job: JobState, event: ev.WorkerReturned) -> bool:
    member = job.members[event.rank]
    if member.state not in (WorkerState.RUNNING, WorkerState.STARTING):
        return False
    job.membership.note_version(event.version)
    member.enter()
    member.state, member.version = WorkerState.RETURNED, event.version
    job.awaited.discard(event.rank)
    return True
