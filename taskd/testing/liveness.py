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
    if _has_deadline(manager):
        return True
    return any(is_awaited_of(agent, manager) for agent in agents)


def _has_deadline(manager: SimulatedManager | None) -> bool:
    if manager is None or not manager.is_alive:
        return False
    return manager.machine.next_deadline(with_leases=False) is not None


def is_awaited_of(agent: SimulatedAgent, manager: SimulatedManager | None) -> bool:
    """Whether something of this agent is still to come, the end of its lease included."""
    if agent.is_alive:
        return agent.machine.next_deadline() is not None or agent.has_news(manager)
    if manager is None or not manager.is_alive:
        return False
    return manager.machine.is_present(agent.node_rank)


class Onlooker:
    """Asks whether a job is stuck, again and again, also of a job of thousands of agents.

    Whoever was the one of whom something was still to come is asked first, the next time.
    """

    def __init__(self) -> None:
        self._witness: SimulatedAgent | None = None

    def is_awaited(self, manager: SimulatedManager | None, agents: list[SimulatedAgent]) -> bool:
        """As `is_awaited`."""
        if _has_deadline(manager):
            return True
        known = self._witness
        is_there = known is not None and known is agents[known.node_rank]
        if known is not None and is_there and is_awaited_of(known, manager):
            return True
        self._witness = next((agent for agent in agents if is_awaited_of(agent, manager)), None)
        return self._witness is not None


def why_stuck(
    manager: SimulatedManager | None,
    agents: Iterable[SimulatedAgent],
    workers: Mapping[int, SimulatedWorker],
) -> str | None:
    """Who waits, and for what nobody will say, or None.

    Ask only when nothing but heartbeats is on its way.
    """
    agents = list(agents)
    if is_awaited(manager, agents) or not any(agent.is_alive for agent in agents):
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
