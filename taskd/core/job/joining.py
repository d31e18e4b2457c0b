"""Before every rank is known: faults wait, but not for ever; then what was found is taken on.

Owns the phase JOINING: of a job that begins, and of a manager that was restarted, for which every
rank is new.

When the first node registers, all have met at torch's rendezvous, and the others are seconds
behind. One that is not has been lost in between, or goes on as plain torchrun, because its agent
does not reach this manager: then it trains with the others, and is needed here for a fault alone.
The others tell which: they commit steps with the second, and none without the first.
"""

from collections.abc import Iterable

from taskd.core import commands as do
from taskd.core.events import AgentRegistered
from taskd.core.faults import FaultKind, TimedFault, describe
from taskd.core.job.absence import may_wait
from taskd.core.job.accounting import take_exception
from taskd.core.job.dump import end_job
from taskd.core.job.ending import end
from taskd.core.job.meeting import division
from taskd.core.job.member import Member
from taskd.core.job.state import JobState
from taskd.core.marks import Mark
from taskd.core.phase import JobPhase
from taskd.core.policy.ladder import Strategy
from taskd.core.transitions import Commands
from taskd.core.worker_state import WorkerState

_SHOWN = 16  # ranks or nodes in a text


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


def is_needed(job: JobState) -> bool:
    """Whether those who are here cannot go on, or come to their end, without those who are not."""
    return _is_broken(job) or _are_missed(job)


def _is_broken(job: JobState) -> bool:
    states = (WorkerState.LOST, WorkerState.PAUSED)
    return any(member.state in states for member in job.members.values())


def defer_faults(job: JobState) -> None:
    """Wait one lease for the ranks that are missing."""
    if job.join_by is None:
        job.join_by, job.is_joining_extended = job.now + job.timeouts.agent_lease_s, False


def await_others(job: JobState) -> None:
    """A node came for the first time, and others have not.

    They may need as long as one waits for a manager that begins, and may be silent for a lease.
    """
    joining, limits = job.joining, job.timeouts
    joining.last_at = job.now
    joining.ask_at = job.now + limits.fallback_connected_s + limits.agent_lease_s


def note_marks(job: JobState, marks: Iterable[Mark]) -> None:
    """How far the ranks of those who are here have come."""
    joining = job.joining
    for mark in marks:
        if mark.version is not None:
            first = joining.versions.setdefault(mark.rank, mark.version)
            joining.have_committed |= mark.version > first


def are_not_coming(job: JobState) -> bool:
    """Whether the nodes that have not registered count as lost nodes from now on.

    As long as a fault waits for them, that decides (`join_by`).
    """
    is_asked = job.join_by is None and not _do_without(job)
    return is_asked and count_missing_as_lost(job)


def report_missing(job: JobState, *, are_lost: bool) -> Commands:
    """Say once who has not registered, and what follows."""
    if job.joining.is_told:
        return []
    job.joining.is_told = True
    since_s = job.now - job.joining.last_at
    if _do_without(job):
        what = "the others commit steps, so they train; their agents do not reach this manager"
        then = "A fault ends the job unless they register; see what their torchruns say"
    else:
        what = f"no other has registered for {since_s:.0f} s, and no step has been committed since"
        left_s = max(job.joining.last_at + job.timeouts.start_s - job.now, 0.0)
        then = (
            "They count as lost"
            if are_lost
            else f"If both are still so in {left_s:.0f} s, a job that uses taskd.recoverable is "
            "given up; see what their torchruns say"
        )
    count = job.membership.joined_node_count or 0
    nodes = [place for place in range(count) if place not in job.membership.nodes]
    who = f"nodes {_shown(nodes)} of {count} (ranks {_shown(_missing_ranks(job))})"
    text = f"{who} are missing, {what}. {then}"
    return [do.ReportNotJoined(job.cause, job.generation, text)]


def ask_again(job: JobState) -> Commands:
    """Nodes have not registered, and do not count as lost: until when they may still come."""
    joining, limits = job.joining, job.timeouts
    joining.ask_at, until = None, joining.last_at + limits.start_s
    if _do_without(job):
        return []
    if job.now < until:
        joining.ask_at = min(job.now + limits.agent_lease_s, until)
        return []
    if not job.membership.is_declared:
        return []  # it commits nothing that could be seen: torch's own timeouts end it
    reason = (
        f"ranks {_shown(_missing_ranks(job))} have not registered with this manager within "
        f"{limits.start_s:g} s of the others, and no step was committed in that time: their nodes "
        "were lost before that, or their agents do not reach it. See what their torchruns say, "
        "and start all of them again"
    )
    return end_job(job, reason)


def _do_without(job: JobState) -> bool:
    """Whether those who are here train with those who are not, or have done so."""
    is_over = any(member.is_done for member in job.members.values())
    return is_over or job.joining.have_committed


def _missing_ranks(job: JobState) -> list[int]:
    return [rank for rank in range(job.membership.world_size or 0) if rank not in job.members]


def _shown(numbers: list[int]) -> str:
    more = len(numbers) - _SHOWN
    return f"{numbers[:_SHOWN]}" + (f" and {more} more" if more > 0 else "")


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
    job.phase, job.join_by, job.joining.ask_at = JobPhase.RUNNING, None, None
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
    if job.unanswered or len(generations) > 1 or stopped - suspected or division(job):
        job.is_recovery_needed = True
        return
    job.inherited = []  # all go on already
    if job.suspects:
        job.phase = JobPhase.SUSPECTING
        job.suspect_until = job.now + job.timeouts.communication_grace_s


def join_overdue(job: JobState) -> Commands:
    """Ranks are missing still, and others cannot go on without them."""
    if is_needed(job) and _is_extended(job):
        return []
    job.join_by = None
    if not any(node.is_present for node in job.membership.nodes.values()):
        return end(job, succeeded=True, reason="every node that joined succeeded")
    members = job.membership.ordered()
    is_broken = _is_broken(job)
    if not is_needed(job):
        # Some have returned, the others are not here. If all have, then an earlier manager released
        # the others.
        job.unanswered, job.suspects = [], []
        if all(member.is_done for member in members):
            job.phase, job.joining.ask_at = JobPhase.RUNNING, None
        return []
    faults = [*job.unanswered, *job.suspects]
    first = min(faults, key=TimedFault.order, default=None)
    what = "a recovery is under way" if is_broken else "an earlier manager knew all ranks"
    what = what if first is None else describe(first.fault)
    reason = f"{what}, and ranks {_shown(_missing_ranks(job))} are not known to this manager"
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
