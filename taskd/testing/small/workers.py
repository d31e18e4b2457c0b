"""The training processes of a small world: their steps, their collectives, their deaths.

A worker enters ("enter", a collective in which it gets its state), then votes on each step
("vote", another one) and commits it, until it has done them all. Knows neither agents nor the
manager: who hears what a worker says is handed in.
"""

from collections.abc import Callable
from typing import Any

from taskd.core import commands as do
from taskd.core import events as ev
from taskd.core.exits import SIGKILL
from taskd.core.faults import Fault, FaultKind
from taskd.testing.small.state import WAITING, Draft, Scope, State, Violation, Worker, place

_GONE = "RuntimeError: Connection closed by peer"


class Workers:
    """What each rank's newest life does next."""

    def __init__(
        self, scope: Scope, messages: list[Any], hear: Callable[[Draft, ev.WorkerEvent], None]
    ) -> None:
        """`messages`: commands by number. `hear`: gets what the workers say."""
        self.scope = scope
        self.ranks = range(scope.nodes * scope.per_node)
        self._messages, self._hear = messages, hear

    def _say(
        self, draft: Draft, rank: int, kind: type[ev.WorkerEvent], *fields: Any, **named: Any
    ) -> None:
        """`fields`: of the event, behind those that every event of a worker has."""
        who = (rank, draft.workers[rank].incarnation)
        self._hear(draft, kind(draft.now, "", *who, *fields, **named))

    # ------------------------------------------------------------------ steps

    def boot(self, draft: Draft, rank: int) -> None:
        """It has started, and enters its function or waits for the job to be resumed."""
        self._say(draft, rank, ev.WorkerStarted, 1)
        if draft.workers[rank].is_gated:
            self._say(draft, rank, ev.WorkerDeclared)
            self._pause(draft, rank)
        else:
            self._enter(draft, rank)

    def _enter(self, draft: Draft, rank: int) -> None:
        if not draft.workers[rank].has_entered:
            self._say(draft, rank, ev.WorkerDeclared, entered=True)
        worker = draft.workers[rank]._replace(phase="enter", has_entered=True)
        self._come_to(draft, rank, worker)

    def _come_to(self, draft: Draft, rank: int, worker: Worker) -> None:
        """To a collective."""
        draft.workers[rank] = worker
        draft.arrived.add((place(worker), rank))

    def may_pass(self, state: State, worker: Worker) -> bool:
        """Whether its collective is complete: all have come, and its source of state lives."""
        if any((place(worker), rank) not in state.arrived for rank in self.ranks):
            return False
        if worker.phase == "vote" or worker.source is None:
            return True
        source = state.workers[worker.source]
        return source.phase != "gone" and source.generation == worker.generation

    def has_lost_peer(self, state: State, worker: Worker) -> bool:
        """Whether a collective can break under it."""
        return any(
            peer.phase == "gone" or peer.generation != worker.generation for peer in state.workers
        )

    def pass_collective(self, draft: Draft, rank: int) -> None:
        """It goes on behind its collective."""
        if draft.workers[rank].phase == "vote":
            self._commit(draft, rank)
        else:
            self._restore(draft, rank)
        self.obey_while_waiting(draft, rank)

    def _restore(self, draft: Draft, rank: int) -> None:
        worker = draft.workers[rank]
        held = worker if worker.source is None else draft.workers[worker.source]
        if worker.restores is not None and held.version != worker.restores:
            raise Violation(
                f"rank {rank} is to restore version {worker.restores}, and its source has "
                f"{held.version}"
            )
        if self.scope.is_sharded:
            shard = f"shard {rank % max(1, len(self.ranks) // 2)}"
            self._say(draft, rank, ev.WorkerHolds, shard)
        version = worker.restores or 0
        worker = draft.workers[rank]._replace(
            phase="vote", version=version, source=None, restores=None
        )
        self._come_to(draft, rank, worker)

    def _commit(self, draft: Draft, rank: int) -> None:
        worker = draft.workers[rank]
        version = (worker.version or 0) + 1
        draft.workers[rank] = worker._replace(version=version, is_fresh=False, phase="optimizer")
        if worker.is_fresh:
            seconds = (0.0, 0.0, 0.0)
            self._say(draft, rank, ev.WorkerRecovered, worker.generation, version, *seconds)
        if worker.is_gated:
            self._pause(draft, rank)
        elif version < self.scope.steps:
            self._come_to(draft, rank, draft.workers[rank]._replace(phase="vote"))
        else:
            draft.workers[rank] = draft.workers[rank]._replace(phase="returned")
            self._say(draft, rank, ev.WorkerReturned, worker.generation, version)

    def _pause(self, draft: Draft, rank: int) -> None:
        worker = draft.workers[rank]._replace(phase="paused", source=None, restores=None)
        draft.workers[rank] = worker
        self._say(draft, rank, ev.WorkerPaused, worker.target, worker.version, clean=True)
        self.obey_while_waiting(draft, rank)

    # ------------------------------------------------------------------ faults

    def die(self, draft: Draft, rank: int, status: int) -> None:
        """The alarm rings where a process is killed.

        That it exits is seen only when it is reaped.
        """
        worker = draft.workers[rank]
        self.bury(draft, rank, status)
        if status == -SIGKILL:
            phase = "boot" if worker.phase == "boot" else "step"
            self._say(draft, rank, ev.AlarmRang, draft.now, worker.version, phase)

    def bury(self, draft: Draft, rank: int, status: int) -> None:
        """It is dead, and not reaped yet."""
        worker = draft.workers[rank]
        draft.workers[rank] = worker._replace(phase="gone", orders=())
        draft.reaps.add((rank, worker.incarnation, status))

    def fail(self, draft: Draft, rank: int, kind: FaultKind) -> None:
        """An exception comes out of its step."""
        worker = draft.workers[rank]
        is_broken = kind is FaultKind.COMMUNICATION
        is_asking = is_broken and worker.phase == "vote" and self.scope.is_sharded
        text = _GONE if is_broken else "ValueError: x"
        fault = Fault(kind, rank, worker.incarnation, text, version=worker.version, signature=text)
        draft.workers[rank] = worker._replace(phase="asking" if is_asking else "raised")
        fields = {"clean": True, "may_advance": is_asking}
        self._say(draft, rank, ev.WorkerRaised, worker.generation, fault, **fields)
        self.obey_while_waiting(draft, rank)

    def break_collective(self, draft: Draft, rank: int) -> None:
        """Its collective breaks, because a peer is gone."""
        draft.breaks -= 1
        self.fail(draft, rank, FaultKind.COMMUNICATION)

    # ------------------------------------------------------------------ orders

    def obey_while_waiting(self, draft: Draft, rank: int) -> None:
        """As long as it waits, it obeys at once."""
        while draft.workers[rank].phase in WAITING and draft.workers[rank].orders:
            self.obey_next(draft, rank)

    def obey_next(self, draft: Draft, rank: int) -> None:
        """It reads the next command of its agent."""
        worker = draft.workers[rank]
        command = self._messages[worker.orders[0]]
        draft.workers[rank] = worker = worker._replace(orders=worker.orders[1:])
        match command:
            case do.Interrupt(generation=generation) if generation > worker.target:
                self._come_out(draft, rank, generation)
            case do.Advance(generation=generation) if (
                worker.phase == "asking" and generation == worker.target
            ):
                self._commit(draft, rank)
            case do.Resume(generation=generation) if (
                generation >= worker.target and worker.is_gated
            ):
                self._resume(draft, rank, command)
            case do.Release():
                draft.workers[rank] = worker._replace(is_released=True)
                if worker.phase == "returned":
                    self.bury(draft, rank, 0)
            case do.GiveUp():
                self.bury(draft, rank, 1)
        self.obey_while_waiting(draft, rank)

    def _resume(self, draft: Draft, rank: int, command: do.Resume) -> None:
        draft.workers[rank] = draft.workers[rank]._replace(
            target=command.generation,
            generation=command.generation,
            is_gated=False,
            is_fresh=True,
            source=next((move.source for move in command.moves if move.rank == rank), None),
            restores=command.version,
        )
        self._enter(draft, rank)

    def _come_out(self, draft: Draft, rank: int, generation: int) -> None:
        worker = draft.workers[rank]._replace(target=generation, is_gated=True)
        draft.workers[rank] = worker
        if worker.phase == "asking" or (worker.phase == "vote" and self.scope.is_sharded):
            draft.workers[rank] = worker._replace(phase="asking")
            self._say(draft, rank, ev.WorkerMayAdvance, generation, worker.version or 0)
        elif worker.phase != "boot":
            self._pause(draft, rank)
