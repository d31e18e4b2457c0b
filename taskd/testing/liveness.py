"""Whether a simulated job can still come to its end by itself: the promise that it is never stuck.

In a moment in which nothing is on its way but heartbeats, and no process is doing anything,
everybody waits for somebody. Then one of these must hold, or they wait for ever:

- a machine has set a deadline (a lease that heartbeats renew is none);
- a node is about to register, or a message was lost and the next heartbeats will show that;
- a node is gone, and its lease will end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from taskd.testing.shells import SimulatedAgent, SimulatedManager
    from taskd.testing.worker import SimulatedWorker


class Stuck(AssertionError):  # noqa: N818
    """Ranks wait, and nothing will ever come that ends that."""


def is_awaited(manager: SimulatedManager | None, agents: Iterable[SimulatedAgent]) -> bool:
    """Whether more than heartbeats is still to come, at a moment when nothing is on its way."""
    if any(agent.is_alive and agent.machine.next_deadline() is not None for agent in agents):
        return True
    if any(agent.has_news(manager) for agent in agents):
        return True
    if manager is None or not manager.is_alive:
        return False
    if manager.machine.next_deadline(with_leases=False) is not None:
        return True
    nodes = manager.machine.membership.nodes
    return any(
        agent.node_rank in nodes and nodes[agent.node_rank].is_present
        for agent in agents
        if not agent.is_alive
    )


def why_stuck(
    manager: SimulatedManager | None,
    agents: Iterable[SimulatedAgent],
    workers: Mapping[int, SimulatedWorker],
) -> str | None:
    """Who waits, and for what nobody will say, or None.

    Ask only when nothing but heartbeats is on its way.
    """
    agents = list(agents)
    waiting = [agent for agent in agents if agent.is_alive]
    if not waiting or is_awaited(manager, agents):
        return None
    lines = [
        f"rank {rank} is in {worker.phase}"
        for rank, worker in sorted(workers.items())
        if worker.is_alive
    ]
    if manager is not None and manager.is_alive:
        lines.append(
            f"the manager is {manager.machine.phase.value} in generation "
            f"{manager.machine.generation}"
        )
    return f"nothing will ever come any more: {'; '.join(lines)}"
