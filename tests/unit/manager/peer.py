"""Who speaks to the manager under test, and short names for what it says."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from taskd.core import events
from taskd.core.faults import Fault, FaultKind
from taskd.transport.memory import MemoryDealer, MemoryNetwork
from taskd.wire import codec, messages, translate

if TYPE_CHECKING:
    from taskd.manager.service import Service
    from taskd.testing.clock import FakeClock


class Peer:
    """Something that connects and says what it is told to say."""

    def __init__(
        self,
        network: MemoryNetwork,
        *,
        role: str = "agent",
        node_rank: int | None = 0,
        rank: int | None = None,
        job_id: str = "job",
        incarnation: str = "a0",
        name: str | bytes | None = None,
    ) -> None:
        self.dealer = MemoryDealer(
            network, "manager", name or f"{role}-{node_rank}-{rank}-{incarnation}"
        )
        self.envelope = codec.Envelope(job_id, role, node_rank, rank, incarnation, 0, 0, "test")

    def say(self, message: messages.Message, **changes: object) -> None:
        self.envelope = dataclasses.replace(
            self.envelope, **{"sequence": self.envelope.sequence + 1, **changes}
        )
        self.dealer.send(None, codec.encode(self.envelope, message))

    def report(self, event_class: type, *values: object, **changes: object) -> None:
        self.say(translate.event_to_message(event_class(0.0, "test", *values)), **changes)

    def register(
        self, ranks: range = range(2), *, nodes: int = 1, world: int = 2, **changes: object
    ) -> None:
        workers = tuple(events.WorkerReport(rank, 0, "running") for rank in ranks)
        node_rank, incarnation = self.envelope.node_rank, self.envelope.incarnation
        self.report(
            events.AgentRegistered,
            node_rank,
            incarnation,
            nodes,
            world,
            3,
            0,
            0,
            workers,
            **changes,
        )

    def heard(self) -> list[messages.Message]:
        return [codec.decode(data)[1] for _, data in self.dealer.receive()]


def lost(rank: int, incarnation: int = 0) -> tuple:
    return (
        rank,
        incarnation,
        Fault(FaultKind.KILLED, rank, incarnation, "SIGKILL", signature="SIGKILL", exit_code=-9),
        0.25,
    )


def types(heard: list[messages.Message]) -> list[type]:
    return [type(message) for message in heard]


def recover(service: Service, agent: Peer, clock: FakeClock, fault: Fault | None = None) -> None:
    """Rank 1 of two declared ones dies and comes back."""
    for rank in range(2):
        agent.report(events.WorkerDeclared, rank, 0)
    agent.report(events.WorkerLost, 1, 0, fault or lost(1)[2], 0.25)
    service.turn()
    assert set(types(agent.heard())) == {messages.Interrupt, messages.ReplaceWorker}
    clock.advance(0.1)
    agent.report(events.WorkerPaused, 0, 0, 1, 7, True, "")
    agent.report(events.WorkerStarted, 1, 1, 4711)
    agent.report(events.WorkerPaused, 1, 1, 1, None, True, "")
    service.turn()
    (resume,) = agent.heard()
    assert (resume.version, resume.generation) == (7, 1)
    clock.advance(0.2)
    for rank, incarnation in ((0, 0), (1, 1)):
        agent.report(events.WorkerRecovered, rank, incarnation, 1, 8, 0.05, 0.04, 0.03, "")
    service.turn()
