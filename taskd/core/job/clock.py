"""Time passes: whatever is overdue in a job.

Owns what is done when a deadline has come (`OVERDUE`, at the end), and the order when several have
come at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from taskd.core.faults import Fault, FaultKind
from taskd.core.job.dump import go_on_with_status, overdue_writers, stop_for_dump
from taskd.core.job.ending import end_after_release
from taskd.core.job.joining import join_overdue
from taskd.core.job.nodes import WITHOUT_NODE, lose_node
from taskd.core.job.orders import count_as_lost, kill
from taskd.core.job.settle import settle, take
from taskd.core.membership import LOST_NODE
from taskd.core.phase import OVER, Phase
from taskd.core.table import FollowUp
from taskd.core.worker_state import WorkerState

if TYPE_CHECKING:
    from taskd.core import events as ev
    from taskd.core.job.state import Commands, Job


def tick(job: Job, event: ev.Tick) -> Commands:
    """Nodes that are silent, then what the whole job waits for, then single ranks."""
    commands: Commands = []
    for node_rank in job.leases.expired(event.now):
        before, how = (
            job.phase,
            (f"has been silent for {job.leases.silence_s(node_rank, event.now):.0f} s"),
        )
        outcome = "succeeded" if _has_ended(job, node_rank) else LOST_NODE
        commands += lose_node(job, node_rank, outcome, how)
        job.declare("a node is silent", before, WITHOUT_NODE[before])
        commands += settle(job)
    for due in OVERDUE:
        if job.phase in due.phases and due.is_due(job):
            commands += take(job, due) + settle(job)
    return commands


def _has_ended(job: Job, node_rank: int) -> bool:
    """Whether a goodbye that was lost is likelier than a lost node."""
    members = job.membership.on_node(node_rank)
    if members and all(member.state is WorkerState.FINISHED for member in members):
        return True
    is_lost = any(member.state is WorkerState.LOST for member in members)
    return job.phase is Phase.RELEASED and not is_lost


# ---------------------------------------------------------------------- what the job as a whole
# waits for


def _has_come(job: Job, deadline: float | None) -> bool:
    return deadline is not None and deadline <= job.now


def _take_suspect(job: Job) -> Commands:
    """An exception that came back says more than a broken connection.

    Else the earliest is the cause.
    """
    is_raised = FaultKind.RAISED
    culprit = min(
        job.suspects, key=lambda known: (known.fault.kind is not is_raised, known.died_at)
    )
    job.suspects.remove(culprit)
    job.unanswered.append(culprit)
    return []


# ---------------------------------------------------------------------- single ranks


def _overdue_ranks(job: Job) -> list[int]:
    return job.awaited.overdue(job.now)


def _may_finish_step(job: Job) -> bool:
    return (
        job.dump is not None and job.dump.finish_step_by is not None and bool(_overdue_ranks(job))
    )


def _count_overdue_as_lost(job: Job) -> Commands:
    """Ranks that did not stop or start in time: killed, and replaced like the dead."""
    commands: Commands = []
    for rank in sorted(_overdue_ranks(job)):
        member = job.membership.members[rank]
        is_starting = member.state is WorkerState.STARTING
        detail = "did not start" if is_starting else "did not leave its step"
        fault = Fault(
            FaultKind.UNRESPONSIVE,
            rank,
            member.incarnation,
            detail,
            version=member.version,
            signature=detail,
        )
        if job.phase is Phase.PAUSING and job.attempt is not None:
            commands.append(kill(job, fault, job.attempt.cause, examine=False))
        count_as_lost(job, fault)
    return commands


_SAVED = frozenset({Phase.SAVING}) | OVER
OVERDUE = (
    FollowUp("ranks have not joined", frozenset({Phase.JOINING}), lambda job: _has_come(job, job.join_by),
         join_overdue, frozenset({Phase.RUNNING}) | OVER),
    FollowUp("nobody says how it died", frozenset({Phase.CONFIRMING}), lambda job: _has_come(job, job.status_by),
         go_on_with_status, _SAVED),
    FollowUp("processes have not ended", frozenset({Phase.RELEASED}), lambda job: _has_come(job, job.end_by),
         end_after_release, OVER),
    FollowUp("no other cause was reported", frozenset({Phase.SUSPECTING}),
         lambda job: _has_come(job, job.suspect_until), _take_suspect),
    FollowUp("a rank has not written", frozenset({Phase.SAVING}), lambda job: bool(_overdue_ranks(job)), overdue_writers,
         frozenset({Phase.DISCARDING})),
    FollowUp("the first writer is not done", frozenset({Phase.PUBLISHING, Phase.DISCARDING}),
         lambda job: bool(_overdue_ranks(job)), overdue_writers, OVER),
    FollowUp("a rank has not finished its "
             "step", frozenset({Phase.PAUSING}), _may_finish_step, stop_for_dump),
    FollowUp("a rank has not stopped or started", frozenset({Phase.PAUSING, Phase.RESTARTING}),
         lambda job: bool(_overdue_ranks(job)), _count_overdue_as_lost),
)  # fmt: skip
