"""RecoveryMachine under any history: stale, repeated, crossing and senseless reports included.

The model knows only what goes in and what comes out: which life of a rank is current, and who has
said since the last Interrupt that it is outside.
"""

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from taskd.core import commands as do
from taskd.core import events as ev
from taskd.core.faults import Fault, FaultKind
from taskd.core.job.machine import RecoveryMachine
from taskd.core.phase import DUMPING, JobPhase
from taskd.core.timeouts import Timeouts
from taskd.replay import dump_lines, load_lines, replay

KINDS = [
    FaultKind.LOST,
    FaultKind.KILLED,
    FaultKind.CRASHED,
    FaultKind.EXITED,
    FaultKind.START_FAILED,
]
STATES = ["starting", "running", "paused", "returned", "lost", "finished"]
RANKS = st.integers(0, 3)
VERSIONS = st.one_of(st.none(), st.integers(0, 3))


class AnyHistory(RuleBasedStateMachine):
    @initialize(
        nodes=st.sampled_from([1, 2]),
        budget=st.sampled_from([2, 1000]),
        generation=st.integers(0, 3),
        strategies=st.sampled_from([(), ("dump",), ("recover-in-place", "dump")]),
    )
    def begin(self, nodes: int, budget: int, generation: int, strategies: tuple[str, ...]) -> None:
        self.machine = RecoveryMachine("job", Timeouts.derive(30.0), strategies=strategies)
        self.nodes, self.budget = nodes, budget
        self.now, self.count = 0.0, 0
        self.lives = dict.fromkeys(range(4), 0)
        self.dead: set[int] = set()
        self.done: set[int] = set()
        self.outside: set[int] = set()
        self.entered: set[tuple[int, int]] = set()
        self.raised_in: set[tuple[int, int]] = set()  # rank and life: its process may be broken
        self.highest = (0, 0)
        self.last_resume: do.Resume | None = None
        self.is_finishing = False
        self.last_advance: do.Advance | None = None
        self.first_generation = generation

    # ------------------------------------------------------------------ in

    def send(self, kind, *details) -> list[do.Command]:
        self.now += 0.125
        self.count += 1
        commands = self.machine.handle(kind(self.now, f"e{self.count}", *details))
        self.machine.check()
        for command in commands:
            self.look_at(command)
            self.look_at_steps(command)
        return commands

    def look_at_steps(self, command: do.Command) -> None:
        if isinstance(command, do.Interrupt):
            self.is_finishing = command.finish_step
        # else: said again to an agent that came back
        elif isinstance(command, do.Advance) and command != self.last_advance:
            self.last_advance = command
            assert self.is_finishing or set(command.ranks) <= self.outside, (
                "somebody is sent on who does not wait"
            )
            self.outside -= set(command.ranks)

    def look_at(self, command: do.Command) -> None:
        assert command.generation <= self.machine.generation
        if isinstance(command, do.KillWorker):
            assert command.incarnation == self.lives[command.rank]
            self.dead.add(command.rank)
        elif isinstance(command, do.ReplaceWorker):
            # else: said again to an agent that came back
            if command.incarnation != self.lives[command.rank]:
                ended_before_it_began = (
                    command.rank in self.done
                    and (command.rank, self.lives[command.rank]) not in self.entered
                )
                is_broken = (
                    command.rank in self.outside
                    and (command.rank, self.lives[command.rank]) in self.raised_in
                )
                assert command.rank in self.dead or ended_before_it_began or is_broken, (
                    "a live or a finished rank was replaced"
                )
                assert command.incarnation == self.lives[command.rank] + 1
                self.lives[command.rank] = command.incarnation
                self.dead.discard(command.rank)
                self.done.discard(command.rank)
                self.outside.discard(command.rank)
        elif isinstance(command, do.RestartGroup):
            if dict(command.incarnations) != self.lives:
                assert dict(command.incarnations) == {
                    rank: max(life + 1, command.generation) for rank, life in self.lives.items()
                }
                self.lives = dict(command.incarnations)
                self.dead, self.done, self.outside = set(), set(), set()
        elif isinstance(command, do.Dump):
            assert set(command.writers) <= self.outside - self.dead - self.done, (
                "somebody writes who is not outside"
            )
            assert command.writers
            assert command.version > 0
        elif isinstance(command, do.Publish):
            assert command.rank not in self.dead | self.done
        elif isinstance(command, do.Resume) and command != self.last_resume:  # else: said again
            self.last_resume = command
            there = set(self.lives) - self.dead
            assert there - self.done <= self.outside, "somebody is resumed who is not outside"
            assert {move.rank for move in command.moves} <= there - self.done
            assert {move.source for move in command.moves if move.source is not None} <= there
            self.outside = set()

    def life(self, rank: int, age: int) -> int:
        return max(0, self.lives[rank] - age)

    def counts(self, rank: int, age: int = 0) -> bool:
        """Whether a report of this life is news."""
        is_known = rank in self.machine.membership.members
        return (
            is_known
            and self.life(rank, age) == self.lives[rank]
            and rank not in self.dead | self.done
        )

    @rule(
        node=st.integers(0, 1),
        ages=st.lists(st.integers(0, 1), min_size=4, max_size=4),
        behind=st.integers(0, 1),
        states=st.lists(st.sampled_from(STATES), min_size=4, max_size=4),
        versions=st.lists(VERSIONS, min_size=4, max_size=4),
        entered=st.lists(st.booleans(), min_size=4, max_size=4),
    )
    def registered(self, node, ages, behind, states, versions, entered) -> None:
        node %= self.nodes
        ranks = range(node * 4 // self.nodes, (node + 1) * 4 // self.nodes)
        is_new = node not in self.machine.membership.nodes
        generation = self.first_generation if is_new else max(0, self.machine.generation - behind)
        known = self.machine.membership.nodes.get(node)
        is_welcome = known is None or known.outcome in (None, "lost")
        reports = []
        for rank in ranks:
            age = 0 if is_new else ages[rank]
            state = "running" if states[rank] == "starting" and not is_new else states[rank]
            if is_welcome and self.life(rank, age) == self.lives[rank] and rank not in self.done:
                if state == "lost":
                    self.dead.add(rank)
                elif state == "finished":
                    self.done.add(rank)
                    self.dead.discard(rank)
                elif state == "paused":
                    self.outside.add(rank)
                if entered[rank]:
                    self.entered.add((rank, self.lives[rank]))
            declared = bool(age) or entered[rank]
            reports.append(
                ev.WorkerReport(
                    rank, self.life(rank, age), state, declared, versions[rank], True, entered[rank]
                )
            )
        self.send(
            ev.AgentRegistered,
            node,
            f"a{node}",
            self.nodes,
            4,
            self.budget,
            generation,
            0,
            tuple(reports),
        )

    @rule(rank=RANKS, age=st.integers(0, 1))
    def started(self, rank, age) -> None:
        self.send(ev.WorkerStarted, rank, self.life(rank, age), 1)

    @rule(rank=RANKS, entered=st.booleans())
    def declared(self, rank, entered) -> None:
        if entered and self.counts(rank):
            self.entered.add((rank, self.lives[rank]))
        self.send(ev.WorkerDeclared, rank, self.lives[rank], entered)

    @rule(
        rank=RANKS,
        age=st.integers(0, 1),
        kind=st.sampled_from(KINDS),
        version=VERSIONS,
        ago=st.sampled_from([0.0, 0.2]),
    )
    def lost(self, rank, age, kind, version, ago) -> None:
        life = self.life(rank, age)
        if self.counts(rank, age):
            self.dead.add(rank)
        fault = Fault(kind, rank, life, kind.value, version=version)
        self.send(ev.WorkerLost, rank, life, fault, ago, ())

    @rule(rank=RANKS, age=st.integers(0, 2), kind=st.sampled_from(KINDS))
    def exit_known(self, rank, age, kind) -> None:
        life = self.life(rank, age)
        self.send(ev.WorkerExitKnown, rank, life, Fault(kind, rank, life, kind.value))

    @rule(
        rank=RANKS,
        age=st.integers(0, 1),
        version=VERSIONS,
        clean=st.booleans(),
        behind=st.sampled_from([0, 0, 0, 1]),
    )
    def paused(self, rank, age, version, clean, behind) -> None:
        generation = self.machine.generation - behind
        # Before everybody has joined it may speak of what an earlier manager began: it is outside
        # until somebody resumes it.
        if self.counts(rank, age) and (behind == 0 or self.machine.phase is JobPhase.JOINING):
            self.outside.add(rank)
        self.send(ev.WorkerPaused, rank, self.life(rank, age), generation, version, clean)

    @rule(
        rank=RANKS,
        age=st.integers(0, 1),
        behind=st.integers(0, 1),
        text=st.sampled_from("ab"),
        version=VERSIONS,
        communication=st.booleans(),
        clean=st.booleans(),
    )
    def raised(self, rank, age, behind, text, version, communication, clean) -> None:
        kind = FaultKind.COMMUNICATION if communication else FaultKind.RAISED
        life = self.life(rank, age)
        if self.counts(rank, age):
            self.outside.add(rank)
            if not communication:
                self.raised_in.add((rank, life))
        fault = Fault(kind, rank, life, text, version=version, signature=text)
        self.send(ev.WorkerRaised, rank, life, self.machine.generation - behind, fault, clean)

    @rule(rank=RANKS, behind=st.sampled_from([0, 0, 1]), version=st.integers(0, 3))
    def may_advance(self, rank, behind, version) -> None:
        # In a vote that broke it waits; at the end of a step it does not wait yet.
        is_voting = not (self.is_finishing and self.machine.phase is JobPhase.PAUSING)
        if (
            self.counts(rank)
            and is_voting
            and (behind == 0 or self.machine.phase is JobPhase.JOINING)
        ):
            self.outside.add(rank)
        self.send(
            ev.WorkerMayAdvance, rank, self.lives[rank], self.machine.generation - behind, version
        )

    @rule(rank=RANKS, behind=st.sampled_from([0, 0, 1]), version=st.integers(0, 3))
    def recovered(self, rank, behind, version) -> None:
        self.send(
            ev.WorkerRecovered,
            rank,
            self.lives[rank],
            self.machine.generation - behind,
            version,
            0.1,
            0.1,
            0.1,
        )

    @rule(rank=RANKS, behind=st.sampled_from([0, 0, 1]))
    def returned(self, rank, behind) -> None:
        self.send(ev.WorkerReturned, rank, self.lives[rank], self.machine.generation - behind, 3)

    @rule(
        rank=RANKS,
        behind=st.sampled_from([0, 0, 1]),
        stage=st.sampled_from(["written", "published", "failed"]),
    )
    def dumped(self, rank, behind, stage) -> None:
        self.send(
            ev.WorkerDumped,
            rank,
            self.lives[rank],
            self.machine.generation - behind,
            stage,
            "somewhere",
        )

    @precondition(lambda self: self.count > 10)
    @rule(node=st.integers(0, 1))
    def draining(self, node) -> None:
        self.send(ev.AgentDraining, node % self.nodes, "SIGTERM", 30.0)

    @rule(rank=RANKS)
    def finished(self, rank) -> None:
        if self.counts(rank):
            self.done.add(rank)
        self.send(ev.WorkerFinished, rank, self.lives[rank])

    @rule(node=st.integers(0, 1))
    def heard(self, node) -> None:
        self.send(ev.AgentHeard, node)

    @precondition(lambda self: self.count > 10)
    @rule(
        node=st.integers(0, 1),
        outcome=st.sampled_from(["succeeded", "succeeded", "failed", "stopped"]),
    )
    def left(self, node, outcome) -> None:
        node %= self.nodes
        if outcome == "succeeded":
            ranks = set(range(node * 4 // self.nodes, (node + 1) * 4 // self.nodes))
            self.done |= ranks & set(self.machine.membership.members)
            self.dead -= self.done
        self.send(ev.AgentLeft, node, outcome, "")

    @precondition(lambda self: self.machine.next_deadline() is not None)
    @rule()
    def time_passes(self) -> None:
        self.now = max(self.now, self.machine.next_deadline() or 0.0)
        self.send(ev.Tick)

    # ------------------------------------------------------------------ always

    @invariant()
    def generation_and_budget_only_grow(self) -> None:
        if hasattr(self, "machine"):
            now = (self.machine.generation, self.machine.restarts_used)
            assert now[0] >= self.highest[0]
            assert now[1] >= self.highest[1]
            if self.machine.membership.nodes:
                assert now[1] <= self.machine.membership.max_restarts
            self.highest = now

    def teardown(self) -> None:
        if not hasattr(self, "machine"):
            return
        self.everybody_answers()
        fresh, entries = load_lines(dump_lines(self.machine))
        assert replay(fresh, entries) == []
        assert fresh.phase is self.machine.phase

    def dump(self) -> None:
        """Nobody says how a process died; everybody writes."""
        for node in range(self.nodes):
            self.send(ev.AgentHeard, node)
        self.now = max(self.now, self.machine._state.status_by or 0.0)
        self.send(ev.Tick)
        members = self.machine.membership.members
        for stage in ("written", "published"):
            for rank in sorted(members):
                self.send(
                    ev.WorkerDumped,
                    rank,
                    members[rank].incarnation,
                    self.machine.generation,
                    stage,
                    "/somewhere",
                )

    def everybody_answers(self) -> None:
        """Every fault ends in Resume, RestartGroup or GiveUp."""
        for _ in range(50):
            phase, members = self.machine.phase, self.machine.membership.members
            if phase is JobPhase.PAUSING:
                for rank in sorted(members):
                    if self.machine.phase is JobPhase.PAUSING and members[rank].is_live:
                        self.outside.add(rank)
                        self.send(
                            ev.WorkerPaused,
                            rank,
                            members[rank].incarnation,
                            self.machine.generation,
                            1,
                            True,
                        )
            elif phase in DUMPING:
                self.dump()
            elif phase is JobPhase.RESTARTING:
                for rank in sorted(members):
                    self.send(ev.WorkerStarted, rank, members[rank].incarnation, 1)
                    self.send(
                        ev.WorkerReturned,
                        rank,
                        members[rank].incarnation,
                        self.machine.generation,
                        1,
                    )
            elif phase is JobPhase.SUSPECTING:
                for node in range(self.nodes):
                    self.send(ev.AgentHeard, node)
                self.now = max(self.now, self.machine.next_deadline() or 0.0)
                self.send(ev.Tick)
            else:
                break
        assert self.machine.phase not in (
            JobPhase.PAUSING,
            JobPhase.RESTARTING,
            JobPhase.SUSPECTING,
            *DUMPING,
        ), self.machine.story.last()


AnyHistory.TestCase.settings = settings(
    max_examples=settings.default.max_examples * 3 // 2, stateful_step_count=40
)
TestAnyHistory = AnyHistory.TestCase
