"""Agents: registration, reconnection, heartbeats, departure, and which node mirrors which.

Owns what the job learns from agents about themselves. What workers report is in
`taskd.core.job.workers`.
"""

from taskd.core import commands as do
from taskd.core import events as ev
from taskd.core.faults import TimedFault
from taskd.core.job import elastic, orders, returning
from taskd.core.job.absence import come_back, may_wait, replaces_nodes, wait_for_node
from taskd.core.job.dump import end_job, has_lost_writer
from taskd.core.job.ending import end, end_if_all_left, fail_after_release
from taskd.core.job.joining import (
    adopt_missing,
    are_not_coming,
    ask_again,
    await_others,
    complete,
    count_missing_as_lost,
    is_needed,
    join_overdue,
    lose_unreported,
    report_missing,
    take_over_exceptions,
    wait_for_others,
)
from taskd.core.job.meeting import division, note_start, note_store
from taskd.core.job.member import Member
from taskd.core.job.membership import FELL_BACK, LOST_NODE
from taskd.core.job.state import JobState
from taskd.core.phase import DUMPING, OVER, TRAINING, JobPhase
from taskd.core.policy.peers import peers_of, served_by
from taskd.core.transitions import Commands
from taskd.core.worker_state import WorkerState

# Where the loss of a node may lead at once.
WITHOUT_NODE: dict[JobPhase, frozenset[JobPhase]] = {
    **dict.fromkeys(JobPhase, OVER),
    **dict.fromkeys(TRAINING, OVER | {JobPhase.PAUSING, JobPhase.CONFIRMING}),
    JobPhase.JOINING: OVER
    | {
        JobPhase.RUNNING,
        JobPhase.SUSPECTING,
        JobPhase.PAUSING,
        JobPhase.CONFIRMING,
    },
}


def refusal(job: JobState, event: ev.AgentRegistered) -> str | None:
    """Why this agent may not join, or None.

    Once the job has begun, generations are made by this manager alone.
    """
    if job.phase is JobPhase.ENDED:
        return f"the job has ended: {job.reason}"
    if job.phase is not JobPhase.JOINING and event.generation > job.generation:
        return f"the job is in generation {job.generation}, this agent says {event.generation}"
    return elastic.refusal(job, event) or job.membership.refusal(event)


def registered(job: JobState, event: ev.AgentRegistered) -> Commands:
    """An agent came, for the first time or again."""
    if event.is_substitute and job.membership.is_held(event):
        job.leases.doubt(event.node_rank, event.now)
        return job.ignore(f"node {event.node_rank} counts as present: another asks for its place")
    refused = refusal(job, event)
    if refused is not None:
        return job.ignore(f"refused: {refused}")
    note_store(job, event)
    if elastic.is_back(job, event):
        job.leases.renew(event.node_rank, event.now)
        return elastic.come_back(job, event)
    return _take_in(job, event)


def _take_in(job: JobState, event: ev.AgentRegistered) -> Commands:
    """An agent of the present world, or the first ones of all."""
    known = job.membership.nodes.get(event.node_rank)
    _take_over_faults(job, event)
    if job.membership.joined_node_count is None:
        job.fit(event.node_count)
    job.membership.register(event)
    note_start(job, event)
    if job.phase is JobPhase.JOINING:
        take_over_exceptions(job, event)
    job.expected.pop(event.node_rank, None)
    job.leases.renew(event.node_rank, event.now)
    job.generation = max(job.generation, event.generation)
    job.budget.adopt(event.restarts_used)
    if job.phase is JobPhase.ENDING:
        return job.repeat_order(event.node_rank)
    if event.node_rank in job.absent:
        return come_back(job, event, known)
    missed = _compare(job, event) if known is not None else []
    stops = (member for member in job.membership.on_node(event.node_rank) if member.has_stopped)
    job.membership.stopped_early.update(member.rank for member in stops)
    if known is None and job.phase is JobPhase.PAUSING:
        for member in job.membership.on_node(event.node_rank):
            orders.await_stop(job, member)  # the job ends, and did not know of this node before
    if job.phase is not JobPhase.JOINING:
        return _catch_up(job, event, missed)
    (complete if job.membership.is_complete else wait_for_others)(job)
    if known is None and not job.expected and job.phase is JobPhase.JOINING:
        await_others(job)
    return _lose_missing(job)


def left(job: JobState, event: ev.AgentLeft) -> Commands:
    """An agent said goodbye."""
    detail = f": {event.detail}" if event.detail else ""
    return lose_node(job, event.node_rank, event.outcome, f"left ({event.outcome}{detail})")


def lose_node(job: JobState, node_rank: int, outcome: str, how: str) -> Commands:
    """An agent is not there any more."""
    membership = job.membership
    job.leases.drop(node_rank)
    returning.forget(job, node_rank)
    # Of several that an elected manager expects in vain, the last one has had the others lost, too.
    is_known = outcome == LOST_NODE and (node_rank in job.expected or node_rank in job.absent)
    if is_known or membership.is_left_out(node_rank):
        return _lose_missing(job)
    job.expected.pop(node_rank, None)
    membership.leave(node_rank, outcome)
    if job.phase is JobPhase.ENDING:
        return end_if_all_left(job)
    gone = f"the agent of node {node_rank} {how}"
    if outcome == FELL_BACK:
        # The manager was away for longer than a fault may wait. The other nodes cannot train
        # without this one, and cannot follow it while they listen to the manager.
        return end(job, succeeded=True, reason=gone, left_alone=True)
    if outcome == LOST_NODE and may_wait(job, node_rank):
        wait_for_node(job, node_rank, gone)
        if job.phase is JobPhase.JOINING:
            (complete if membership.is_complete else wait_for_others)(job)
        return []
    if outcome == LOST_NODE and replaces_nodes(job) and not membership.is_declared:
        gone += "; only a job that uses taskd.recoverable can wait for another one in its place"
    members = membership.on_node(node_rank)
    if outcome != "succeeded" or any(_is_needed(job, member) for member in members):
        for member in members:
            member.lose()
            job.awaited.discard(member.rank)
        crossed = f"{job.what_happened()}, and node {node_rank} has already left"
        return end_job(job, crossed if outcome == "succeeded" else gone)
    for member in members:
        membership.finish(member)
    return _after_goodbye(job)


def _lose_missing(job: JobState, how: str = "has not come to the next manager") -> Commands:
    """Whom an elected manager expects, and nobody has heard of in time, once all others are there.

    Until then they may still come.
    """
    if any(job.leases.is_held(node_rank) for node_rank in job.expected):
        return []
    commands: Commands = []
    for node_rank in sorted(job.expected):
        adopt_missing(job, node_rank)
        commands += lose_node(job, node_rank, LOST_NODE, how)
    return commands


def missing(job: JobState) -> Commands:
    """JOINING: nodes have not come in time, and others cannot go on without them."""
    are_lost = is_needed(job) and count_missing_as_lost(job)
    return _lose_missing(job) if are_lost else join_overdue(job)


def unregistered(job: JobState) -> Commands:
    """JOINING: nodes have not registered, long after the others."""
    are_lost = are_not_coming(job)
    said = report_missing(job, are_lost=are_lost)
    if are_lost:
        return said + _lose_missing(job, "was lost before it registered with this manager")
    return said + ask_again(job)


def _after_goodbye(job: JobState) -> Commands:
    """A node has left that has done its part."""
    membership = job.membership
    if any(node.is_present for node in membership.nodes.values()):
        if job.phase is JobPhase.JOINING and membership.is_complete:
            complete(job)
        return []
    if membership.is_complete or job.phase is JobPhase.RELEASED:
        return end(job, succeeded=True, reason="every node succeeded")
    if job.phase is not JobPhase.JOINING:  # nobody has been waited for any more, see `join_overdue`
        return end(job, succeeded=True, reason="every node that joined succeeded")
    # An earlier manager knew the others, or they are late.
    job.join_by = job.now + job.timeouts.agent_lease_s
    return []


def heard(job: JobState, event: ev.AgentHeard) -> Commands:
    """A heartbeat. What it says of the workers is `taskd.core.job.hangs`'s."""
    if job.leases.is_held(event.node_rank):
        job.leases.renew(event.node_rank, event.now)
    return []


def expect(job: JobState, event: ev.ManagerBeganAnew) -> Commands:
    """Agents that an earlier machine knew: whoever does not come back is lost."""
    for node_rank in event.node_ranks:
        job.leases.renew(node_rank, event.now)
    return []


def elected(job: JobState, event: ev.ManagerElected) -> Commands:
    """The agents elected this manager: whoever does not come is lost with the host of the last."""
    per_node = event.ranks_per_node
    job.expected_agents = dict(event.agents)
    for node_rank in range(event.node_count):
        first = node_rank * per_node
        job.expected[node_rank] = tuple(range(first, first + per_node))
        job.leases.renew(node_rank, event.now)
        if node_rank not in event.voters:
            job.leases.doubt(node_rank, event.now)
    return []


def drain(job: JobState, event: ev.AgentDraining) -> Commands:
    """A node is to end, in good time."""
    if job.membership.is_left_out(event.node_rank):
        return job.ignore(f"node {event.node_rank} is to end: the job goes on without it")
    reason = f"node {event.node_rank} is to end ({event.detail})"
    return end_job(job, reason, None, event.grace_s)


# ---------------------------------------------------------------------- an agent comes back


def _take_over_faults(job: JobState, event: ev.AgentRegistered) -> None:
    """What the agent knows of failures: not answered yet, or being answered by another manager."""
    is_first = job.phase is JobPhase.JOINING and event.node_rank not in job.membership.nodes
    for report in event.workers:
        if (failure := report.failure) is None:
            continue
        died_at = event.now - failure.age_s
        if not failure.replaced and WorkerState(report.state) is WorkerState.LOST:
            job.told_faults[report.rank, report.incarnation] = (failure.fault, died_at)
        elif failure.replaced and is_first:
            job.inherited.append(TimedFault(failure.fault, died_at, event.now, is_declared=True))


def _compare(job: JobState, event: ev.AgentRegistered) -> list[Member]:
    """Take over what an agent that came back says. Returns the ranks whose new life it has missed.

    A version that a worker held before a life or a recovery that this manager has ordered since
    counts no more.
    """
    is_awaited = job.phase is JobPhase.PAUSING and event.generation == job.generation
    missed = []
    for report in sorted(event.workers, key=lambda report: report.rank):
        member, state = job.members[report.rank], WorkerState(report.state)
        if report.incarnation != member.incarnation:
            missed.append(member)
            continue
        if job.phase is JobPhase.JOINING:
            job.membership.note_version(report.version)
        member.declared = member.declared or report.declared
        member.entered = member.entered or report.entered
        is_starting = member.state is WorkerState.STARTING and not member.replaced
        if is_starting and state is not WorkerState.STARTING:
            member.state = WorkerState.RUNNING  # the report of its start was lost
        if state is WorkerState.LOST and member.is_live:
            job.membership.note_version(report.version)
            member.lose(snapshots=report.snapshots or None)
            lose_unreported(job, member)
        elif state is WorkerState.FINISHED:
            job.membership.finish(member)
        elif state is WorkerState.RETURNED and member.state is WorkerState.RUNNING:
            member.state = WorkerState.RETURNED
        elif state is WorkerState.PAUSED and is_awaited and member.rank in job.awaited:
            _take_over_stopped(job, member, report)
    return missed


def _take_over_stopped(job: JobState, member: Member, report: ev.WorkerReport) -> None:
    """It waits. If it was told to advance since, the report is older, or the order was lost.

    The order is repeated then.
    """
    job.membership.note_version(report.version)
    if report.may_advance and job.was_told_to_advance(member.rank):
        return
    advance = report.may_advance
    member.pause(report.version, report.clean, report.snapshots, may_advance=advance)


def _catch_up(job: JobState, event: ev.AgentRegistered, missed: list[Member]) -> Commands:
    """Repeat what the agent may have missed, and answer what it brings."""
    if job.phase in DUMPING:
        job.unanswered = []  # nobody is replaced any more
        return [] if has_lost_writer(job) else job.repeat_order(event.node_rank)
    is_missed = _may_have_missed(job, event, missed)
    commands = job.repeat_order(event.node_rank) if is_missed else []
    job.is_recovery_needed |= job.phase in TRAINING and division(job) is not None
    if job.phase is JobPhase.PAUSING:
        commands += [orders.replacement(job, member) for member in missed if member.replaced]
        commands += returning.repeat(job, event.node_rank)
    if job.phase is JobPhase.RELEASED:
        for timed in job.unanswered:
            fail_after_release(job, timed)
        job.unanswered = []
    return commands


def _may_have_missed(job: JobState, event: ev.AgentRegistered, missed: list[Member]) -> bool:
    """Whether the last order concerns workers of this agent that have not obeyed it."""
    if job.phase in (JobPhase.PAUSING, JobPhase.RELEASED):
        return True
    if isinstance(job.last_order, do.RestartGroup):
        return bool(missed)
    waiting = [report.rank for report in event.workers if report.state == WorkerState.PAUSED]
    goes_on = any(job.members[rank].state is WorkerState.RUNNING for rank in waiting)
    return isinstance(job.last_order, do.Resume) and goes_on


def _is_needed(job: JobState, member: Member) -> bool:
    """Whether the others cannot go on without it: in a recovery all ranks meet again.

    A node that could not reach the manager releases its ranks when their functions have returned,
    and does not hear that they were wanted back.
    """
    if job.phase is JobPhase.PAUSING:
        return member.entered or member.replaced
    return job.phase is JobPhase.RESTARTING and member.state is WorkerState.STARTING


# ---------------------------------------------------------------------- peer nodes


def ask_for_peer(job: JobState, event: ev.AgentMirrors) -> Commands:
    """A node wants its snapshots mirrored; or has come back and may have missed its peer.

    Pairs are made when every node has asked: else each that comes would move the mirrors of others.
    """
    requests, membership = job.peers, job.membership
    requests.asked[event.node_rank] = event
    requests.told.pop(event.node_rank, None)
    is_ending = job.phase in DUMPING or job.phase is JobPhase.ENDING
    if is_ending or len(requests.asked) != membership.joined_node_count:
        return []
    pairs = peers_of({node_rank: asked.host for node_rank, asked in requests.asked.items()})
    if not pairs:
        was_reported, requests.is_reported = requests.is_reported, True
        return [] if was_reported else [do.ReportNoBuddy(job.cause, job.generation, event.host)]
    commands: Commands = []
    incarnations = {rank: node.agent_incarnation for rank, node in membership.nodes.items()}
    served = served_by(pairs)
    for node_rank, peer in sorted(pairs.items()):
        sources = tuple((other, incarnations[other]) for other in served.get(node_rank, ()))
        told = (peer, requests.asked[peer].address, incarnations[peer], sources)
        if requests.told.get(node_rank) != told:
            requests.told[node_rank] = told
            commands.append(do.Pair(job.cause, job.generation, node_rank, *told))
    return commands


def note_mirrors(job: JobState, event: ev.MirrorsHeld) -> Commands:
    """What a node has of another one's snapshots."""
    job.membership.note_mirrors(event.node_rank, event.held)
    return []
