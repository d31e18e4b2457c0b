"""The agents and the manager of a small world, the channels between them, and its time."""

from collections.abc import Iterable
from typing import Any

from taskd.core import commands as do
from taskd.core import events as ev
from taskd.core.job.machine import RecoveryMachine
from taskd.core.node import NodeMachine
from taskd.core.phase import JobPhase
from taskd.core.timeouts import Timeouts
from taskd.testing.small.machines import Machines, without_origin
from taskd.testing.small.state import Draft, Scope, Violation, Worker
from taskd.testing.small.workers import Workers

_STOPPED = frozenset({"gone", "paused", "asking", "raised"})


class Nodes:
    """Takes events to the machines, and does what they command."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.timeouts = Timeouts.derive(30.0)
        self.book = Machines()
        self.workers = Workers(scope, self.book.messages, self._hear_worker)

    # ------------------------------------------------------------------ machines

    def new_manager(self) -> int:
        """One that knows nothing."""
        return self.book.add(RecoveryMachine("small", self.timeouts))

    def new_agent(self, node: int) -> int:
        """One that has not registered."""
        machine = NodeMachine(
            node,
            self.ranks_of(node),
            self.timeouts,
            node_count=self.scope.nodes,
            world_size=len(self.workers.ranks),
            agent_incarnation=f"agent {node}",
        )
        return self.book.add(machine)

    def ranks_of(self, node: int) -> range:
        """Its workers."""
        return range(node * self.scope.per_node, (node + 1) * self.scope.per_node)

    def _manager(self, draft: Draft) -> Any:
        return self.book.machine(draft.manager)

    def _tell_manager(self, draft: Draft, event: ev.Event) -> None:
        draft.manager, commands = self.book.handle(draft.manager, event)
        self._do_as_manager(draft, commands)

    def _tell_agent(self, draft: Draft, node: int, event: ev.Event) -> None:
        if node in draft.left:
            return
        draft.agents[node], commands = self.book.handle(draft.agents[node], event)
        for command in commands:
            self._do_on_node(draft, node, command)

    def _hear_worker(self, draft: Draft, event: ev.WorkerEvent) -> None:
        self._tell_agent(draft, event.rank // self.scope.per_node, event)

    # ------------------------------------------------------------------ channels

    def _send(self, draft: Draft, name: str, node: int, message: Any) -> None:
        """Into a channel. `Scope.in_turns`: together with what was sent there in the same turn."""
        queue, number = draft.channel(name, node), self.book.post(message)
        if self.scope.in_turns and queue and (name, node) in draft.sent:
            queue[-1] = (*queue[-1], number)
        else:
            queue.append((number,))
            draft.sent.add((name, node))

    def deliver_down(self, draft: Draft, node: int) -> None:
        """An agent hears what the manager said first."""
        for number in draft.down[node].pop(0):
            self._tell_agent(draft, node, self.book.receive(number, draft.now))

    def deliver_up(self, draft: Draft, node: int) -> None:
        """The manager hears what an agent said first."""
        for number in draft.up[node].pop(0):
            if not draft.ended:
                self._hear(draft, node, self.book.receive(number, draft.now))

    def settle(self, draft: Draft) -> None:
        """Deliver everything that is on its way."""
        for node in range(self.scope.nodes):
            while draft.up[node]:
                self.deliver_up(draft, node)
            while draft.down[node]:
                self.deliver_down(draft, node)

    def cut(self, draft: Draft, node: int) -> None:
        """All that is on its way from and to a node is lost."""
        draft.up[node], draft.down[node] = [], []
        draft.gaps.add(node)

    def restart_manager(self, draft: Draft) -> None:
        """A new one is there at once, and all that was on its way to the old one is lost."""
        draft.manager = self.new_manager()
        for node in range(self.scope.nodes):
            self.cut(draft, node)

    # ------------------------------------------------------------------ agents

    def register(self, draft: Draft, node: int) -> None:
        """The agent says who it is and what it knows."""
        draft.gaps.discard(node)
        agent = self.book.machine(draft.agents[node])
        self._send(draft, "up", node, without_origin(agent.registration(draft.now)))

    def reap(self, draft: Draft, reap: tuple[int, int, int]) -> None:
        """The kernel says how a process has ended."""
        rank, incarnation, status = reap
        draft.reaps.discard(reap)
        worker = draft.workers[rank]
        version = worker.version if worker.incarnation == incarnation else None
        exited = ev.WorkerExited(draft.now, "", rank, incarnation, status, version, "step")
        self._hear_worker(draft, exited)

    def _do_on_node(self, draft: Draft, node: int, command: do.Command) -> None:
        match command:
            case do.TellManager(event=event):
                self._send(draft, "up", node, without_origin(event))
            case do.TellWorker(rank=rank) if self._is_alive(draft, rank, command.incarnation):
                worker = draft.workers[rank]
                order = self.book.post(without_origin(command.command))
                draft.workers[rank] = worker._replace(orders=(*worker.orders, order))
                self.workers.obey_while_waiting(draft, rank)
            case do.SignalWorker(rank=rank) if self._is_alive(draft, rank, command.incarnation):
                self.workers.bury(draft, rank, -command.signal_number)
            case do.SpawnWorker(rank=rank, generation=generation):
                if draft.workers[rank].phase != "gone":
                    raise Violation(f"two lives of rank {rank} at the same time")
                start = draft.workers[rank].start if command.start is None else command.start
                who = (command.incarnation, "boot", generation, generation, command.gated)
                draft.workers[rank] = Worker(*who, start=start)
            case do.FinishRun(outcome=outcome):
                self._leave(draft, node)
                self._send(draft, "up", node, ev.AgentLeft(0.0, "", node, outcome, ""))
            case do.FallBack():
                self._leave(draft, node)

    def _is_alive(self, draft: Draft, rank: int, incarnation: int) -> bool:
        worker = draft.workers[rank]
        return worker.incarnation == incarnation and worker.phase != "gone"

    def _leave(self, draft: Draft, node: int) -> None:
        draft.left.add(node)
        draft.gaps.discard(node)
        draft.down[node] = []
        ranks = self.ranks_of(node)
        for rank in ranks:
            draft.workers[rank] = draft.workers[rank]._replace(phase="gone", orders=())
        draft.reaps = {reap for reap in draft.reaps if reap[0] not in ranks}

    # ------------------------------------------------------------------ the manager

    def _hear(self, draft: Draft, node: int, event: ev.Event) -> None:
        if isinstance(event, ev.AgentRegistered):
            self._answer_registration(draft, node, event)
        elif node in self._manager(draft).membership.nodes:
            self._tell_manager(draft, event)
        elif node not in draft.left:
            draft.gaps.add(node)  # this manager does not know it, and says so
        elif isinstance(event, ev.AgentLeft):
            self._tell_manager(draft, event)

    def _answer_registration(self, draft: Draft, node: int, event: ev.AgentRegistered) -> None:
        refusal = self._manager(draft).refusal(event)
        if refusal is not None:
            is_taken = self._manager(draft).is_taken(event)
            self._send(draft, "down", node, ev.ManagerRefused(0.0, "", refusal, is_taken))
            return
        draft.manager, commands = self.book.handle(draft.manager, event)
        machine = self._manager(draft)
        joined = ev.ManagerJoined(0.0, "", machine.generation, machine.restarts_used)
        self._send(draft, "down", node, joined)
        self._do_as_manager(draft, commands)

    def _do_as_manager(self, draft: Draft, commands: Iterable[do.Command]) -> None:
        machine = self._manager(draft)
        for command in commands:
            if isinstance(command, do.EndJob):
                draft.ended = "succeeded" if command.succeeded else "failed"
            elif isinstance(command, do.ReplaceWorker | do.KillWorker):
                self._order(draft, command.node_rank, command)
            elif isinstance(command, do.RepeatOrder):
                self._order(draft, command.node_rank, command.order)
            elif not isinstance(command, do.RecordRecovery):
                if isinstance(command, do.Resume) and machine.phase is JobPhase.RESUMED:
                    self._check_resume(draft, command)
                for node, known in sorted(machine.membership.nodes.items()):
                    if known.is_present:
                        self._order(draft, node, command)

    def _order(self, draft: Draft, node: int, command: do.Command) -> None:
        if node not in draft.left:
            self._send(draft, "down", node, command)

    def _check_resume(self, draft: Draft, command: do.Resume) -> None:
        for rank, worker in enumerate(draft.workers):
            if worker.phase not in _STOPPED and worker.generation != command.generation:
                raise Violation(
                    f"rank {rank} is in {worker.phase} of generation {worker.generation} when all "
                    f"are resumed: {command}"
                )
        starts = {worker.start for worker in draft.workers if worker.phase != "gone"}
        if len(starts) > 1:
            raise Violation(f"ranks are to meet at the stores of the starts {sorted(starts)}")

    # ------------------------------------------------------------------ time

    def pass_time(self, draft: Draft) -> None:
        """Nothing else can happen: the earliest deadline comes.

        Agents that are there renew their leases until then.
        """
        manager = self._manager(draft)
        nodes = manager.membership.nodes
        is_lease_due = any(node in nodes and nodes[node].is_present for node in draft.left)
        there = [node for node in range(self.scope.nodes) if node not in draft.left]
        deadlines = [
            manager.next_deadline(with_leases=is_lease_due),
            *(self.book.machine(draft.agents[node]).next_deadline() for node in there),
        ]
        due = [deadline for deadline in deadlines if deadline is not None]
        if due:
            draft.now = max(draft.now, min(due))
            self._tick(draft, there, known={node for node in there if node in nodes})
        elif there:
            phases = ", ".join(
                f"rank {rank} in {worker.phase}" for rank, worker in enumerate(draft.workers)
            )
            raise Violation(
                f"stuck: {phases}, the manager {manager.phase.value} in generation "
                f"{manager.generation}; nothing will ever come any more"
            )
        else:
            # it came after the last agent had left, and has nothing to end
            draft.ended = "without a manager"

    def _tick(self, draft: Draft, there: list[int], known: set[int]) -> None:
        for node in sorted(known):
            self._tell_manager(draft, ev.AgentHeard(draft.now, "", node))
        self._tell_manager(draft, ev.Tick(draft.now, ""))
        for node in there:
            self._tell_agent(draft, node, ev.Tick(draft.now, ""))
