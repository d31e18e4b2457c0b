"""Before every rank is known: faults wait, but not for ever; then what was found is taken on.

Owns the phase JOINING: of a job that begins, and of a manager that was restarted, for which every
rank is new.
"""

from collections.abc import Iterable

from taskd.core.events import AgentRegistered
from taskd.core.faults import FaultKind, TimedFault, describe
from taskd.core.job.absence import may_wait
from taskd.core.job.accounting import take_exception
from taskd.core.job.dump import end_job
from taskd.core.job.ending import end
from taskd.core.job.member import Member
from taskd.core.job.state import JobState
from taskd.core.phase import JobPhase
from taskd.core.policy.ladder import Strategy
from taskd.core.transitions import Commands
from taskd.core.worker_state import WorkerState

_SHOWN_RANKS = 16


def wait_for_others(job: JobState) -> None:
    """Not complete yet. Workers that cannot go on, and lost nodes, are no reason to wait for ever.

    O(1) while all work: it is asked for each node that comes.
    """
    members = [job.members[rank] for rank in sorted(job.membership.stopped_early)]
    _take_over_lost(job, members)
    is_hurt = bool(job.unanswered) or any(member.has_stopped for member in members)
    if is_hurt or _are_missed(job):
        defer_faults(job)
    else:
        job.join_by = None


def _are_missed(job: JobState) -> bool:
    """Whether the ranks that are missing were there once, and others train that need them.

    A recovery needed all of them. Before one, a node may train and never have reached its manager.
    """
    members = job.members.values()
    return job.generation > 0 and any(one.declared and not one.is_done for one in members)


def defer_faults(job: JobState) -> None:
    """Wait one lease for the ranks that are missing."""
    if job.join_by is None:
        job.join_by, job.is_joining_extended = job.now + job.timeouts.agent_lease_s, False


def count_missing_as_lost(job: JobState) -> bool:
    """One lease is over. Whether the nodes that have not come are lost nodes from now on.

    They are expected as by a manager that was elected, and nobody has a lease any more. Only if
    others than those of another manager are here: half of the agents that were there at first.
    """
    membership, count = job.membership, job.membership.joined_node_count or 0
    places = [place for place in range(count) if place not in membership.nodes]
    first = [place for place in membership.nodes if place not in job.meeting.lost]
    per_node = (membership.world_size or 0) // max(count, 1)
    sizes = {len(node.ranks) for node in membership.nodes.values()}
    is_plain = not membership.told_world[1] and sizes == {per_node} and places
    if not is_plain or 2 * len(first) < count or not all(may_wait(job, one) for one in places):
        return False
    job.join_by = None
    for place in places:
        job.expected[place] = tuple(range(place * per_node, (place + 1) * per_node))
        job.leases.renew(place, job.now - job.timeouts.agent_lease_s)
        job.leases.drop(place)
    return True


def _is_extended(job: JobState) -> bool:
    """Whether they are waited for as long as for a lost node, although they do not count as such.

    Nobody else is offered their places then.
    """
    more_s = job.reschedule_s - job.timeouts.agent_lease_s
    if job.is_joining_extended or Strategy.RECOVER not in job.allowed or more_s <= 0:
        return False
    job.join_by, job.is_joining_extended = job.now + more_s, True
    return True


def complete(job: JobState) -> None:
    """Every rank is known. Faults that waited, and a recovery that was begun before, come first."""
    members = job.membership.ordered()
    job.phase, job.join_by = JobPhase.RUNNING, None
    if job.membership.told_world[1] and len(members) != job.membership.world_size:
        job.membership.is_reduced = True
        job.told_active = job.membership.active
        for node_rank in [node for node in job.expected if job.membership.is_left_out(node)]:
            del job.expected[node_rank]
            job.leases.drop(node_rank)
    working = {member.rank for member in members if not member.is_done}
    job.unanswered = [timed for timed in job.unanswered if timed.fault.rank in working]
    job.suspects = [timed for timed in job.suspects if timed.fault.rank in working]
    _take_over_lost(job, members)
    suspected = {timed.fault.rank for timed in job.suspects}
    stopped = {member.rank for member in members if member.state is WorkerState.PAUSED}
    nodes = job.membership.nodes.values()
    generations = {node.generation for node in nodes if node.is_present}
    if job.unanswered or len(generations) > 1 or stopped - suspected:
        job.is_recovery_needed = True
        return
    job.inherited = []  # all go on already
    if job.suspects:
        job.phase = JobPhase.SUSPECTING
        job.suspect_until = job.now + job.timeouts.communication_grace_s


def join_overdue(job: JobState) -> Commands:
    """Ranks are missing still, and others cannot go on without them."""
    if _is_extended(job):
        return []
    job.join_by = None
    if not any(node.is_present for node in job.membership.nodes.values()):
        return end(job, succeeded=True, reason="every node that joined succeeded")
    members = job.membership.ordered()
    is_broken = any(member.state in (WorkerState.LOST, WorkerState.PAUSED) for member in members)
    if not is_broken and not _are_missed(job):
        # Some have returned, the others are not here. If all have, then an earlier manager released
        # the others.
        job.unanswered, job.suspects = [], []
        if all(member.is_done for member in members):
            job.phase = JobPhase.RUNNING
        return []
    faults = [*job.unanswered, *job.suspects]
    first = min(faults, key=TimedFault.order, default=None)
    what = "a recovery is under way" if is_broken else "an earlier manager knew all ranks"
    what = what if first is None else describe(first.fault)
    missing = [rank for rank in range(job.membership.world_size or 0) if rank not in job.members]
    more = len(missing) - _SHOWN_RANKS
    shown = f"{missing[:_SHOWN_RANKS]}" + (f" and {more} more" if more > 0 else "")
    reason = f"{what}, and ranks {shown} are not known to this manager"
    return end_job(job, reason, None if first is None else first.fault)


def adopt_missing(job: JobState, node_rank: int) -> None:
    """What a manager that was elected knows of a node that has not registered with it.

    No life of a rank has had a higher number than that of the generation.
    """
    for rank in job.expected.pop(node_rank, ()):
        life = Member(rank, node_rank, job.generation, WorkerState.RUNNING, job.now)
        life.enter()
        job.membership.adopt(life)
        former_agent = job.expected_agents.get(node_rank, "")
        job.membership.nodes[node_rank].former_agent = former_agent


def lose_unreported(job: JobState, member: Member) -> None:
    """A registration says that this rank is lost.

    Unless it said how and when, too, that report is still on its way.
    """
    timed = job.vanished(member)
    life = (member.rank, member.incarnation)
    timed.fault, timed.died_at = job.told_faults.pop(life, (timed.fault, timed.died_at))
    if timed.fault.kind is FaultKind.LOST:
        job.without_status[life] = timed
    job.unanswered.append(timed)


def take_over_exceptions(job: JobState, event: AgentRegistered) -> None:
    """A registration says what left the functions of ranks that wait.

    No manager has answered it, or one that has not come to the end of that.
    """
    for report in event.workers:
        failure, member = report.failure, job.members[report.rank]
        if failure is None or failure.replaced or member.state is not WorkerState.PAUSED:
            continue
        is_its_life = failure.fault.life == (member.rank, member.incarnation)
        if is_its_life and not job.has_unanswered(failure.fault):
            take_exception(job, failure.fault, failure.age_s)


def _take_over_lost(job: JobState, members: Iterable[Member]) -> None:
    counted = {timed.fault.life for timed in job.unanswered}
    for member in members:
        is_lost = member.state is WorkerState.LOST and member.node_rank not in job.absent
        if is_lost and (member.rank, member.incarnation) not in counted:
            lose_unreported(job, member)
