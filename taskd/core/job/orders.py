"""The orders that end lives or begin them: Interrupt, ReplaceWorker, KillWorker, RestartGroup.

Owns what each of them does to the members, and by when they must have obeyed.
"""

import math

from taskd.core import commands as do
from taskd.core.faults import Fault
from taskd.core.job import meeting, returning
from taskd.core.job.ending import give_up
from taskd.core.job.member import Member
from taskd.core.job.record import Attempt
from taskd.core.job.state import JobState
from taskd.core.phase import JobPhase
from taskd.core.transitions import Commands
from taskd.core.worker_state import WorkerState

_PAUSED = WorkerState.PAUSED  # asked for of each rank, in each recovery


def interrupt(job: JobState, attempt: Attempt, *, finish_step: bool = False) -> Commands:
    """All ranks leave the step, for a new generation; with `finish_step` after the present one."""
    job.phase = JobPhase.PAUSING
    job.generation += 1
    attempt.commanded(job.now)
    job.awaited.clear()
    live = job.membership.live()
    running: dict[bool, list[int]] = {True: [], False: []}  # ranks, by whether they have entered
    for member in live:
        if member.may_advance:
            member.proceed()  # it will ask again, or leave
        if member.state is not _PAUSED:
            running[member.entered].append(member.rank)
    for entered, stop_by in _stop_by(job).items():
        job.awaited.set_all(running[entered], stop_by)
    inherited = "a recovery was under way when this manager came"
    planned = attempt.reason if job.growing else inherited
    planned = planned if job.dump is None else job.dump.reason or inherited
    reason = job.what_happened() if attempt.faults else planned
    committed = job.membership.committed
    order = do.Interrupt(attempt.cause, job.generation, reason, committed, finish_step)
    return job.order_all(order)


def await_stop(job: JobState, member: Member) -> None:
    """This rank is to leave its step, if it has not."""
    if member.is_live and member.state is not WorkerState.PAUSED:
        job.awaited.set(member.rank, _stop_by(job)[member.entered])


def _stop_by(job: JobState) -> dict[bool, float]:
    """When ranks must have left their step, by whether they have come to their function."""
    latest = (job.dump.finish_step_by if job.dump is not None else None) or math.inf
    patience_s = {True: job.timeouts.pause_s, False: job.timeouts.start_s}
    return {entered: min(job.now + seconds, latest) for entered, seconds in patience_s.items()}


def replace(job: JobState, member: Member) -> do.ReplaceWorker:
    """A new process for a rank whose old one is gone, or is to go.

    JOINING: it is awaited from the recovery on that begins when all are there.
    """
    member.begin_life(member.incarnation + 1, job.now, replaced=True)
    if job.phase is not JobPhase.JOINING:
        job.awaited.set(member.rank, job.now + job.timeouts.start_s)
    return replacement(job, member)


def replacement(job: JobState, member: Member) -> do.ReplaceWorker:
    """The order that starts the current life of `member`."""
    cause = job.cause if job.attempt is None else job.attempt.cause
    who = (member.node_rank, member.rank, member.incarnation)
    former_agent = job.membership.nodes[member.node_rank].former_agent
    return do.ReplaceWorker(cause, job.generation, *who, job.budget.used, former_agent)


def kill(job: JobState, fault: Fault, cause: str, *, examine: bool) -> do.KillWorker:
    """End a process that does not obey or hangs. `examine`: its stacks are written down first."""
    member = job.members[fault.rank]
    member.is_kill_ordered = True
    who = (member.node_rank, fault.rank, fault.incarnation)
    return do.KillWorker(cause, job.generation, *who, fault.detail, examine)


def count_as_lost(job: JobState, fault: Fault, since_s: float = 0.0) -> None:
    """From now on this rank has no process. `since_s`: for how many seconds it has hung."""
    job.unanswered.append(job.timed_fault(fault, since_s))
    job.members[fault.rank].lose()
    job.awaited.discard(fault.rank)


def restart_group(job: JobState, reason: str, kept: int = 0) -> Commands:
    """No process can be kept: all are replaced. `kept`: the version that was just saved.

    A restart that an earlier manager ordered may have begun lives of which this one has not heard:
    as no generation comes twice, its number is a number that none of them has.
    """
    assert job.attempt is not None
    store = meeting.place(job)
    if store is None:
        return give_up(job, f"{job.what_happened()}, and no node has a store to meet at")
    job.phase, job.told_active, job.growing = JobPhase.RESTARTING, (), set()
    returning.end(job)
    job.generation += 1
    job.resumed_generation = job.generation
    meeting.begin_start(job)
    job.awaited.clear()
    committed = job.membership.committed
    job.attempt.commanded(job.now)
    job.attempt.restarted(job.members, committed or 0, kept)
    job.stagnation.answered(job.now, committed)
    job.membership.committed = None
    cause = min(job.attempt.faults, key=lambda timed: timed.died_at, default=None)
    delay_s = job.group_starts.next_delay_s(job.restart_cause, cause)
    job.restart_cause = cause
    members = job.membership.ordered()
    for member in members:
        life = max(member.incarnation + 1, job.generation)
        member.begin_life(life, job.now + delay_s, replaced=False)
        job.awaited.set(member.rank, job.now + delay_s + job.timeouts.start_s)
    lives = tuple((member.rank, member.incarnation) for member in members)
    order = do.RestartGroup(
        job.attempt.cause, job.generation, job.budget.used, reason, lives, store, delay_s
    )
    return job.order_all(order)
