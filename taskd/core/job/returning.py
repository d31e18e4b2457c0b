"""Snapshots come back from their mirrors, when a lost node has been replaced.

A node that is lost takes along what its ranks alone had, but for mirrors that its peer node keeps
(`TrainState(snapshot_buddy=True)`). Owns how these come back to the agent in its place:

    manager    all ranks have stopped, and no version is whole without mirrors
                 == ReturnMirrors ==> the agent in the place of the lost node, and its peer's
    agents     the one asks, the other sends (`taskd.agent.mirrors`)
                 == MirrorsReturned ==> manager
    manager    the ranks of that node have snapshots again: all go back to their version

If something of it fails, or takes too long, the job goes on without them: it is saved by a dump, or
all processes are replaced. A node that is lost meanwhile ends it, and it begins again when that
node has been replaced.

Nothing has to come back to an agent on the same host that has what the lost one left in node memory
(`Node.former_agent`): its ranks say themselves which snapshots they have. Where these are not
enough, mirrors are asked for what is missing.
"""

from collections.abc import Iterable
from dataclasses import replace

from taskd.core import commands as do
from taskd.core import events as ev
from taskd.core.job.record import Attempt
from taskd.core.job.state import JobState, Returning
from taskd.core.policy.cut import Copy, Cut, plan_cut
from taskd.core.transitions import Commands


def is_under_way(job: JobState) -> bool:
    """Whether snapshots are on their way."""
    return job.returning is not None and bool(job.returning.pending)


def bring_back(job: JobState) -> Commands:
    """Ask for what mirrors have, if a version is whole with them; []: it is not, or was tried."""
    if job.returning is not None or job.membership.active != job.told_active:
        return []
    held = job.membership.copies(job.membership.live(), with_mirrors=True)
    copies = {copy.rank: _with_more(job, copy) for copy in held}
    cut = plan_cut(copies.values(), job.membership.committed)
    if not isinstance(cut, Cut) or cut.version is None:
        return []
    wanted: dict[tuple[int, int], list[int]] = {}  # owner and holder -> ranks
    for move in cut.moves:
        copy = copies[move.rank]
        member = job.members[move.rank]
        if move.snapshot not in (None, *member.snapshots) and not copy.alive:  # but `copy.node` has
            owner = member.node_rank
            wanted.setdefault((owner, copy.node), []).append(move.rank)
    if not wanted or any(holder not in job.peers.asked for _, holder in wanted):
        return []  # nothing would be won, or nobody knows where to ask
    job.returning = Returning(cut.version, job.now + job.timeouts.dump_s)
    for (owner, holder), ranks in sorted(wanted.items()):
        job.returning.pending[owner, holder] = _order(job, cut.version, owner, holder, ranks)
        names = ", ".join(map(str, ranks))
        what = f"version {cut.version} of ranks {names} comes back from its mirror on node {holder}"
        job.story.note(job.now, what)
    return [one for order in job.returning.pending.values() for one in _to_both(order)]


def _with_more(job: JobState, copy: Copy) -> Copy:
    """What a rank could have that has something of its own again, and not enough."""
    if not (copy.alive and copy.replaced and copy.version is None and copy.snapshots):
        return copy
    mirrored = job.membership.copy_of_mirrors(copy)
    return mirrored._replace(snapshots=tuple({*copy.snapshots, *mirrored.snapshots}))


def note_kept(job: JobState, attempt: Attempt, moves: Iterable[do.Move]) -> None:
    """All go on: say whose snapshots the memory of a node has kept, although its agent was lost."""
    ranks: dict[int, list[int]] = {}  # by node
    came_back = set() if job.returning is None else job.returning.came_back
    loading = (move.rank for move in moves if move.snapshot is not None)
    for rank in loading:
        node = job.membership.nodes[job.members[rank].node_rank]
        if node.former_agent and rank not in came_back:
            ranks.setdefault(node.node_rank, []).append(rank)
    for node_rank, kept in sorted(ranks.items()):
        whose = f"rank{'s' if kept[1:] else ''} {', '.join(map(str, kept))}"
        attempt.reason += f"; snapshots of {whose} were left in the memory of node {node_rank}"


def _order(
    job: JobState, version: int, owner: int, holder: int, ranks: list[int]
) -> do.ReturnMirrors:
    """What the owner is told."""
    nodes, address = job.membership.nodes, job.peers.asked[holder].address
    return do.ReturnMirrors(
        job.cause, job.generation, owner, owner, nodes[owner].agent_incarnation,
        holder, address, nodes[holder].agent_incarnation, version, tuple(ranks),
    )  # fmt: skip


def _to_both(order: do.ReturnMirrors) -> list[do.ReturnMirrors]:
    """The holder first: it is asked soon."""
    return [replace(order, node_rank=order.holder), order]


def repeat(job: JobState, node_rank: int) -> Commands:
    """What an agent that was out of reach may have missed."""
    if job.returning is None:
        return []
    return [
        order
        for pair, known in job.returning.pending.items()
        if node_rank in pair
        for order in _to_both(known)
        if order.node_rank == node_rank
    ]


def returned(job: JobState, event: ev.MirrorsReturned) -> Commands:
    """A node has the snapshots of its ranks again, or says why not."""
    known, pair = job.returning, (event.node_rank, event.holder)
    if known is None or event.generation != job.generation or pair not in known.pending:
        return job.ignore(f"node {event.node_rank} was not asked for mirrors, or is not any more")
    order = known.pending.pop(pair)
    for rank in set(event.ranks) & set(order.ranks):
        member = job.members[rank]
        member.snapshots = tuple(sorted({*member.snapshots, event.version}))
        known.came_back.add(rank)
    missing = sorted(set(order.ranks) - set(event.ranks))
    assert job.attempt is not None
    if not missing:
        names = ", ".join(map(str, order.ranks))
        from_there = f"version {order.version} of ranks {names} came back from node {event.holder}"
        job.attempt.reason += f"; {from_there}, which mirrored it"
    else:
        known.problem = (
            f"the mirror of rank {missing[0]} has not come back from node {event.holder}: "
            f"{event.reason}"
        )
        job.story.note(job.now, known.problem)
    return []


def overdue(job: JobState) -> Commands:
    """They have taken too long."""
    assert job.returning is not None
    (owner, holder), *_ = job.returning.pending
    job.returning.problem = (
        f"the mirrors of node {owner} have not come back from node {holder} within "
        f"{job.timeouts.dump_s:g} s"
    )
    job.returning.pending.clear()
    return []


def forget(job: JobState, node_rank: int) -> None:
    """A node is lost: what was to come from there, or to go there, is planned anew."""
    if job.returning is not None and any(node_rank in pair for pair in job.returning.pending):
        job.returning = None


def end(job: JobState) -> None:
    """All go on: what comes back, or was left by lost agents, is older than what ranks have."""
    job.returning = None
    for node in job.membership.nodes.values():
        node.former_agent = ""


def problem(job: JobState) -> str:
    """What to add to the reason why nobody can go on in place; "": all that was asked is back."""
    known = job.returning
    return "" if known is None or not known.problem else f"; {known.problem}"
