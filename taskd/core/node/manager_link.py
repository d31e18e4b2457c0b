"""The manager as one node sees it: there, away or refusing; and what to do without one.

A fault that nobody answers for too long (`taskd.core.policy.patience`) ends in `FallBack`: plain
torchrun behaviour. Not where this node was in the job, and another agent has its place now (it was
cut off, and a spare came): its workers may wait for ever for others that have gone on without them,
and would be started again to meet others that never come. It ends at once.

Nor where the node is cut off, and the job replaces nodes: the others have a manager, and wait for
this node or for another one in its place. So it waits for as long as they do, and then ends; if it
is refused meanwhile, at once. It counts as cut off while the host of the manager does not answer.
One that answers that nobody listens there tells that the others have no manager, either, and fall
back as this one does.
"""

from taskd.core import commands as do
from taskd.core import events as ev
from taskd.core.faults import describe
from taskd.core.node.orders import release
from taskd.core.node.state import NodeState, pass_on
from taskd.core.phase import NodePhase
from taskd.core.policy import patience
from taskd.core.policy.patience import ManagerLink
from taskd.core.transitions import Commands
from taskd.core.worker_state import WorkerState


def manager_joined(node: NodeState, event: ev.ManagerJoined) -> Commands:
    """The manager is there: it has our registration, and now hears the details."""
    node.manager, node.substitute_until = ManagerLink.PRESENT, None
    node.has_joined = True
    node.restarts_used = max(node.restarts_used, event.restarts_used)
    return [command for said in node.lives.said(node.now) for command in node.tell(said)]


def manager_lost(node: NodeState, event: ev.ManagerLost) -> Commands:
    """The manager has been silent for too long."""
    node.manager, node.manager_lost_at = ManagerLink.AWAY, event.now + event.grace_s
    node.is_cut_off = node.awaited_s is not None
    node.has_answered = False
    return []


def host_tried(node: NodeState, event: ev.ManagerHostHeard) -> Commands:
    """Whether the host of the manager answers. One that does is given time to have a manager."""
    if node.awaited_s is None or node.manager_lost_at is None:
        return []
    if event.answers and node.is_cut_off and not node.has_answered:
        node.has_answered = True  # a host that flaps is not waited for again and again
        node.manager_lost_at = max(node.manager_lost_at, event.now)
    node.is_cut_off = not event.answers
    return []


def manager_refused(node: NodeState, event: ev.ManagerRefused) -> Commands:
    """The manager will never answer this node."""
    node.manager, node.refusal = ManagerLink.REFUSED, event.reason
    node.story.note(node.now, f"no manager for us: {event.reason}")
    if event.is_taken and node.has_joined:
        node.phase = NodePhase.DONE
        reason = f"{event.reason}: the job goes on without this torchrun, which was cut off"
        faults = tuple(node.lives.faults())
        return [do.FinishRun(node.cause, node.generation, "failed", reason, faults)]
    return [] if node.substitute_until is None else end_substitute(node, event.reason)


def end_substitute(node: NodeState, reason: str) -> Commands:
    """The place that it asks for is not to be had: there is nothing that it could do alone."""
    node.phase = NodePhase.DONE
    return [do.FinishRun(node.cause, node.generation, "failed", reason)]


def is_unwanted(node: NodeState) -> bool:
    """Whether it has asked for a place for long enough."""
    return node.substitute_until is not None and node.substitute_until <= node.now


def give_up_place(node: NodeState) -> Commands:
    """Nobody has given it the place."""
    why = "no manager has given it this place: the job does not run, or the node is there still"
    return end_substitute(node, why)


def patience_ends_at(node: NodeState) -> float | None:
    """When this node stops to wait for a manager; None: it needs none, or has one."""
    if node.phase is not NodePhase.RUNNING:
        return None
    since = node.lives.waiting_since(is_released=node.is_released)
    if since is None:
        return None
    lost_at = node.manager_lost_at
    alone_at = patience.patience_ends_at(node.manager, lost_at, since, node.timeouts)
    is_cut_off = node.manager is ManagerLink.AWAY and _left_behind(node) is not None
    if alone_at is None or lost_at is None or node.awaited_s is None or not is_cut_off:
        return alone_at
    return max(alone_at, lost_at + node.awaited_s)


def _left_behind(node: NodeState) -> str | None:
    """Why a fault here is none of plain torchrun's: the others have a manager. None: it may be."""
    # Where no rank has declared itself, the others end when they have lost this node.
    is_declared = any(life.is_declared for life in node.lives.present.values())
    if node.awaited_s is None or not is_declared or not node.lives.blocked():
        return None
    if node.manager is ManagerLink.REFUSED and node.has_joined:
        return f"the manager has refused this node ({node.refusal})"
    if node.manager is ManagerLink.AWAY and node.is_cut_off:
        return (
            "this node was cut off from the manager for longer than the others wait for it "
            f"({node.awaited_s:.0f} s)"
        )
    return None


def go_alone(node: NodeState) -> Commands:
    """Nobody answers: workers that have returned are released, a fault is left to torchrun."""
    blocked, left_behind = node.lives.blocked(), _left_behind(node)
    if not blocked:
        return release(node, do.Release(node.cause, node.generation))
    node.phase = NodePhase.DONE
    what = "; ".join(map(describe, node.lives.faults())) or f"rank {blocked[0].rank} waits"
    if left_behind is not None:
        why = (
            f"{what}, and {left_behind}: the others go on without it, or have ended. When the "
            "manager can be reached again, start this torchrun again"
        )
        faults = tuple(node.lives.faults())
        return [do.FinishRun(node.cause, node.generation, "failed", why, faults)]
    reason = f"{what}, and no manager answers"
    # Those who wait would wait for ever: the one that raised raises, the others end, and torchrun
    # sees failures.
    calls = []
    for life in blocked:
        if life.has_process and life.state is WorkerState.PAUSED:
            culprit = life.rank if isinstance(life.stopped, ev.WorkerRaised) else None
            order = do.GiveUp(node.cause, node.generation, reason, culprit)
            calls.append(pass_on(life, order))
    return [*calls, do.FallBack(node.cause, node.generation, reason)]
