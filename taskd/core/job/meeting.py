"""The store at which the ranks meet in each generation: on which node it is, and where it moves.

The first one is that of node 0, and its address is nobody's business here. Who comes late finds it
through the store of the rendezvous, which may be on another node (c10d); agents tell on which. Each
agent of a job that replaces nodes keeps another store ready, and registers with its address. When a
node is lost whose store is used, the next `Resume` or `RestartGroup` names the store of the first
node that is there, and so do all later ones. Nothing is taken along: keys are prefixed by
generation.

Each start of all processes has a store of its own, too, so all ranks have to belong to the same.
"""

from taskd.core import commands as do
from taskd.core import events as ev
from taskd.core.job.state import JobState
from taskd.core.phase import JobPhase


def note_store(job: JobState, event: ev.AgentRegistered) -> None:
    """What an agent tells. It may know more than a manager that was started again."""
    meeting = job.meeting
    meeting.ready.pop(event.node_rank, None)
    if event.store:
        meeting.ready[event.node_rank] = event.store
    meeting.moved_to = meeting.moved_to or event.met_at
    if event.first_host is not None:
        meeting.first_hosts.add(event.first_host)
    if event.is_late:
        meeting.lost.add(event.node_rank)


def note_start(job: JobState, event: ev.AgentRegistered) -> None:
    """Of which start of all it has heard last. While that is the last order, it is repeated.

    One that came later does not say so: of the starts up to its generation it has heard, or they
    were before its time.
    """
    meeting = job.meeting
    meeting.starts.pop(event.node_rank, None)
    if isinstance(job.last_order, do.RestartGroup):
        return
    if event.start is not None:
        meeting.starts[event.node_rank] = event.start
        meeting.start = max(meeting.start, event.start)
    elif not event.is_substitute:
        meeting.starts[event.node_rank] = event.generation


def division(job: JobState) -> str | None:
    """Why the ranks would meet at the stores of two starts of all; None: they would not.

    A node has missed a `RestartGroup`, and its former processes live. Whoever has started anew
    meanwhile has committed nothing, as that takes all ranks: to start all once more costs no step.
    """
    meeting = job.meeting
    behind = [node_rank for node_rank, start in meeting.starts.items() if start < meeting.start]
    if not behind:
        return None
    return f"node {min(behind)} has missed the restart of all in generation {meeting.start}"


def begin_start(job: JobState) -> None:
    """All are told to start anew in this generation."""
    job.meeting.start = job.generation
    job.meeting.starts.clear()


def leave_node(job: JobState, node_rank: int) -> None:
    """This node is lost."""
    job.meeting.ready.pop(node_rank, None)
    job.meeting.starts.pop(node_rank, None)
    job.meeting.lost.add(node_rank)


def may_leave(job: JobState, node_rank: int) -> bool:
    """Whether the ranks can meet without this node."""
    meeting = job.meeting
    used = {_host_of(job, meeting.moved_to)} if meeting.moved_to else meeting.first_hosts
    return node_rank not in used or _first_host(job, without=node_rank) is not None


def is_late(job: JobState, node_rank: int | None) -> bool:
    """Whether the job runs, and a torchrun with this index cannot meet the others as usual.

    Agents register when all nodes have met: who asks after that is late; and an elected manager
    knows of them before they register. With an index it still meets the others at the store of node
    0, while that is there, and is no stranger there.
    """
    meeting, nodes = job.meeting, job.membership.nodes
    is_there = all(rank in nodes and nodes[rank].is_present for rank in meeting.first_hosts)
    meets_as_usual = node_rank not in (None, 0) and is_there and not meeting.moved_to
    return bool(nodes or job.expected) and not meets_as_usual


def is_sure(job: JobState, node_rank: int | None) -> bool:
    """Whether the answer of `is_late` stays, whoever else registers.

    A manager that was started again knows nothing of a job that runs, until its agents are back.
    """
    nodes = job.membership.nodes
    if job.phase is not JobPhase.JOINING or job.expected:
        return True
    if node_rank in (None, 0) or job.meeting.moved_to:
        return bool(nodes)
    return bool(nodes) and not is_late(job, node_rank)


def place(job: JobState) -> str | None:
    """Where the ranks are to meet, as the orders name it ("": where they met first).

    None: the store that they used is lost, and no node has another.
    """
    meeting = job.meeting
    if meeting.moved_to:
        is_lost = _host_of(job, meeting.moved_to) is None
    else:
        is_lost = not meeting.first_hosts.isdisjoint(meeting.lost)
    if not is_lost:
        return meeting.moved_to
    host = _first_host(job)
    if host is None:
        return None
    meeting.moved_to = meeting.ready[host]
    job.story.note(job.now, f"the ranks meet at the store of node {host} from now on")
    return meeting.moved_to


def _host_of(job: JobState, address: str) -> int | None:
    """The node that is there and has this store."""
    hosts = (rank for rank in _hosts(job) if job.meeting.ready[rank] == address)
    return next(hosts, None)


def _first_host(job: JobState, without: int | None = None) -> int | None:
    return min((rank for rank in _hosts(job) if rank != without), default=None)


def _hosts(job: JobState) -> list[int]:
    nodes = job.membership.nodes
    return [rank for rank in job.meeting.ready if rank in nodes and nodes[rank].is_present]
