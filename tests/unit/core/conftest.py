"""Drivers for the two machines.

Events with time and cause filled in, short names for what tests say often.
"""

from typing import Any

import pytest

from taskd.core import commands as do
from taskd.core import events as ev
from taskd.core.faults import Fault, FaultKind
from taskd.core.job.machine import RecoveryMachine
from taskd.core.node import NodeMachine
from taskd.core.timeouts import Timeouts


def fault(
    kind: FaultKind = FaultKind.LOST,
    rank: int = 0,
    incarnation: int = 0,
    detail: str = "",
    **more: Any,
) -> Fault:
    return Fault(kind, rank, incarnation, detail, signature=more.pop("signature", detail), **more)


def repeated(event: ev.Event, command: do.Command) -> do.Command:
    """An order that is repeated stands for itself: whoever registers hears it, and nobody else."""
    if not isinstance(command, do.RepeatOrder):
        return command
    assert isinstance(event, ev.AgentRegistered)
    assert command.node_rank == event.node_rank
    return command.order


class ManagerDriver:
    """A RecoveryMachine with `nodes` times `per_node` ranks.

    Each call takes 0.01 s unless `at` is given.
    """

    def __init__(
        self,
        nodes: int = 1,
        per_node: int = 4,
        *,
        max_restarts: int = 100,
        timeout: float = 30.0,
        strategies: str = "",
        **options: bool,
    ) -> None:
        self.timeouts = Timeouts.derive(timeout)
        names = strategies.split(",") if strategies else ()
        self.machine = RecoveryMachine("job", self.timeouts, strategies=names, **options)
        self.nodes, self.per_node, self.max_restarts = nodes, per_node, max_restarts
        self.now = 100.0
        self.count = 0

    @property
    def ranks(self) -> range:
        return range(self.nodes * self.per_node)

    def incarnation(self, rank: int) -> int:
        return self.machine.membership.members[rank].incarnation

    def send(
        self, kind: type[ev.Event], *details: Any, at: float | None = None, **more: Any
    ) -> list[do.Command]:
        self.now = self.now + 0.01 if at is None else at
        self.count += 1
        event = kind(self.now, f"e{self.count}", *details, **more)
        commands = self.machine.handle(event)
        self.machine.check()
        return [repeated(event, command) for command in commands]

    def worker(
        self,
        kind: type[ev.WorkerEvent],
        rank: int,
        *details: Any,
        incarnation: int | None = None,
        at: float | None = None,
        **more: Any,
    ) -> list[do.Command]:
        life = self.incarnation(rank) if incarnation is None else incarnation
        return self.send(kind, rank, life, *details, at=at, **more)

    def register(
        self,
        node: int = 0,
        *reports: ev.WorkerReport,
        agent: str | None = None,
        generation: int = 0,
        used: int = 0,
        max_restarts: int | None = None,
        **more: Any,
    ) -> list[do.Command]:
        first = node * self.per_node
        reports = reports or tuple(
            ev.WorkerReport(rank, 0, "running") for rank in range(first, first + self.per_node)
        )
        return self.send(
            ev.AgentRegistered,
            node,
            agent or f"agent{node}",
            more.get("node_count", self.nodes),
            more.get("world_size", len(self.ranks)),
            self.max_restarts if max_restarts is None else max_restarts,
            generation,
            used,
            reports,
            start=more.get("start"),
        )

    def joined(self, *, declared: bool = True) -> "ManagerDriver":
        for node in range(self.nodes):
            assert self.register(node) == []
        for rank in self.ranks if declared else ():
            assert self.worker(ev.WorkerDeclared, rank, True) == []
        return self

    def lose(
        self,
        rank: int,
        kind: FaultKind = FaultKind.LOST,
        detail: str = "",
        *,
        version: int | None = 5,
        age: float = 0.001,
        box: tuple[int, ...] = (),
        **more: Any,
    ) -> list[do.Command]:
        life = self.incarnation(rank)
        what = fault(kind, rank, life, detail, version=version)
        return self.worker(ev.WorkerLost, rank, what, age, box, **more)

    def raise_(
        self,
        rank: int,
        text: str = "ValueError: x",
        *,
        kind: FaultKind = FaultKind.RAISED,
        version: int | None = 5,
        clean: bool = True,
        generation: int | None = None,
        age: float = 0.0,
        **more: Any,
    ) -> list[do.Command]:
        what = fault(
            kind, rank, self.incarnation(rank), text, version=version, traceback="Traceback"
        )
        known = self.machine.generation if generation is None else generation
        return self.worker(ev.WorkerRaised, rank, known, what, clean, age, **more)

    def pause(
        self,
        rank: int,
        version: int | None = 5,
        *,
        clean: bool = True,
        generation: int | None = None,
        **more: Any,
    ) -> list[do.Command]:
        known = self.machine.generation if generation is None else generation
        return self.worker(ev.WorkerPaused, rank, known, version, clean, **more)

    def recover(
        self, rank: int, version: int = 6, took: float = 0.1, **more: Any
    ) -> list[do.Command]:
        generation = more.pop("generation", self.machine.generation)
        return self.worker(
            ev.WorkerRecovered, rank, generation, version, took, took / 2, took / 4, **more
        )

    def return_(self, rank: int, version: int | None = 10, **more: Any) -> list[do.Command]:
        generation = more.pop("generation", self.machine.generation)
        return self.worker(ev.WorkerReturned, rank, generation, version, **more)

    def tick(self, at: float | None = None) -> list[do.Command]:
        deadline = self.machine.next_deadline()
        assert deadline is not None
        return self.send(ev.Tick, at=deadline if at is None else at)

    def hear_all_until(self, moment: float) -> None:
        """Heartbeats, so that leases last."""
        for node in range(self.nodes):
            self.send(ev.AgentHeard, node, at=moment)

    def pause_all(self, version: int = 5) -> list[do.Command]:
        """Everybody who is awaited comes; replaced ranks come with nothing."""
        commands: list[do.Command] = []
        for rank in self.ranks:
            member = self.machine.membership.members[rank]
            if (
                self.machine.phase.value == "pausing"
                and member.is_live
                and member.state.value != "paused"
            ):
                commands += self.pause(rank, None if member.replaced else version)
        return commands

    def recover_all(self, version: int = 6) -> list[do.Command]:
        return [command for rank in self.ranks for command in self.recover(rank, version)]


class NodeDriver:
    """A NodeMachine for ranks 0..n-1 of node 0, with a manager unless said otherwise."""

    def __init__(
        self,
        ranks: int = 2,
        *,
        manager: bool = True,
        declared: bool = True,
        started: bool = True,
        **arguments: Any,
    ) -> None:
        self.timeouts = Timeouts.derive(30.0)
        self.machine = NodeMachine(
            0, range(ranks), self.timeouts, agent_incarnation="me", **arguments
        )
        self.now = 100.0
        if manager:
            assert self.send(ev.ManagerJoined, 0, 0) == []
        for rank in range(ranks) if started else ():
            self.worker(ev.WorkerStarted, rank, 1000 + rank)
            if declared:
                self.worker(ev.WorkerDeclared, rank, True)

    def send(
        self, kind: type[ev.Event], *details: Any, at: float | None = None
    ) -> list[do.Command]:
        self.now = self.now + 0.01 if at is None else at
        commands = self.machine.handle(kind(self.now, "cause", *details))
        self.machine.check()
        return commands

    def worker(
        self,
        kind: type[ev.WorkerEvent],
        rank: int,
        *details: Any,
        incarnation: int | None = None,
        at: float | None = None,
    ) -> list[do.Command]:
        life = self.machine.lives.present[rank].incarnation if incarnation is None else incarnation
        return self.send(kind, rank, life, *details, at=at)

    def alarm(
        self, rank: int, phase: str = "step", version: int | None = 5, **more: Any
    ) -> list[do.Command]:
        return self.worker(ev.AlarmRang, rank, self.now, version, phase, (5,), **more)

    def exit(
        self,
        rank: int,
        status: int = -9,
        phase: str = "step",
        version: int | None = 5,
        words: Fault | None = None,
        **more: Any,
    ) -> list[do.Command]:
        return self.worker(ev.WorkerExited, rank, status, version, phase, (5,), words, **more)

    def command(self, kind: type[do.Command], generation: int, *details: Any) -> list[do.Command]:
        return self.send(ev.CommandReceived, kind("c", generation, *details))

    def replace(self, rank: int, incarnation: int = 1, generation: int = 1) -> list[do.Command]:
        return self.command(do.ReplaceWorker, generation, 0, rank, incarnation, 1)

    def tick(self, at: float | None = None) -> list[do.Command]:
        deadline = self.machine.next_deadline()
        assert deadline is not None
        return self.send(ev.Tick, at=deadline if at is None else at)


@pytest.fixture(name="make_fault")
def make_fault_fixture() -> Any:
    return fault


@pytest.fixture
def manager() -> type[ManagerDriver]:
    return ManagerDriver


@pytest.fixture
def node() -> type[NodeDriver]:
    return NodeDriver
