"""What workers say of themselves: kept with their life, and passed on to the manager.

Owns which report comes too late, from a life or a generation that is over.
"""

from taskd.core import commands as do
from taskd.core import events as ev
from taskd.core.node.lives import StopReport
from taskd.core.node.state import NodeState
from taskd.core.transitions import Commands

_LATE = "said by an earlier life, or before it was resumed"


def declares(node: NodeState, event: ev.WorkerDeclared) -> Commands:
    """It uses `taskd.recoverable`, or has come to its function."""
    life = node.lives.of(event)
    if life is None:
        return node.ignore("said by an earlier life", event.rank)
    life.is_declared, life.is_entered = True, life.is_entered or event.entered
    return node.tell(event)


def stops(node: NodeState, event: StopReport | ev.WorkerMayAdvance) -> Commands:
    """It left its function and waits at the gate, or asks in it how far to go."""
    life = node.lives.of(event)
    is_answer = isinstance(event, ev.WorkerPaused | ev.WorkerMayAdvance)
    if life is None or not life.is_live or event.generation < life.resumed + is_answer:
        return node.ignore(_LATE, event.rank)
    life.stop(event, node.now)
    return node.tell(event)


def holds(node: NodeState, event: ev.WorkerHolds) -> Commands:
    """Which part of the state it has. Its successor has the same."""
    life = node.lives.of(event)
    if life is not None:
        life.holds = event
    return node.tell(event)


def drains(node: NodeState, event: ev.WorkerDraining) -> Commands:
    """It got SIGTERM. One that we are ending got ours."""
    life = node.lives.of(event)
    if life is None or not life.is_live:
        return node.ignore("it is being ended", event.rank)
    return [do.Drain(node.cause, node.generation, f"SIGTERM to rank {event.rank}")]


def recovers(node: NodeState, event: ev.WorkerRecovered) -> Commands:
    """It committed again."""
    life = node.lives.of(event)
    if life is None or event.generation != life.resumed:
        return node.ignore(_LATE, event.rank)
    life.recovered, life.version = event, event.version or life.version
    return node.tell(event)
