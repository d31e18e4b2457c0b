"""The least that must be told of an event that cannot be sent as it is, or that was refused.

So a death is always reported. What is left out is what somebody else wrote (a black box, a peer):
rank, incarnation and kind are the agent's own knowledge.
"""

from dataclasses import replace

from taskd.core import events as ev
from taskd.core.faults import Fault


def reduced(event: ev.Event) -> ev.Event | None:
    """The smallest form of this event. None: it has none, the job goes on without it."""
    match event:
        case ev.WorkerLost():
            return replace(event, fault=_least(event), age_s=0.0, box_versions=(), snapshots=())
        case ev.WorkerExitKnown():
            return replace(event, fault=_least(event))
        case ev.AgentRegistered():
            workers = tuple(
                ev.WorkerReport(
                    one.rank,
                    one.incarnation,
                    one.state,
                    one.declared,
                    clean=one.clean,
                    entered=one.entered,
                )
                for one in event.workers
            )
            return replace(event, workers=workers)
    return None


def _least(event: ev.WorkerLost | ev.WorkerExitKnown) -> Fault:
    """Who, and how. The texts are cut where they are sent."""
    fault = event.fault
    return Fault(fault.kind, event.rank, event.incarnation, fault.detail, signature=fault.signature)
