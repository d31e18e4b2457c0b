"""Nodes that the job goes on without, and how they come back.

Owns strategy `elastic-training`. Ranks keep their numbers in here, in all messages and in all
records: those of the job. The ranks of which the world consists go out with `Resume`, and a worker
takes its place among them as its rank. Whole nodes leave, never single ranks.

    lost      absence.py: everybody waits at the gate, for as long as `recover` allows
    left out  the others go on from their newest version, as a smaller world
    back      an agent has registered in its place: everybody leaves the step; its ranks are
              started, and receive the state from others

The i-th rank of a smaller world does what rank i did in the whole one. With sharded state it must
therefore hold the same shard, and all shards must be there: HSDP can do without whole replicas,
FSDP without nobody. Snapshots count for nothing here: they are named by ranks of their world.

A node whose ranks fail while they come back is left out again, without harm to the others; after
`MAX_FAILED_RETURNS` of these nobody gets its place any more.
"""

from collections.abc import Sequence

from taskd.core import commands as do
from taskd.core import events as ev
from taskd.core.faults import FaultKind, TimedFault, describe
from taskd.core.job import orders
from taskd.core.job.membership import LOST_NODE, Membership
from taskd.core.job.record import Attempt
from taskd.core.job.state import JobState
from taskd.core.phase import TRAINING, JobPhase
from taskd.core.policy.ladder import Choice, Strategy
from taskd.core.transitions import Commands

MAX_FAILED_RETURNS = 2  # one may be bad luck; each stops all others for as long as a start takes

_MAY_COME_BACK = TRAINING - {JobPhase.RESTARTING}
_SHOWN_RANKS = 16


def is_allowed(job: JobState) -> bool:
    """Whether this job may go on without a lost node."""
    return Strategy.ELASTIC in job.allowed


# ---------------------------------------------------------------------- without a node


def problem(job: JobState, nodes: Sequence[int]) -> str | None:
    """Why the job cannot go on without these nodes, or None."""
    membership = job.membership
    gone = {member.rank for node_rank in nodes for member in membership.on_node(node_rank)}
    left = [rank for rank in sorted(membership.members) if rank not in gone]
    if not left:
        return "no node is left"
    if Strategy.RECOVER in job.allowed and 2 * membership.present_count < (
        membership.joined_node_count or 0
    ):
        return "more than half of the nodes are out of reach, and may go on without this manager"
    return _unfit(membership, left)


def _unfit(membership: Membership, left: Sequence[int]) -> str | None:
    """Why these ranks cannot do what the first ones of the whole world did."""
    shard_of = {
        member.rank: member.shard
        for member in (*membership.members.values(), *membership.away.values())
    }
    missing = sorted(set(shard_of.values()) - {shard_of[rank] for rank in left})
    if missing:
        return f"the state is sharded, and nobody else has shard {missing[0]}"
    for number, rank in enumerate(left):
        if shard_of.get(number, shard_of[rank]) != shard_of[rank]:
            return (
                f"the state is sharded, and rank {rank} would be rank {number} of the smaller "
                f"world with shard {shard_of[rank]} in place of {shard_of[number]}"
            )
    return None


def go_on_without(job: JobState, nodes: Sequence[int]) -> Commands:
    """Leave these nodes out. Everybody else waits at the gate already, or is on the way there."""
    membership = job.membership
    for node_rank in nodes:
        job.absent.discard(node_rank)
        if not set(membership.nodes[node_rank].ranks).isdisjoint(job.growing):
            job.failed_returns[node_rank] = job.failed_returns.get(node_rank, 0) + 1
        membership.leave_out(node_rank)
    job.growing &= membership.members.keys()
    names = ", ".join(map(str, nodes))
    whose = f"node {names} is" if len(nodes) == 1 else f"nodes {names} are"
    reason = f"{whose} lost: the job goes on without {'it' if len(nodes) == 1 else 'them'}"
    if job.attempt is not None:
        job.attempt.strategy, job.attempt.reason = Strategy.ELASTIC, reason
        job.attempt.broken &= membership.members.keys()
        job.attempt.doubtful &= membership.members.keys()
    job.story.note(job.now, f"strategy {Strategy.ELASTIC.value}: {reason}")
    return []


def without_returns(job: JobState, faults: list[TimedFault]) -> list[TimedFault]:
    """The faults that are not of ranks which come back. The nodes of those are left out again."""
    counted = []
    for timed in faults:
        rank = timed.fault.rank
        if timed.fault.kind is FaultKind.NODE_LOST or rank not in job.growing:
            counted.append(timed)
        elif rank in job.members:  # else another rank of its node has failed
            _fail_return(job, rank, describe(timed.fault))
    return [timed for timed in counted if timed.fault.rank in job.members]


def _fail_return(job: JobState, rank: int, how: str) -> None:
    node_rank = job.members[rank].node_rank
    membership = job.membership
    for member in membership.on_node(node_rank):
        member.lose()
        job.awaited.discard(member.rank)
    job.leases.drop(node_rank)
    membership.leave(node_rank, LOST_NODE)
    job.story.note(job.now, f"node {node_rank} is left out again: {how}", rank)
    go_on_without(job, [node_rank])


# ---------------------------------------------------------------------- and with it again


def is_back(job: JobState, event: ev.AgentRegistered) -> bool:
    """Whether this agent is in the place of a node that the job goes on without."""
    return job.phase is not JobPhase.JOINING and job.membership.is_left_out(event.node_rank)


def free_places(job: JobState) -> list[int]:
    """Nodes that are left out, and whose place may be taken now."""
    if not is_allowed(job) or job.phase not in _MAY_COME_BACK or job.dump is not None:
        return []
    return [node for node in job.membership.left_out if not _is_barred(job, node)]


def refusal(job: JobState, event: ev.AgentRegistered) -> str | None:
    """Why a node that is left out may not come back, or None."""
    if not is_back(job, event):
        return None
    node_rank = event.node_rank
    if job.phase not in _MAY_COME_BACK or job.dump is not None:
        return f"the job goes on without node {node_rank}, and is ending"
    if _is_barred(job, node_rank):
        return f"node {node_rank} has failed {MAX_FAILED_RETURNS} times while it came back"
    if any(member.shard for member in job.members.values()) and not all(
        report.rank in job.membership.away for report in event.workers
    ):
        return (
            f"the state is sharded, and this manager, which was started again, does not know which "
            f"shards node {node_rank} had"
        )
    return None


def _is_barred(job: JobState, node_rank: int) -> bool:
    return job.failed_returns.get(node_rank, 0) >= MAX_FAILED_RETURNS


def come_back(job: JobState, event: ev.AgentRegistered) -> Commands:
    """Its ranks are to be started, and all meet again."""
    membership = job.membership
    membership.take_back(event)
    members = membership.on_node(event.node_rank)
    job.growing |= {member.rank for member in members}
    if job.phase is not JobPhase.PAUSING:
        job.is_recovery_needed = True
        return []
    commands = job.repeat_order(event.node_rank)
    return [*commands, *(orders.replace(job, member) for member in members)]


def planned(job: JobState, attempt: Attempt) -> Choice | None:
    """The strategy of a recovery that is needed because nodes are back, and for nothing else.

    None: it has another reason.
    """
    nodes = sorted({job.members[rank].node_rank for rank in job.growing})
    if not nodes:  # those that were have failed meanwhile
        is_so = attempt.strategy is Strategy.ELASTIC
        return Choice(Strategy.ELASTIC, attempt.reason) if is_so else None
    names = ", ".join(map(str, nodes))
    whose = f"node {names} is" if len(nodes) == 1 else f"nodes {names} are"
    return Choice(Strategy.ELASTIC, f"{whose} back")


def note_world(job: JobState) -> Commands:
    """All go on: say so, if the world is another one than before."""
    active = job.membership.active
    before, job.told_active = job.told_active, active
    job.growing = set()
    if active == before:
        return []
    membership = job.membership
    whole = membership.joined_node_count
    if not active:
        text = f"the world is whole again: all {whole} nodes, {len(membership.members)} ranks"
    else:
        nodes = len({member.node_rank for member in membership.members.values()})
        ranks = ", ".join(map(str, active[:_SHOWN_RANKS]))
        more = f" and {len(active) - _SHOWN_RANKS} more" if len(active) > _SHOWN_RANKS else ""
        text = f"the job goes on with {nodes} of {whole} nodes (ranks {ranks}{more})"
    is_smaller = bool(active) and (not before or len(active) < len(before))
    return [do.ReportWorld(job.cause, job.generation, text, is_smaller)]
