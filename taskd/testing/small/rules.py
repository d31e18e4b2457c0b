"""What can happen next in a small world, faults among it, and how it begins."""

from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any

from taskd.core.exits import SIGKILL
from taskd.core.faults import FaultKind
from taskd.testing.small.nodes import Nodes
from taskd.testing.small.state import IN_COLLECTIVE, Draft, Scope, State, Worker

Move = tuple[str, Callable[[Draft], None]]


class Rules:
    """What can happen in a world of this scope. Moves have names, for the story of a violation."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self._nodes = Nodes(scope)
        self._workers = self._nodes.workers
        self.ranks = self._workers.ranks
        self.machines = self._nodes.book  # by the numbers in a State

    def first(self) -> State:
        """Everybody has registered (but `late`) and is about to enter its function."""
        scope, nodes = self.scope, range(self.scope.nodes)
        nothing: tuple[tuple[Any, ...], ...] = ((),) * scope.nodes
        state = State(
            now=0.0,
            manager=self._nodes.new_manager(),
            agents=tuple(self._nodes.new_agent(node) for node in nodes),
            left=frozenset(),
            workers=tuple(Worker(0, "boot", 0, 0) for _ in self.ranks),
            up=nothing,
            down=nothing,
            gaps=frozenset(),
            reaps=frozenset(),
            arrived=frozenset(),
            faults=scope.faults,
            breaks=scope.breaks,
        )
        draft = Draft(state)
        for node in nodes:
            if node not in scope.late:
                self._nodes.register(draft, node)
                self._nodes.settle(draft)
        for rank in self.ranks:
            self._workers.boot(draft, rank)
            self._nodes.settle(draft)
        draft.gaps = set(scope.late)
        return draft.freeze()

    def after(self, state: State, move: Move) -> State:
        """The state that comes of it. Raises `Violation`, or whatever a machine raises."""
        draft = Draft(state)
        move[1](draft)
        return draft.freeze()

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
            yield "time passes", self._nodes.pass_time
        if state.faults:
            yield from self._faults(state)

    def _steps(self, state: State) -> Iterator[Move]:
        nodes = self._nodes
        for node in range(self.scope.nodes):
            if state.up[node]:
                yield f"node {node} is heard", partial(nodes.deliver_up, node=node)
            if state.down[node]:
                yield f"node {node} hears", partial(nodes.deliver_down, node=node)
            if node in state.gaps and node not in state.left:
                yield f"node {node} registers", partial(nodes.register, node=node)
        for rank, worker in enumerate(state.workers):
            yield from self._steps_of_rank(state, rank, worker)
        for reap in sorted(state.reaps):
            yield f"rank {reap[0]} is reaped", partial(nodes.reap, reap=reap)

    def _steps_of_rank(self, state: State, rank: int, worker: Worker) -> Iterator[Move]:
        workers = self._workers
        if worker.orders:
            yield f"rank {rank} obeys", partial(workers.obey_next, rank=rank)
        if worker.phase == "boot":
            yield f"rank {rank} is up", partial(workers.boot, rank=rank)
        elif worker.phase in IN_COLLECTIVE:
            if workers.may_pass(state, worker):
                yield f"rank {rank} passes", partial(workers.pass_collective, rank=rank)
            elif state.breaks and workers.has_lost_peer(state, worker):
                yield f"rank {rank} sees a peer gone", partial(workers.break_collective, rank=rank)

    # ------------------------------------------------------------------ faults

    def _faults(self, state: State) -> Iterator[Move]:
        scope = self.scope
        wanted = scope.first if state.faults == scope.faults else scope.then
        kinds = frozenset(scope.kinds).intersection(wanted)
        for rank, worker in enumerate(state.workers):
            if worker.phase != "gone" and not worker.is_released:
                yield from self._faults_of_rank(kinds, rank, worker)
        for node in range(scope.nodes):
            yield from self._faults_of_channel(kinds, "up", node, state.up[node])
            yield from self._faults_of_channel(kinds, "down", node, state.down[node])
            if "cut" in kinds and (state.up[node] or state.down[node]):
                yield f"FAULT node {node} is cut off", _fault(self._nodes.cut, node=node)
        if "manager" in kinds:
            yield "FAULT the manager is killed", _fault(self._nodes.restart_manager)

    def _faults_of_rank(self, kinds: Collection[str], rank: int, worker: Worker) -> Iterator[Move]:
        workers, who = self._workers, f"FAULT rank {rank}"
        if "kill" in kinds:
            yield f"{who} is killed", _fault(workers.die, rank=rank, status=-SIGKILL)
        if "exit" in kinds:
            yield f"{who} exits", _fault(workers.die, rank=rank, status=3)
        if "raise" in kinds and worker.phase == "vote":
            yield f"{who} raises", _fault(workers.fail, rank=rank, kind=FaultKind.RAISED)

    def _faults_of_channel(
        self, kinds: Collection[str], name: str, node: int, queue: tuple[Any, ...]
    ) -> Iterator[Move]:
        which = {"name": name, "node": node}
        if queue and f"lose {name}" in kinds:
            yield f"FAULT a message {name} of node {node} is lost", _fault(_lose, **which)
        if queue and f"repeat {name}" in kinds:
            yield f"FAULT a message {name} of node {node} comes twice", _fault(_repeat, **which)


def _fault(what: Callable[..., None], **arguments: Any) -> Callable[[Draft], None]:
    """This, as one of the faults that the scope has."""

    def happen(draft: Draft) -> None:
        draft.faults -= 1
        what(draft, **arguments)

    return happen


def _lose(draft: Draft, name: str, node: int) -> None:
    draft.channel(name, node).pop(0)
    draft.gaps.add(node)


def _repeat(draft: Draft, name: str, node: int) -> None:
    queue = draft.channel(name, node)
    queue.insert(0, queue[0])
