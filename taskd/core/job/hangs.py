"""Ranks that hang: what heartbeats say of the workers, and who is killed for it.

Owns when that is looked at. Who hangs is `taskd.core.policy.hangs`'s to say.
"""

from dataclasses import replace

from taskd.core import commands as do
from taskd.core.events import AgentHeard, WorkerExamined
from taskd.core.faults import Fault, FaultKind
from taskd.core.job.joining import note_marks
from taskd.core.job.member import Member
from taskd.core.job.nodes import heard
from taskd.core.job.orders import count_as_lost, kill
from taskd.core.job.state import JobState
from taskd.core.phase import JobPhase
from taskd.core.policy.hangs import Culprit
from taskd.core.policy.ladder import UNEQUAL_STEPS
from taskd.core.transitions import Commands
from taskd.core.worker_state import WorkerState


def heard_in_step(job: JobState, event: AgentHeard) -> Commands:
    """RUNNING, RESUMED: whoever keeps the others waiting is killed, and replaced like the dead."""
    heard_elsewhere(job, event)
    if not event.marks:
        return []
    return _judge(job, event) if job.hangs.is_due(job.now) else _report_slow_ones(job, event)


def _judge(job: JobState, event: AgentHeard) -> Commands:
    members = [member for member in job.membership.ordered() if member.state is WorkerState.RUNNING]
    if not members:
        return []
    if not job.membership.is_declared:  # a restart of the whole group is dear
        patience_s = job.timeouts.hang_wait_s
        frozen = job.hangs.frozen(job.now, job.generation, _lives(members), patience_s=patience_s)
        return _kill(job, frozen) if 0 < len(frozen) < len(members) else []
    behind = _left_behind(job, members)
    if 0 < len(behind) < len(members):
        return _kill(job, behind)
    lives = _lives([member for member in members if member.entered])
    returned = [member.rank for member in job.membership.ordered() if member.is_done]
    verdict = job.hangs.judge(job.now, job.generation, lives, returned)
    if verdict is None:
        return _report_slow_ones(job, event)
    if verdict.culprits:
        return _kill(job, verdict.culprits)
    rank, incarnation = lives[0]
    version, how = job.hangs.count(rank), verdict.network
    what = UNEQUAL_STEPS if returned else "network"
    fault = Fault(FaultKind.HANG, rank, incarnation, how, version=version, signature=what)
    job.unanswered.append(job.timed_fault(fault, verdict.since_s))
    return []


def _left_behind(job: JobState, members: list[Member]) -> tuple[Culprit, ...]:
    """RESUMED: who has not gone on, although the others wait for it where nothing else is seen."""
    if job.phase is not JobPhase.RESUMED or job.attempt is None:
        return ()
    is_late = job.now - job.attempt.all_stopped_at >= job.timeouts.pause_s
    return job.hangs.left_behind(job.now, job.generation, _lives(members), is_late=is_late)


def heard_while_stopping(job: JobState, event: AgentHeard) -> Commands:
    """PAUSING: a process that does not run cannot stop, and is killed before its time is over."""
    heard_elsewhere(job, event)
    if not event.marks or not job.hangs.is_due(job.now):
        return []
    live = job.membership.live()
    called = [member for member in live if member.rank in job.awaited and not member.replaced]
    frozen = job.hangs.frozen(job.now, job.generation, _lives(called))
    return _kill(job, frozen) if 0 < len(frozen) < len(live) else []


def heard_elsewhere(job: JobState, event: AgentHeard) -> Commands:
    """In all other phases: remembered, for the next time that somebody hangs."""
    heard(job, event)
    if event.marks:
        job.hangs.note(job.now, event.marks)
        if job.phase is JobPhase.JOINING:
            note_marks(job, event.marks)
    return []


def examined(job: JobState, event: WorkerExamined) -> Commands:
    """The stacks of a rank that hangs: part of its fault, if that is still being answered."""
    life = (event.rank, event.incarnation)
    for timed in job.attempt.faults if job.attempt is not None else []:
        if timed.fault.kind is FaultKind.HANG and timed.fault.life == life:
            timed.fault = replace(timed.fault, traceback=event.traceback)
    return []


def _report_slow_ones(job: JobState, event: AgentHeard) -> Commands:
    slow_ones = job.stragglers.note(job.now, event.marks)
    if slow_ones and not job.membership.is_declared:
        return []
    return [
        do.ReportStraggler(job.cause, job.generation, one.rank, one.phase, one.own_s, one.others_s)
        for one in slow_ones
    ]


def _lives(members: list[Member]) -> list[tuple[int, int]]:
    return [(member.rank, member.incarnation) for member in members]


def _kill(job: JobState, culprits: tuple[Culprit, ...]) -> Commands:
    """Kill them, their stacks first. From now on they count as dead."""
    commands: Commands = []
    version = job.hangs.count(culprits[0].rank)
    for culprit in culprits:
        member = job.members[culprit.rank]
        fault = member.fault(FaultKind.HANG, culprit.detail)
        fault = replace(fault, version=version, signature="hang")
        commands.append(kill(job, fault, job.cause, examine=True))
        count_as_lost(job, fault, culprit.since_s)
    return commands
