"""A model of a training process.

Boots, trains in step with the others, pauses, receives state, returns, dies.

The state is the list of committed steps itself, so that a step lost or done twice is seen.
Collectives are the meeting points of `World`: a rank goes on only when every rank has come. What it
says and obeys is what `taskd.worker` does. Where the state is sharded, every second rank holds the
same, and the meeting before the optimizer is the vote.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from taskd.core import commands as do
from taskd.core import events as ev
from taskd.core.faults import Fault, FaultKind

if TYPE_CHECKING:
    import random

    from taskd.testing.clock import FakeClock


_COLLECTIVES = frozenset({"step", "vote", "restore", "enter"})


@dataclass
class World:
    """What the workers of a job share: where they meet, and what they hold."""

    clock: "FakeClock"
    rng: "random.Random"
    world_size: int
    steps: int
    step_s: float = 0.02
    boot_s: float = 0.05
    collective_timeout_s: float = 60.0
    is_declared: bool = True
    is_sharded: bool = False
    newest_start: int = 0  # that node 0 has heard of: who comes late finds its store
    # the newest life of each rank
    workers: dict[int, "SimulatedWorker"] = field(default_factory=dict)
    _met: dict[tuple[object, ...], "dict[int, tuple[SimulatedWorker, Callable[[], None]]]"] = field(
        default_factory=dict
    )
    _plan: do.Resume | None = None  # the newest that was looked into
    _moves: dict[int, do.Move] = field(default_factory=dict)  # its moves, by rank

    def move_of(self, plan: do.Resume, rank: int) -> do.Move:
        """What this rank does by this plan. Without a move it keeps its copy."""
        if plan is not self._plan:
            self._plan, self._moves = plan, {move.rank: move for move in plan.moves}
        return self._moves.get(rank) or do.Move(rank)

    def meet(
        self, key: tuple[object, ...], worker: "SimulatedWorker", go_on: Callable[[], None]
    ) -> None:
        """A collective of the world that this worker was told of.

        Everybody goes on a little after the last one has come, if they are still in it.
        """
        active = worker.active
        assert not active or worker.rank in active
        assert worker.is_alive
        waiting = self._met.setdefault(key, {})
        waiting[worker.rank] = (worker, go_on)
        if len(waiting) < (len(active) or self.world_size):
            return
        replaced = [rank for rank, (one, _) in waiting.items() if self.workers[rank] is not one]
        if replaced:  # of a job before: one that is begun anew counts its generations from 0 again
            for rank in replaced:
                del waiting[rank]
            return
        del self._met[key]
        for _, call in waiting.values():
            self.clock.call_in(self.rng.random() * 0.004, call)

    def time_out(self) -> bool:
        """Nobody will come any more: those who wait in a collective see that by its timeout.

        False: nobody waits in one.
        """
        waiting = [
            worker
            for worker in self.workers.values()
            if worker.is_alive and worker.phase in _COLLECTIVES
        ]
        for worker in waiting:
            self.clock.call_in(self.collective_timeout_s, worker.broke)
        return bool(waiting)


class SimulatedWorker:
    """One life. `report` brings events to the agent; `on_exit(status)` is the kernel.

    `start`: the generation for whose start the store was opened at which it meets the others.
    """

    def __init__(
        self,
        world: World,
        spawn: do.SpawnWorker,
        start: int,
        report: Callable[[ev.Event], None],
        on_exit: Callable[["SimulatedWorker", int], None],
    ) -> None:
        self.world, self.rank, self.incarnation = world, spawn.rank, spawn.incarnation
        self.start = start
        self.generation = self.target = spawn.generation
        self.phase = "boot"
        self.is_alive, self.is_frozen, self.is_released = True, False, False
        self.must_gate = spawn.gated
        self.state: list[int] | None = None  # None: no TrainState yet
        self.parked: list[int] | None = None
        self.is_clean = True
        self.plan: do.Resume | None = None
        self.active: tuple[int, ...] = ()
        self.raise_next = self.tear_next = False
        self.resumed_at = self._read_at = 0.0
        self._must_report_recovery = False
        self.is_entered = False
        self._report, self._on_exit = report, on_exit
        self._step_token = 0  # what was scheduled before an interrupt does not happen
        self._incoming: list[int] = []
        known = world.workers.get(self.rank)
        # Not one of an agent that has lost its place and does not know it yet.
        if known is None or not known.is_alive or known.incarnation <= self.incarnation:
            world.workers[self.rank] = self
        self._later(world.boot_s * (0.5 + world.rng.random()), self._booted)

    # ------------------------------------------------------------------ fate

    def die(self, status: int) -> None:
        """The process ends now."""
        if self.is_alive:
            self.is_alive = False
            self._on_exit(self, status)

    def freeze(self) -> None:
        """SIGSTOP. The others wait in a collective until that times out."""
        self.is_frozen = True
        self.world.clock.call_in(self.world.collective_timeout_s, self._starve_peers)

    def _starve_peers(self) -> None:
        if self.is_alive:
            for peer in list(self.world.workers.values()):
                peer.broke()

    @property
    def version(self) -> int | None:
        """Committed steps, as the black box tells."""
        held = self.state if self.state is not None else self.parked
        return None if held is None else len(held)

    # ------------------------------------------------------------------ obeying

    def obey(self, command: do.Command) -> None:
        """A command came through the channel."""
        now = self.world.clock.now()
        # the channel keeps the order
        self._read_at = max(self._read_at, now + self.world.rng.random() * 0.002)
        self._later(self._read_at - now, lambda: self._obey(command), always=True)

    def _obey(self, command: do.Command) -> None:
        if isinstance(command, do.Interrupt):
            if command.generation > self.target:
                self._come_out(command)
        elif isinstance(command, do.Advance):
            if self.phase == "asking" and command.generation == self.target:
                self._optimizer()
        elif isinstance(command, do.Resume):
            if command.generation >= self.target and self.must_gate:
                self._go_in(command)
        elif isinstance(command, do.Release):
            self.is_released = True
            if self.phase == "returned":
                self._exit(0)
        elif isinstance(command, do.GiveUp):
            self._exit(1)

    def _go_in(self, command: do.Resume) -> None:
        self.target, self.must_gate, self.plan = command.generation, False, command
        self.active = command.active
        self.generation, self.resumed_at = command.generation, self.world.clock.now()
        self._must_report_recovery = True
        if self.phase == "asking":
            self._park()
        self._enter()

    def _come_out(self, command: do.Interrupt) -> None:
        self.target, self.must_gate, self.plan = command.generation, True, None
        if self.phase in ("step", "restore", "enter", "returned", "raised", "paused"):
            self._unwind()
        elif self.phase in ("vote", "asking"):
            self._ask()

    def _unwind(self) -> None:
        """Leave whatever it is in, park, say so."""
        self._step_token += 1
        self._park()
        self.phase = "paused"
        self._say(
            ev.WorkerPaused, generation=self.target, version=self.version, clean=self.is_clean
        )

    def _park(self) -> None:
        if self.state is not None:
            self.parked, self.state = self.state, None

    def _ask(self) -> None:
        """The vote is over without a result here."""
        self._step_token += 1
        self.phase = "asking"
        self._say(ev.WorkerMayAdvance, generation=self.target, version=self.version)

    # ------------------------------------------------------------------ training

    def _booted(self) -> None:
        if self.world.is_declared:
            self._say(ev.WorkerDeclared)
        if self.must_gate:
            self._unwind()
        else:
            self._later(self.world.rng.random() * 0.02, self._enter_first)

    def _enter_first(self) -> None:
        if self.must_gate:
            self._unwind()
        else:
            self._enter()

    def _enter(self) -> None:
        if self.world.is_declared and not self.is_entered:
            self.is_entered = True
            self._say(ev.WorkerDeclared, entered=True)
        self.phase = "enter"
        self._step_token += 1
        self.world.meet(("init", self.generation), self, self._if_same(self._restore))

    def _restore(self) -> None:
        self.phase = "restore"
        plan = self.plan
        self._incoming = []
        if plan is not None and plan.version is not None:
            move = self.world.move_of(plan, self.rank)
            assert move.source is not None or self.is_clean, (
                f"rank {self.rank} was told to keep an inconsistent copy"
            )
            held = self.world.workers[self.rank if move.source is None else move.source].parked
            if held is None:
                return  # the source has died since: this entry leads nowhere
            assert len(held) == plan.version, (self.rank, move, len(held), plan.version)
            self._incoming = list(held)
        self.world.meet(("restore", self.generation), self, self._if_same(self._restored))

    def _restored(self) -> None:
        self.state, self.parked, self.is_clean = self._incoming, None, True
        if self.world.is_sharded:
            self._say(ev.WorkerHolds, shard=f"shard {self.rank % 2}")
        self._begin_step()

    def _begin_step(self) -> None:
        assert self.state is not None
        if len(self.state) == self.world.steps:
            self.phase = "returned"
            if self.world.is_declared:
                self._say(ev.WorkerReturned, generation=self.generation, version=len(self.state))
            else:
                self._exit(0)
            return
        self.phase = "step"
        self._later(
            self.world.step_s * (0.5 + self.world.rng.random()), self._if_same(self._all_reduce)
        )

    def _all_reduce(self) -> None:
        if self.raise_next:
            self.raise_next = False
            self._raise(FaultKind.RAISED, "ValueError: bad sample")
            return
        assert self.state is not None
        if self.world.is_sharded:
            self.phase = "vote"
        self.world.meet(
            ("step", self.generation, len(self.state)), self, self._if_same(self._optimizer)
        )

    def _optimizer(self) -> None:
        self.phase = "optimizer"  # an interrupt waits until the commit
        self._later(0.001 + self.world.rng.random() * 0.002, self._if_same(self._commit))

    def _commit(self) -> None:
        assert self.state is not None
        if self.tear_next and not self.must_gate:
            self.tear_next, self.is_clean = False, False
            self._raise(FaultKind.RAISED, "RuntimeError: a collective in the optimizer")
            return
        self.state.append(len(self.state))
        self.phase = "step"
        if self._must_report_recovery:
            self._must_report_recovery = False
            took = self.world.clock.now() - self.resumed_at
            self._say(
                ev.WorkerRecovered,
                generation=self.generation,
                version=len(self.state),
                groups_s=took / 2,
                state_s=took / 4,
                first_step_s=took / 4,
            )
        if self.must_gate:
            self._unwind()
        else:
            self._begin_step()

    def broke(self) -> None:
        """A peer's connection broke: the collective fails, if it is in one."""
        if not self.is_alive or self.is_frozen or self.must_gate:
            return
        is_in_vote = self.phase == "vote"
        if is_in_vote or (self.phase in _COLLECTIVES and self.world.is_declared):
            text = "RuntimeError: Connection closed by peer"
            self._raise(FaultKind.COMMUNICATION, text, may_advance=is_in_vote)
        elif self.phase in _COLLECTIVES:
            self._exit(1)

    def _raise(self, kind: FaultKind, text: str, *, may_advance: bool = False) -> None:
        self._step_token += 1
        version = self.version
        if not may_advance:
            self._park()
        self.phase = "asking" if may_advance else "raised"
        who = (self.rank, self.incarnation)
        fault = Fault(kind, *who, text, version=version, signature=text, traceback="...")
        self._say(
            ev.WorkerRaised,
            generation=self.generation,
            fault=fault,
            clean=self.is_clean,
            may_advance=may_advance,
        )

    # ------------------------------------------------------------------ small things

    def _exit(self, status: int) -> None:
        self.phase = "exiting"
        self._later(0.001 + self.world.rng.random() * 0.01, lambda: self.die(status), always=True)

    def _say(self, kind: type[ev.WorkerEvent], **details: object) -> None:
        now = self.world.clock.now()
        cause = f"{kind.__name__}:{self.rank}.{self.incarnation}:{now:.6f}"
        self._report(kind(now, cause, self.rank, self.incarnation, **details))  # type: ignore[arg-type]

    def _if_same(self, call: Callable[[], None]) -> Callable[[], None]:
        token = self._step_token

        def run() -> None:
            if self.is_alive and not self.is_frozen and token == self._step_token:
                call()

        return run

    def _later(self, seconds: float, call: Callable[[], None], *, always: bool = False) -> None:
        run = self._if_alive(call) if always else self._if_same(call)
        self.world.clock.call_in(seconds, run)

    def _if_alive(self, call: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            if self.is_alive and not self.is_frozen:
                call()

        return run
