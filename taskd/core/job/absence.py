"""Nodes that are lost and waited for: until when, and what happens when one comes back.

Owns strategy `recover`. All live ranks wait at the gate meanwhile, with what they hold; the ranks
of the lost node have no process and no order until an agent registers in its place:

- its own agent, whose link was cut: workers that are still there are taken back;
- another one (a new pod, a spare): all its ranks are replaced, and receive the state from others.

Nobody came in time: the job goes on without the node, if elastic training is allowed
(`taskd.core.job.elastic`), and at once if no node is to be waited for. Else it ends, with a dump if
those who are left hold everything.
"""

from taskd.core import events as ev
from taskd.core.commands import Interrupt
from taskd.core.faults import FaultKind
from taskd.core.job import elastic, orders
from taskd.core.job.dump import end_job
from taskd.core.job.meeting import leave_node, may_leave, place
from taskd.core.job.member import Member
from taskd.core.job.membership import Node
from taskd.core.job.state import JobState
from taskd.core.phase import TRAINING, JobPhase
from taskd.core.policy.ladder import Strategy
from taskd.core.transitions import Commands
from taskd.core.worker_state import WorkerState

_MAY_WAIT = TRAINING - {JobPhase.RESTARTING} | {JobPhase.JOINING}


def replaces_nodes(job: JobState) -> bool:
    """Whether the place of a lost node may be taken by another one in this job."""
    return _waits(job) or elastic.is_allowed(job)


def _waits(job: JobState) -> bool:
    return Strategy.RECOVER in job.allowed and job.reschedule_s > 0


def may_wait(job: JobState, node_rank: int) -> bool:
    """Whether this lost node is waited for, or done without. If not, the job ends."""
    return (
        replaces_nodes(job)
        and may_leave(job, node_rank)
        and job.phase in _MAY_WAIT
        and job.dump is None
        and job.membership.is_declared
        and any(node.is_present for node in job.membership.nodes.values())
    )


def wait_for_node(job: JobState, node_rank: int, how: str) -> None:
    """From now on it is waited for. One fault tells of all its ranks."""
    leave_node(job, node_rank)
    place(job)  # now, as who comes in its place asks for it
    job.absent.set(node_rank, job.now + (job.reschedule_s if _waits(job) else 0.0))
    members = job.membership.on_node(node_rank)
    for member in members:
        member.lose()
        job.awaited.discard(member.rank)
    fault = members[0].fault(FaultKind.NODE_LOST, how)
    job.unanswered.append(job.timed_fault(fault, job.leases.silence_s(node_rank, job.now)))


def come_back(job: JobState, event: ev.AgentRegistered, former: Node | None) -> Commands:
    """An agent has registered in the place of a node that is waited for. `former`: who was there.

    Of an adopted one only a bound of the lives of its ranks was known.
    """
    is_same_agent = former is not None and former.is_of(event)
    is_adopted = former is not None and former.is_adopted
    job.absent.discard(event.node_rank)
    # Workers that are to leave their step need the Interrupt; after an Advance it would be late.
    is_early = isinstance(job.last_order, Interrupt)
    commands = job.repeat_order(event.node_rank)
    for report in sorted(event.workers, key=lambda report: report.rank):
        member = job.members[report.rank]
        if is_same_agent and is_adopted:
            member.incarnation = min(member.incarnation, report.incarnation)
            member.shard = report.shard or member.shard
        if is_same_agent and is_early and _is_alive(member, report):
            _take_back(job, member, report)
        else:
            commands.append(orders.replace(job, member))
    return commands


def _is_alive(member: Member, report: ev.WorkerReport) -> bool:
    is_there = report.state in (WorkerState.RUNNING, WorkerState.PAUSED, WorkerState.RETURNED)
    return is_there and report.incarnation == member.incarnation and report.entered


def _take_back(job: JobState, member: Member, report: ev.WorkerReport) -> None:
    """It was only out of reach. It stops when it hears of the recovery, or says again that it has.

    What it says of an earlier stop is of another generation.
    """
    member.state, member.entered = WorkerState.RUNNING, True
    job.membership.note_version(report.version)
    job.awaited.set(member.rank, job.now + job.timeouts.pause_s)


def nobody_came(job: JobState) -> Commands:
    """A lost node was waited for long enough."""
    overdue = sorted(job.absent.overdue(job.now))
    within = f"nobody took its place within {job.reschedule_s:g} s (node {overdue[0]})"
    why = [within] if _waits(job) else []
    if elastic.is_allowed(job):
        assert job.attempt is not None
        problem = elastic.problem(job, overdue)
        if why:
            job.attempt.skipped[Strategy.RECOVER] = within
        if problem is None:
            return elastic.go_on_without(job, overdue)
        job.attempt.skipped[Strategy.ELASTIC] = problem
        why.append(f"the job cannot go on without it: {problem}")
    job.absent.clear()
    return end_job(job, ", and ".join([job.what_happened(), *why]))
