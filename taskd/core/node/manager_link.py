"""The manager as one node sees it: there, away or refusing; and what to do without one.

A fault that nobody answers for too long (`taskd.core.policy.patience`) ends in `FallBack`: plain
torchrun behaviour. Not where this node was in the job, and another agent has its place now (it was
cut off, and a spare came): its workers may wait for ever for others that have gone on without them,
and would be started again to meet others that never come. It ends at once.
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
    return []


def manager_refused(node: NodeState, event: ev.ManagerRefused) -> Commands:
    """The manager will never answer this node."""
    node.manager = ManagerLink.REFUSED
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
    return patience.patience_ends_at(node.manager, node.manager_lost_at, since, node.timeouts)


def go_alone(node: NodeState) -> Commands:
    """Nobody answers: workers that have returned are released, a fault is left to torchrun."""
    blocked = node.lives.blocked()
    if not blocked:
        return release(node, do.Release(node.cause, node.generation))
    node.phase = NodePhase.DONE
    what = "; ".join(map(describe, node.lives.faults())) or f"rank {blocked[0].rank} waits"
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
