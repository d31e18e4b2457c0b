"""Time passes: whatever is overdue in a job.

Owns what is done when a deadline has come (`OVERDUE`, at the end), and the order when several have
come at once.
"""

from taskd.core import events as ev
from taskd.core.faults import FaultKind
from taskd.core.job.absence import nobody_came
from taskd.core.job.attempts import close_restart
from taskd.core.job.dump import overdue_writers, proceed_with_status, stop_for_dump
from taskd.core.job.ending import end_after_release
from taskd.core.job.membership import LOST_NODE
from taskd.core.job.nodes import WITHOUT_NODE, lose_node, missing, unregistered
from taskd.core.job.orders import count_as_lost, kill
from taskd.core.job.returning import is_under_way, overdue
from taskd.core.job.settle import FOLLOW_UPS
from taskd.core.job.state import JobState
from taskd.core.phase import OVER, JobPhase
from taskd.core.transitions import Commands, FollowUp, settle, take
from taskd.core.worker_state import WorkerState


def tick(job: JobState, event: ev.Tick) -> Commands:
    """Nodes that are silent, then what the whole job waits for, then single ranks."""
    commands: Commands = []
    for node_rank in job.leases.expired(event.now):
        before, silence_s = job.phase, job.leases.silence_s(node_rank, event.now)
        outcome = "succeeded" if _has_ended(job, node_rank) else LOST_NODE
        commands += lose_node(job, node_rank, outcome, f"has been silent for {silence_s:.0f} s")
        job.declare("a node is silent", before, WITHOUT_NODE[before])
        commands += settle(job, FOLLOW_UPS)
    for due in OVERDUE:
        if job.phase in due.phases and due.is_due(job):
            commands += take(job, due) + settle(job, FOLLOW_UPS)
    return commands


def _has_ended(job: JobState, node_rank: int) -> bool:
    """Whether a goodbye that was lost is likelier than a lost node."""
    members = job.membership.on_node(node_rank)
    if members and all(member.state is WorkerState.FINISHED for member in members):
        return True
    is_lost = any(member.state is WorkerState.LOST for member in members)
    return job.phase is JobPhase.RELEASED and not is_lost


def _take_suspect(job: JobState) -> Commands:
    """The cause is an exception that came back, which says most; else the earliest suspect."""
    culprit = min(
        job.suspects, key=lambda timed: (timed.fault.kind is not FaultKind.RAISED, timed.died_at)
    )
    job.suspects.remove(culprit)
    job.unanswered.append(culprit)
    return []


def _overdue(job: JobState) -> list[int]:
    return job.awaited.overdue(job.now)


def _absent_for_good(job: JobState) -> bool:
    return bool(job.absent.overdue(job.now))


def _may_finish_step(job: JobState) -> bool:
    return job.dump is not None and job.dump.finish_step_by is not None and bool(_overdue(job))


def _count_overdue_as_lost(job: JobState) -> Commands:
    """Ranks that did not stop or start in time: killed, and replaced like the dead.

    Those of a node that may be lost are judged when that is known, and lost with it if it is. A
    manager that slept knows it later than its other deadlines come.
    """
    commands: Commands = []
    for rank in sorted(_overdue(job)):
        member = job.members[rank]
        known_at = job.leases.decided_at(member.node_rank, job.now)
        if known_at is not None:
            job.awaited.set(rank, known_at)
            continue
        is_starting = member.state is WorkerState.STARTING
        detail = "did not start" if is_starting else "did not leave its step"
        fault = member.fault(FaultKind.UNRESPONSIVE, detail)
        if job.phase is JobPhase.PAUSING and job.attempt is not None:
            commands.append(kill(job, fault, job.attempt.cause, examine=False))
        count_as_lost(job, fault)
    return commands


_JOINED = WITHOUT_NODE[JobPhase.JOINING]
_SAVED = OVER | {JobPhase.SAVING, JobPhase.PAUSING}
_ENDS = OVER | {JobPhase.CONFIRMING}
OVERDUE = (
    FollowUp(
        "ranks have not joined", {JobPhase.JOINING},
        lambda job: job.is_past(job.join_by), missing, _JOINED,
    ),
    FollowUp(
        "ranks have not joined", {JobPhase.JOINING},
        lambda job: job.is_past(job.joining.ask_at), unregistered, _JOINED,
    ),
    FollowUp(
        "nobody says how it died", {JobPhase.CONFIRMING},
        lambda job: job.is_past(job.status_by), proceed_with_status, _SAVED,
    ),
    FollowUp(
        "first steps were not seen", {JobPhase.RUNNING, JobPhase.SUSPECTING},
        lambda job: job.restarted is not None and job.is_past(job.restarted.until), close_restart,
    ),
    FollowUp(
        "processes have not ended", {JobPhase.RELEASED},
        lambda job: job.is_past(job.end_by), end_after_release, OVER,
    ),
    FollowUp(
        "no other cause was reported", {JobPhase.SUSPECTING},
        lambda job: job.is_past(job.suspect_until), _take_suspect,
    ),
    FollowUp(
        "a rank has not written", {JobPhase.SAVING},
        _overdue, overdue_writers, {JobPhase.DISCARDING},
    ),
    FollowUp(
        "the first writer is not done", {JobPhase.PUBLISHING, JobPhase.DISCARDING},
        _overdue, overdue_writers, OVER,
    ),
    FollowUp(
        "a rank has not finished its step", {JobPhase.PAUSING}, _may_finish_step, stop_for_dump
    ),
    FollowUp("a node has not come back", {JobPhase.PAUSING}, _absent_for_good, nobody_came, _ENDS),
    FollowUp(
        "mirrors have not come back", {JobPhase.PAUSING},
        lambda job: is_under_way(job) and job.is_past(job.returning.by), overdue,
    ),
    FollowUp(
        "a rank has not stopped or started", {JobPhase.PAUSING, JobPhase.RESTARTING},
        _overdue, _count_overdue_as_lost,
    ),
)  # fmt: skip
