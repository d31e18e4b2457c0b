"""NodeMachine under any history.

It never starts a life twice, never talks to the dead, and always ends.
"""

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from taskd.core import commands as do
from taskd.core import events as ev
from taskd.core.exits import SIGKILL
from taskd.core.faults import Fault, FaultKind
from taskd.core.node import NodeMachine
from taskd.core.phase import NodePhase
from taskd.core.timeouts import Timeouts
from taskd.replay import dump_lines, load_lines, replay

RANKS = st.integers(0, 1)
AGES = st.integers(0, 1)


class AnyNodeHistory(RuleBasedStateMachine):
    @initialize(wait_for_exit=st.booleans())
    def begin(self, wait_for_exit: bool) -> None:
        self.machine = NodeMachine(0, range(2), Timeouts.derive(30.0), wait_for_exit=wait_for_exit)
        self.wait_for_exit = wait_for_exit
        self.now = 0.0
        self.generation = 0
        self.spawned = {(0, 0), (1, 0)}
        self.processes = {(0, 0), (1, 0)}  # spawned and not reaped
        self.killed: set[tuple[int, int]] = set()

    def send(self, kind, *details) -> list[do.Command]:
        self.now += 0.125
        commands = self.machine.handle(kind(self.now, "c", *details))
        self.machine.check()
        for command in commands:
            self.look_at(command)
        return commands

    def look_at(self, command: do.Command) -> None:
        if isinstance(command, do.SpawnWorker):
            life = (command.rank, command.incarnation)
            assert life not in self.spawned, "a life was started twice"
            others = {other for other in self.processes if other[0] == command.rank}
            assert others <= self.killed, "a new life beside one that nobody has killed"
            if self.wait_for_exit:
                assert not others
            self.spawned.add(life)
            self.processes.add(life)
        elif isinstance(command, do.TellWorker | do.SignalWorker):
            assert (command.rank, command.incarnation) in self.processes, "a message to nobody"
            if isinstance(command, do.SignalWorker) and command.signal_number == SIGKILL:
                self.killed.add((command.rank, command.incarnation))

    def life(self, rank: int, age: int) -> int:
        return max(0, self.machine.lives.present[rank].incarnation - age)

    @rule(rank=RANKS, age=AGES, phase=st.sampled_from(["step", "exiting", "boot"]))
    def alarm(self, rank, age, phase) -> None:
        self.send(ev.AlarmRang, rank, self.life(rank, age), self.now, 1, phase)

    @precondition(lambda self: self.processes)
    @rule(which=st.integers(0, 9), status=st.sampled_from([0, 1, -9]))
    def exit(self, which, status) -> None:
        life = sorted(self.processes)[which % len(self.processes)]
        self.processes.discard(life)
        self.send(ev.WorkerExited, *life, status, 1, "step")

    @rule(rank=RANKS, age=AGES)
    def started(self, rank, age) -> None:
        self.send(ev.WorkerStarted, rank, self.life(rank, age), 1)

    @rule(rank=RANKS, age=AGES, entered=st.booleans())
    def declared(self, rank, age, entered) -> None:
        self.send(ev.WorkerDeclared, rank, self.life(rank, age), entered)

    @rule(rank=RANKS, age=AGES, behind=AGES)
    def paused(self, rank, age, behind) -> None:
        self.send(ev.WorkerPaused, rank, self.life(rank, age), self.generation - behind, 1, True)

    @rule(rank=RANKS, age=AGES)
    def raised(self, rank, age) -> None:
        fault = Fault(FaultKind.RAISED, rank, self.life(rank, age), "x")
        self.send(ev.WorkerRaised, rank, self.life(rank, age), self.generation, fault, True)

    @rule(rank=RANKS, age=AGES)
    def returned(self, rank, age) -> None:
        self.send(ev.WorkerReturned, rank, self.life(rank, age), self.generation, 1)

    @rule(event=st.sampled_from([ev.ManagerJoined, ev.ManagerLost, ev.ManagerRefused]))
    def manager(self, event) -> None:
        self.send(event, *{ev.ManagerJoined: (0, 0), ev.ManagerRefused: ("no",)}.get(event, ()))

    def command(self, kind, *details) -> None:
        self.send(ev.CommandReceived, kind("c", self.generation, *details))

    @rule(step=AGES)
    def interrupt(self, step) -> None:
        self.generation += step
        self.command(do.Interrupt, "x")

    @rule(rank=RANKS, step=AGES)
    def replace(self, rank, step) -> None:
        self.command(do.ReplaceWorker, 0, rank, self.life(rank, 0) + step, 1)

    @rule(rank=RANKS, age=AGES)
    def kill(self, rank, age) -> None:
        self.command(do.KillWorker, 0, rank, self.life(rank, age), "x")

    @rule()
    def resume(self) -> None:
        self.command(do.Resume, 1, (), 1)

    @rule(step=AGES)
    def restart(self, step) -> None:
        self.generation += step
        self.command(
            do.RestartGroup, 1, "x", tuple((rank, self.life(rank, 0) + step) for rank in range(2))
        )

    @rule()
    def release(self) -> None:
        self.command(do.Release)

    @precondition(lambda self: self.generation > 1)
    @rule()
    def give_up(self) -> None:
        self.command(do.GiveUp, "x", 0, None)

    @precondition(lambda self: self.machine.next_deadline() is not None)
    @rule()
    def time_passes(self) -> None:
        self.now = max(self.now, self.machine.next_deadline() or 0.0)
        self.send(ev.Tick)

    @invariant()
    def processes_are_known(self) -> None:
        if hasattr(self, "machine") and self.machine.phase is not NodePhase.DONE:
            known = {
                (life.rank, life.incarnation)
                for life in self.machine.lives.all()
                if life.has_process
            }
            assert known == self.processes

    def teardown(self) -> None:
        if not hasattr(self, "machine"):
            return
        if self.machine.phase is not NodePhase.DONE:
            self.command(do.GiveUp, "the end", None, None)
            for life in sorted(self.processes):
                self.processes.discard(life)
                self.send(ev.WorkerExited, *life, -9, 1, "step")
        assert self.machine.phase is NodePhase.DONE
        fresh, entries = load_lines(dump_lines(self.machine))
        assert replay(fresh, entries) == []


AnyNodeHistory.TestCase.settings = settings(
    max_examples=settings.default.max_examples, stateful_step_count=40
)
TestAnyNodeHistory = AnyNodeHistory.TestCase
