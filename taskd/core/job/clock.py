"""Time passes: whatever is overdue in a job.

Owns the order in which deadlines are looked at, when several have come at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from taskd.core.faults import Fault, FaultKind
from taskd.core.job.dump import go_on_with_status, overdue_writers, stop_for_dump
from taskd.core.job.ending import end_after_release
from taskd.core.job.joining import join_overdue
from taskd.core.job.nodes import lose_node
from taskd.core.job.orders import count_as_lost, kill
from taskd.core.job.settle import settle
from taskd.core.membership import LOST_NODE
from taskd.core.phase import DUMPING, Phase
from taskd.core.worker_state import WorkerState

if TYPE_CHECKING:
    from taskd.core import events as ev
    from taskd.core.job.state import Commands, Job


def tick(job: Job, event: ev.Tick) -> Commands:
    """Nodes that are silent, then what the whole job waits for, then single ranks."""
    commands: Commands = []
    for node_rank in job.leases.expired(event.now):
        how = f"has been silent for {job.leases.silence_s(node_rank, event.now):.0f} s"
        outcome = "succeeded" if _has_ended(job, node_rank) else LOST_NODE
        commands += lose_node(job, node_rank, outcome, how) + settle(job)
    commands += _overdue_job(job) + settle(job)
    overdue = job.awaited.overdue(event.now)
    return commands + _overdue_ranks(job, overdue) + settle(job) if overdue else commands


def _has_ended(job: Job, node_rank: int) -> bool:
    """Whether a goodbye that was lost is likelier than a lost node."""
    members = job.membership.on_node(node_rank)
    if members and all(member.state is WorkerState.FINISHED for member in members):
        return True
    is_lost = any(member.state is WorkerState.LOST for member in members)
    return job.phase is Phase.RELEASED and not is_lost


def _overdue_job(job: Job) -> Commands:
    """What is waited for by the job as a whole."""
    if _is_due(job, job.join_by):
        return join_overdue(job)
    if _is_due(job, job.status_by):
        return go_on_with_status(job)
    if _is_due(job, job.end_by):
        return end_after_release(job)
    if _is_due(job, job.suspect_until):
        # An exception that came back says more than a broken connection; else the earliest is the cause.
        is_raised = FaultKind.RAISED
        culprit = min(job.suspects, key=lambda known: (known.fault.kind is not is_raised, known.died_at))
        job.suspects.remove(culprit)
        job.unanswered.append(culprit)
    return []


def _is_due(job: Job, deadline: float | None) -> bool:
    return deadline is not None and deadline <= job.now


def _overdue_ranks(job: Job, overdue: list[int]) -> Commands:
    """Ranks that did not stop, start or write in time."""
    if job.phase in DUMPING:
        return overdue_writers(job, overdue)
    if job.dump is not None and job.dump.finish_step_by is not None:
        return stop_for_dump(job)
    commands: Commands = []
    for rank in sorted(overdue):
        member = job.membership.members[rank]
        is_starting = member.state is WorkerState.STARTING
        detail = "did not start" if is_starting else "did not leave its step"
        fault = Fault(
            FaultKind.UNRESPONSIVE, rank, member.incarnation, detail, version=member.version, signature=detail
        )
        if job.phase is Phase.PAUSING and job.attempt is not None:
            commands.append(kill(job, fault, job.attempt.cause, examine=False))
        count_as_lost(job, fault)
    return commands
