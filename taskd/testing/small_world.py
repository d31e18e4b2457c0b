"""A job small enough to be taken through everything that can happen to it.

The two real machines, with a small model of all the rest.

A `State` is a value: two that are equal go on alike. `Rules.moves` says what can happen next in
one. What is as in reality:

- each node and the manager are joined by a channel in each direction that keeps the order; nothing
  is said of the order between channels;
- a worker obeys its agent in order, and speaks, raises, dies or goes on at any moment before that;
- a collective is passed by each of its ranks at a moment of its own, once all have come, even if
  some have died since;
- a process is reaped, and a gap in a channel is noticed, at any later moment.

What is simpler:

- deadlines come last: time passes only when nothing is left that can happen without it, and then by
  as much as the earliest of them needs;
- what a worker says reaches its agent at once (that it is late looks the same: the agent's commands
  wait for the worker);
- a worker that waits obeys at once; peers of a dead rank notice that at most `Scope.breaks` times;
- a manager that is killed is there again at once, and all that was on its way is lost with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from taskd.core import commands as do
from taskd.core import events as ev
from taskd.core.exits import SIGKILL
from taskd.core.faults import Fault, FaultKind
from taskd.core.job.machine import RecoveryMachine
from taskd.core.node import NodeMachine
from taskd.core.phase import JobPhase
from taskd.core.timeouts import Timeouts
from taskd.testing.canonical import NO_STORY, fork, key
from taskd.testing.small_state import (
    IN_COLLECTIVE,
    WAITING,
    Draft,
    Scope,
    State,
    Violation,
    Worker,
    place,
)

Move = tuple[str, Callable[[Draft], None]]


class Rules:
    """What can happen in a world of this scope.

    Remembers what each machine answers, so that each question is asked once.
    """

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.timeouts = Timeouts.derive(30.0)
        self.ranks = range(scope.nodes * scope.per_node)
        self.machines: list[Any] = []
        self.messages: list[Any] = []
        self._numbers: dict[Any, int] = {}
        self._message_numbers: dict[Any, int] = {}
        self._answers: dict[tuple[int, ev.Event], tuple[int, list[do.Command]]] = {}
        self._heard: dict[tuple[int, float], Any] = {}

    # ------------------------------------------------------------------ machines

    def _number(self, machine: Any) -> int:
        """The number of this state of a machine."""
        known = key(machine)
        number = self._numbers.setdefault(known, len(self.machines))
        if number == len(self.machines):
            self.machines.append(machine)
        return number

    def _post(self, thing: Any) -> int:
        """The number of this message, whoever it came from and whenever."""
        number = self._message_numbers.setdefault(thing, len(self.messages))
        if number == len(self.messages):
            self.messages.append(thing)
        return number

    def _send(self, draft: Draft, name: str, node: int, thing: Any) -> None:
        """Into a channel. `Scope.in_turns`: together with what was sent there in the same turn."""
        queue = (draft.up if name == "up" else draft.down)[node]
        if self.scope.in_turns and queue and (name, node) in draft.sent:
            queue[-1] = (*queue[-1], self._post(thing))
        else:
            queue.append((self._post(thing),))
            draft.sent.add((name, node))

    def _receive(self, number: int, now: float) -> Any:
        """The event that this message is for whoever gets it now."""
        event = self._heard.get((number, now))
        if event is None:
            content = self.messages[number]
            event = (
                ev.CommandReceived(now, "", content)
                if isinstance(content, do.Command)
                else replace(content, now=now)
            )
            self._heard[number, now] = event
        return event

    def _new_manager(self) -> int:
        machine = RecoveryMachine("small", self.timeouts)
        machine._state.story = NO_STORY  # noqa: SLF001
        return self._number(machine)

    def _handle(self, number: int, event: ev.Event) -> tuple[int, list[do.Command]]:
        known = self._answers.get((number, event))
        if known is None:
            machine = fork(self.machines[number])
            commands = machine.handle(event)
            machine.check()
            known = self._answers[number, event] = (
                self._number(machine),
                [_plain(command) for command in commands],
            )
        return known

    def _tell_agent(self, draft: Draft, node: int, event: ev.Event) -> None:
        if node in draft.left:
            return
        draft.agents[node], commands = self._handle(draft.agents[node], event)
        for command in commands:
            self._do_on_node(draft, node, command)

    def _tell_manager(self, draft: Draft, event: ev.Event) -> None:
        draft.manager, commands = self._handle(draft.manager, event)
        self._do_as_manager(draft, commands)

    # ------------------------------------------------------------------ beginning

    def first(self) -> State:
        """Everybody has registered (but `late`) and is about to enter its function."""
        scope = self.scope
        agents = []
        for node in range(scope.nodes):
            ranks = range(node * scope.per_node, (node + 1) * scope.per_node)
            machine = NodeMachine(
                node,
                ranks,
                self.timeouts,
                node_count=scope.nodes,
                world_size=len(self.ranks),
                agent_incarnation=f"agent {node}",
            )
            machine._state.story = NO_STORY  # noqa: SLF001
            agents.append(self._number(machine))
        nothing: tuple[tuple[Any, ...], ...] = ((),) * scope.nodes
        draft = Draft(State(
            0.0, self._new_manager(), tuple(agents), frozenset(), tuple(Worker(0, "boot", 0, 0) for _ in self.ranks), nothing, nothing,
            frozenset(), frozenset(), frozenset(), scope.faults, scope.breaks,
        ))  # fmt: skip
        on_time = [node for node in range(scope.nodes) if node not in scope.late]
        for node in on_time:
            self._register(draft, node)
            self._settle(draft)
        for rank in self.ranks:
            self._boot(draft, rank)
            self._settle(draft)
        draft.gaps = set(scope.late)
        return draft.freeze()

    def _settle(self, draft: Draft) -> None:
        """Deliver everything that is on its way."""
        for node in range(self.scope.nodes):
            while draft.up[node]:
                self._deliver_up(draft, node)
            while draft.down[node]:
                self._deliver_down(draft, node)

    # ------------------------------------------------------------------ what can happen

    def moves(self, state: State) -> Iterator[Move]:
        """Everything that can happen next. Nothing: the job has ended."""
        if state.ended:
            return
        is_quiet = True
        for move in self._steps(state):
            is_quiet = False
            yield move
        if is_quiet:
            yield "time passes", self._pass_time
        if state.faults:
            yield from self._faults(state)

    def _steps(self, state: State) -> Iterator[Move]:
        for node in range(self.scope.nodes):
            if state.up[node]:
                yield f"node {node} is heard", partial(self._deliver_up, node=node)
            if state.down[node]:
                yield f"node {node} hears", partial(self._deliver_down, node=node)
            if node in state.gaps and node not in state.left:
                yield f"node {node} registers", partial(self._register, node=node)
        for rank, worker in enumerate(state.workers):
            yield from self._steps_of_rank(state, rank, worker)
        for reap in sorted(state.reaps):
            yield f"rank {reap[0]} is reaped", partial(self._reap, reap=reap)

    def _steps_of_rank(self, state: State, rank: int, worker: Worker) -> Iterator[Move]:
        if worker.orders:
            yield f"rank {rank} obeys", partial(self._obey_next, rank=rank)
        if worker.phase == "boot":
            yield f"rank {rank} is up", partial(self._boot, rank=rank)
        elif worker.phase in IN_COLLECTIVE:
            if self._may_pass(state, worker):
                yield f"rank {rank} passes", partial(self._pass, rank=rank)
            elif state.breaks and self._has_lost_peer(state, worker):
                yield f"rank {rank} sees a peer gone", partial(self._break, rank=rank)

    def _faults(self, state: State) -> Iterator[Move]:
        for rank, worker in enumerate(state.workers):
            if worker.phase != "gone" and not worker.is_released:
                yield from self._faults_of_rank(rank, worker)
        for node in range(self.scope.nodes):
            yield from self._faults_of_channel("up", node, state.up[node])
            yield from self._faults_of_channel("down", node, state.down[node])
            if "cut" in self.scope.kinds and (state.up[node] or state.down[node]):
                yield f"FAULT node {node} is cut off", self._fault(self._cut, node=node)
        if "manager" in self.scope.kinds:
            yield "FAULT the manager is killed", self._fault(self._restart_manager)

    def _faults_of_rank(self, rank: int, worker: Worker) -> Iterator[Move]:
        kinds = self.scope.kinds
        if "kill" in kinds:
            yield f"FAULT rank {rank} is killed", self._fault(self._die, rank=rank, status=-SIGKILL)
        if "exit" in kinds:
            yield f"FAULT rank {rank} exits", self._fault(self._die, rank=rank, status=3)
        if "raise" in kinds and worker.phase == "vote":
            yield (
                f"FAULT rank {rank} raises",
                self._fault(self._raise, rank=rank, kind=FaultKind.RAISED),
            )

    def _faults_of_channel(self, name: str, node: int, queue: tuple[Any, ...]) -> Iterator[Move]:
        if queue and f"lose {name}" in self.scope.kinds:
            yield (
                (f"FAULT a message {name} of node {node} is lost"),
                self._fault(self._lose, name=name, node=node),
            )
        if queue and f"repeat {name}" in self.scope.kinds:
            yield (
                (f"FAULT a message {name} of node {node} comes twice"),
                self._fault(self._repeat, name=name, node=node),
            )

    def after(self, state: State, move: Move) -> State:
        """The state that comes of it. Raises `Violation`, or whatever a machine raises."""
        draft = Draft(state)
        move[1](draft)
        return draft.freeze()

    # ------------------------------------------------------------------ faults

    def _fault(self, what: Callable[..., None], **arguments: Any) -> Callable[[Draft], None]:
        """This, as one of the faults that the scope has."""

        def happen(draft: Draft) -> None:
            draft.faults -= 1
            what(draft, **arguments)

        return happen

    def _lose(self, draft: Draft, name: str, node: int) -> None:
        (draft.up if name == "up" else draft.down)[node].pop(0)
        draft.gaps.add(node)

    def _repeat(self, draft: Draft, name: str, node: int) -> None:
        queue = (draft.up if name == "up" else draft.down)[node]
        queue.insert(0, queue[0])

    def _cut(self, draft: Draft, node: int) -> None:
        draft.up[node], draft.down[node] = [], []
        draft.gaps.add(node)

    def _restart_manager(self, draft: Draft) -> None:
        draft.manager = self._new_manager()
        for node in range(self.scope.nodes):
            self._cut(draft, node)

    def _die(self, draft: Draft, rank: int, status: int) -> None:
        """The alarm rings where a process is killed.

        That it exits is seen only when it is reaped.
        """
        worker = draft.workers[rank]
        self._bury(draft, rank, status)
        if status == -SIGKILL:
            phase = "boot" if worker.phase == "boot" else "step"
            self._say(
                draft,
                ev.AlarmRang(
                    draft.now, "", rank, worker.incarnation, draft.now, worker.version, phase
                ),
            )

    def _bury(self, draft: Draft, rank: int, status: int) -> None:
        worker = draft.workers[rank]
        draft.workers[rank] = worker._replace(phase="gone", orders=())
        draft.reaps.add((rank, worker.incarnation, status))

    def _raise(self, draft: Draft, rank: int, kind: FaultKind) -> None:
        worker = draft.workers[rank]
        is_asking = (
            kind is FaultKind.COMMUNICATION and worker.phase == "vote" and self.scope.is_sharded
        )
        text = (
            "ValueError: x"
            if kind is FaultKind.RAISED
            else ("RuntimeError: Connection closed by peer")
        )
        fault = Fault(kind, rank, worker.incarnation, text, version=worker.version, signature=text)
        draft.workers[rank] = worker._replace(phase="asking" if is_asking else "raised")
        self._say(
            draft,
            ev.WorkerRaised(
                draft.now,
                "",
                rank,
                worker.incarnation,
                worker.generation,
                fault,
                clean=True,
                may_advance=is_asking,
            ),
        )
        self._obey_while_waiting(draft, rank)

    def _break(self, draft: Draft, rank: int) -> None:
        draft.breaks -= 1
        self._raise(draft, rank, FaultKind.COMMUNICATION)

    def _has_lost_peer(self, state: State, worker: Worker) -> bool:
        return any(
            peer.phase == "gone" or peer.generation != worker.generation for peer in state.workers
        )

    # ------------------------------------------------------------------ workers

    def _say(self, draft: Draft, event: ev.WorkerEvent) -> None:
        self._tell_agent(draft, event.rank // self.scope.per_node, event)

    def _boot(self, draft: Draft, rank: int) -> None:
        worker = draft.workers[rank]
        self._say(draft, ev.WorkerStarted(draft.now, "", rank, worker.incarnation, 1))
        if draft.workers[rank].is_gated:
            self._say(draft, ev.WorkerDeclared(draft.now, "", rank, worker.incarnation))
            self._unwind(draft, rank)
        else:
            self._enter(draft, rank)

    def _enter(self, draft: Draft, rank: int) -> None:
        worker = draft.workers[rank]
        if not worker.has_entered:
            self._say(
                draft, ev.WorkerDeclared(draft.now, "", rank, worker.incarnation, entered=True)
            )
        self._come_to(draft, rank, draft.workers[rank]._replace(phase="enter", has_entered=True))

    def _come_to(self, draft: Draft, rank: int, worker: Worker) -> None:
        """To a collective."""
        draft.workers[rank] = worker
        draft.arrived.add((place(worker), rank))

    def _may_pass(self, state: State, worker: Worker) -> bool:
        if any((place(worker), rank) not in state.arrived for rank in self.ranks):
            return False
        source = (
            None
            if worker.phase == "vote" or worker.source is None
            else state.workers[worker.source]
        )
        return source is None or (source.phase != "gone" and source.generation == worker.generation)

    def _pass(self, draft: Draft, rank: int) -> None:
        worker = draft.workers[rank]
        if worker.phase == "vote":
            self._commit(draft, rank)
        else:
            held = worker if worker.source is None else draft.workers[worker.source]
            if worker.restores is not None and held.version != worker.restores:
                raise Violation(
                    f"rank {rank} is to restore version {worker.restores}, and its "
                    f"source has {held.version}"
                )
            if self.scope.is_sharded:
                self._say(
                    draft,
                    ev.WorkerHolds(
                        draft.now,
                        "",
                        rank,
                        worker.incarnation,
                        f"shard {rank % max(1, len(self.ranks) // 2)}",
                    ),
                )
            version = worker.restores or 0
            self._come_to(
                draft,
                rank,
                draft.workers[rank]._replace(
                    phase="vote", version=version, source=None, restores=None
                ),
            )
        self._obey_while_waiting(draft, rank)

    def _commit(self, draft: Draft, rank: int) -> None:
        worker = draft.workers[rank]
        version = (worker.version or 0) + 1
        draft.workers[rank] = worker._replace(version=version, is_fresh=False, phase="optimizer")
        if worker.is_fresh:
            self._say(
                draft,
                ev.WorkerRecovered(
                    draft.now,
                    "",
                    rank,
                    worker.incarnation,
                    worker.generation,
                    version,
                    0.0,
                    0.0,
                    0.0,
                ),
            )
        if worker.is_gated:
            self._unwind(draft, rank)
        elif version < self.scope.steps:
            self._come_to(draft, rank, draft.workers[rank]._replace(phase="vote"))
        else:
            draft.workers[rank] = draft.workers[rank]._replace(phase="returned")
            self._say(
                draft,
                ev.WorkerReturned(
                    draft.now, "", rank, worker.incarnation, worker.generation, version
                ),
            )

    def _unwind(self, draft: Draft, rank: int) -> None:
        worker = draft.workers[rank]._replace(phase="paused", source=None, restores=None)
        draft.workers[rank] = worker
        self._say(
            draft,
            ev.WorkerPaused(
                draft.now, "", rank, worker.incarnation, worker.target, worker.version, clean=True
            ),
        )
        self._obey_while_waiting(draft, rank)

    def _obey_while_waiting(self, draft: Draft, rank: int) -> None:
        while draft.workers[rank].phase in WAITING and draft.workers[rank].orders:
            self._obey_next(draft, rank)

    def _obey_next(self, draft: Draft, rank: int) -> None:
        worker = draft.workers[rank]
        command = self.messages[worker.orders[0]]
        draft.workers[rank] = worker = worker._replace(orders=worker.orders[1:])
        if isinstance(command, do.Interrupt) and command.generation > worker.target:
            self._come_out(draft, rank, command)
        elif (
            isinstance(command, do.Advance)
            and worker.phase == "asking"
            and command.generation == worker.target
        ):
            self._commit(draft, rank)
        elif (
            isinstance(command, do.Resume)
            and command.generation >= worker.target
            and worker.is_gated
        ):
            move = next(move for move in command.moves if move.rank == rank)
            draft.workers[rank] = worker._replace(
                target=command.generation, generation=command.generation, is_gated=False, is_fresh=True, source=move.source,
                restores=command.version,
            )  # fmt: skip
            self._enter(draft, rank)
        elif isinstance(command, do.Release):
            draft.workers[rank] = worker._replace(is_released=True)
            if worker.phase == "returned":
                self._bury(draft, rank, 0)
        elif isinstance(command, do.GiveUp):
            self._bury(draft, rank, 1)
        self._obey_while_waiting(draft, rank)

    def _come_out(self, draft: Draft, rank: int, command: do.Interrupt) -> None:
        worker = draft.workers[rank]._replace(target=command.generation, is_gated=True)
        draft.workers[rank] = worker
        if worker.phase == "asking" or (worker.phase == "vote" and self.scope.is_sharded):
            draft.workers[rank] = worker._replace(phase="asking")
            self._say(
                draft,
                ev.WorkerMayAdvance(
                    draft.now, "", rank, worker.incarnation, worker.target, worker.version or 0
                ),
            )
        elif worker.phase != "boot":
            self._unwind(draft, rank)

    # ------------------------------------------------------------------ agents

    def _reap(self, draft: Draft, reap: tuple[int, int, int]) -> None:
        rank, incarnation, status = reap
        draft.reaps.discard(reap)
        worker = draft.workers[rank]
        version = worker.version if worker.incarnation == incarnation else None
        self._say(draft, ev.WorkerExited(draft.now, "", rank, incarnation, status, version, "step"))

    def _do_on_node(self, draft: Draft, node: int, command: do.Command) -> None:
        if isinstance(command, do.TellManager):
            self._send(draft, "up", node, _plain(command.event))
        elif isinstance(command, do.TellWorker):
            worker = draft.workers[command.rank]
            if (worker.incarnation, worker.phase != "gone") == (command.incarnation, True):
                draft.workers[command.rank] = worker._replace(
                    orders=(*worker.orders, self._post(_plain(command.command)))
                )
                self._obey_while_waiting(draft, command.rank)
        elif isinstance(command, do.SignalWorker):
            worker = draft.workers[command.rank]
            if (worker.incarnation, worker.phase != "gone") == (command.incarnation, True):
                self._bury(draft, command.rank, -command.signal_number)
        elif isinstance(command, do.SpawnWorker):
            if draft.workers[command.rank].phase != "gone":
                raise Violation(f"two lives of rank {command.rank} at the same time")
            draft.workers[command.rank] = Worker(
                command.incarnation, "boot", command.generation, command.generation, command.gated
            )
        elif isinstance(command, do.FinishRun | do.FallBack):
            self._leave(draft, node, command)

    def _leave(self, draft: Draft, node: int, command: do.FinishRun | do.FallBack) -> None:
        draft.left.add(node)
        draft.gaps.discard(node)
        draft.down[node] = []
        if isinstance(command, do.FinishRun):
            self._send(draft, "up", node, ev.AgentLeft(0.0, "", node, command.outcome, ""))
        for rank in range(node * self.scope.per_node, (node + 1) * self.scope.per_node):
            draft.workers[rank] = draft.workers[rank]._replace(phase="gone", orders=())
        draft.reaps = {reap for reap in draft.reaps if reap[0] // self.scope.per_node != node}

    def _register(self, draft: Draft, node: int) -> None:
        draft.gaps.discard(node)
        self._send(
            draft, "up", node, _plain(self.machines[draft.agents[node]].registration(draft.now))
        )

    def _deliver_down(self, draft: Draft, node: int) -> None:
        for number in draft.down[node].pop(0):
            self._tell_agent(draft, node, self._receive(number, draft.now))

    # ------------------------------------------------------------------ the manager

    def _deliver_up(self, draft: Draft, node: int) -> None:
        for number in draft.up[node].pop(0):
            if not draft.ended:
                self._hear(draft, node, self._receive(number, draft.now))

    def _hear(self, draft: Draft, node: int, event: ev.Event) -> None:
        if isinstance(event, ev.AgentRegistered):
            refusal = self.machines[draft.manager].refusal(event)
            if refusal is not None:
                self._send(draft, "down", node, ev.ManagerRefused(0.0, "", refusal))
                return
            draft.manager, commands = self._handle(draft.manager, event)
            machine = self.machines[draft.manager]
            self._send(
                draft,
                "down",
                node,
                ev.ManagerJoined(0.0, "", machine.generation, machine.restarts_used),
            )
            self._do_as_manager(draft, commands)
        elif node in self.machines[draft.manager].membership.nodes:
            self._tell_manager(draft, event)
        elif node not in draft.left:
            draft.gaps.add(node)  # this manager does not know it, and says so
        elif isinstance(event, ev.AgentLeft):
            self._tell_manager(draft, event)

    def _do_as_manager(self, draft: Draft, commands: list[do.Command]) -> None:
        machine = self.machines[draft.manager]
        for command in commands:
            if isinstance(command, do.EndJob):
                draft.ended = "succeeded" if command.succeeded else "failed"
            elif isinstance(command, do.ReplaceWorker | do.KillWorker):
                self._order(draft, command.node_rank, command)
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
            if (
                worker.phase not in {"gone", "paused", "asking", "raised"}
                and worker.generation != command.generation
            ):
                raise Violation(
                    f"rank {rank} is in {worker.phase} of generation "
                    f"{worker.generation} when all are resumed: {command}"
                )

    # ------------------------------------------------------------------ time

    def _pass_time(self, draft: Draft) -> None:
        """Nothing else can happen: the earliest deadline comes.

        Agents that are there renew their leases until then.
        """
        manager = self.machines[draft.manager]
        nodes = manager.membership.nodes
        is_lease_due = any(node in nodes and nodes[node].is_present for node in draft.left)
        there = [node for node in range(self.scope.nodes) if node not in draft.left]
        deadlines = [
            manager.next_deadline(with_leases=is_lease_due),
            *(self.machines[draft.agents[node]].next_deadline() for node in there),
        ]
        due = [deadline for deadline in deadlines if deadline is not None]
        if not due:
            if not there:
                # it came after the last agent had left, and has nothing to end
                draft.ended = "without a manager"
                return
            phases = ", ".join(
                f"rank {rank} in {worker.phase}" for rank, worker in enumerate(draft.workers)
            )
            raise Violation(
                f"stuck: {phases}, the manager {manager.phase.value} in generation "
                f"{manager.generation}; nothing will ever come any more"
            )
        draft.now = max(draft.now, min(due))
        for node in there:
            if node in nodes:
                self._tell_manager(draft, ev.AgentHeard(draft.now, "", node))
        self._tell_manager(draft, ev.Tick(draft.now, ""))
        for node in there:
            self._tell_agent(draft, node, ev.Tick(draft.now, ""))


def _plain(thing: Any) -> Any:
    """An event or a command without what only tells where it came from."""
    return replace(
        thing, **({"now": 0.0, "cause": ""} if isinstance(thing, ev.Event) else {"cause": ""})
    )
