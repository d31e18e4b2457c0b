"""The manager's and the agent's shell, over the network in memory.

The real machines, everything around them simulated.

Decide nothing, as the real ones. A gap in the sequence numbers of a peer, or a peer that is another
one than before, leads to a new registration, which repeats what matters.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from taskd.core import commands as do
from taskd.core import events as ev
from taskd.core.exits import SIGKILL
from taskd.core.job.machine import RecoveryMachine
from taskd.core.node import NodeMachine
from taskd.core.phase import JobPhase
from taskd.core.timeouts import Timeouts
from taskd.testing.network import MemoryNetwork
from taskd.testing.shared_reports import may_wait, together
from taskd.testing.watching import Watch
from taskd.testing.worker import SimulatedWorker, World

if TYPE_CHECKING:
    from taskd.testing.clock import FakeClock

MANAGER = "manager"


@dataclass(frozen=True, slots=True)
class Packet:
    """What travels.

    `content`: an event (to the manager), a command, or an answer below (to an agent). `life`: of
    the sender.
    """

    sequence: int
    life: str
    content: object


@dataclass(frozen=True, slots=True)
class Accepted:
    """Answer to a registration."""

    generation: int
    restarts_used: int


@dataclass(frozen=True, slots=True)
class Refused:
    """Answer to a registration."""

    reason: str
    is_taken: bool


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer to a heartbeat. `known` False: register again, please."""

    known: bool


Address = tuple[int, str]  # of an agent: its node, its life. One that takes its place has another

Newest = tuple[str, int]  # that was heard of a peer: its life, the number of its message


def newest_of(last: Newest | None, packet: Packet) -> tuple[Newest, bool, bool]:
    """What is known with this packet; whether one is missing before it; whether the peer is new."""
    if last is None or last[0] != packet.life:
        return (packet.life, packet.sequence), False, last is not None
    newest = (packet.life, max(last[1], packet.sequence))
    return newest, packet.sequence > last[1] + 1, False


def has_gap(heard: Newest | None, sent: Newest, under_way: Iterable[object]) -> bool:
    """Whether something of what this life sent has not arrived and will not.

    A heartbeat that is on its way is no gap: in a large job there always is one.
    """
    if heard == sent:
        return False
    if heard is None or heard[0] != sent[0]:
        return True
    number = heard[1]
    for packet in under_way:
        assert isinstance(packet, Packet)
        if packet.life != sent[0] or packet.sequence > number + 1:
            return True
        number = max(number, packet.sequence)
    return number != sent[1]


class Alarm:
    """Calls `ring` at the deadline of a machine."""

    def __init__(self, clock: "FakeClock", ring: Callable[[], None]) -> None:
        self._clock, self._ring, self._set_for = clock, ring, -1.0

    def set(self, deadline: float | None) -> None:
        """Ring then, unless it is set for then already."""
        if deadline is not None and deadline != self._set_for:
            self._set_for = deadline
            self._clock.call_at(deadline, self._ring, is_background=True)


class SimulatedManager:
    """One life of the manager."""

    def __init__(
        self,
        name: str,
        timeouts: Timeouts,
        clock: "FakeClock",
        network: MemoryNetwork,
        look_at: Callable[[RecoveryMachine, do.Command], None],
        make_watch: Callable[[RecoveryMachine], Watch],
        reschedule_s: float = 0.0,
        strategies: tuple[str, ...] = (),
    ) -> None:
        self.name = name
        self.machine = RecoveryMachine(
            "simulated", timeouts, strategies=strategies, reschedule_s=reschedule_s
        )
        self.is_alive = True
        self._clock, self._network, self._look_at = clock, network, look_at
        self._watch = make_watch(self.machine)
        self._alarm = Alarm(clock, self._tick)
        self._sequence: dict[Address, int] = {}
        self._heard: dict[Address, Newest] = {}
        self._gaps: set[Address] = set()
        network.listen(MANAGER, self._receive)

    def link_to(self, agent: Address) -> tuple[int, Newest | None]:
        """The numbers of the newest message to this agent, and of the newest from it.

        The second with the incarnation of the agent; None: a gap is known.
        """
        heard = None if agent in self._gaps else self._heard.get(agent)
        return self._sequence.get(agent, 0), heard

    def is_elected_by(self, node_count: int, ranks_per_node: int, voters: tuple[int, ...]) -> None:
        """The agents of these nodes have elected it."""
        self._feed(
            ev.ManagerElected(self._clock.now(), "elected", node_count, ranks_per_node, voters)
        )

    def kill(self) -> None:
        """SIGKILL."""
        self.is_alive = False
        self._network.unlisten(MANAGER)

    def _receive(self, sender: object, packet: object) -> None:
        assert isinstance(sender, tuple)
        assert isinstance(packet, Packet)
        self._heard[sender], has_gap, _ = newest_of(self._heard.get(sender), packet)
        if has_gap:
            self._gaps.add(sender)
        content = packet.content
        node = self.machine.membership.nodes.get(sender[0])
        has_session = node is not None and node.is_present and node.agent_incarnation == packet.life
        if isinstance(content, ev.AgentRegistered):
            self._register(sender, content)
        elif isinstance(content, ev.AgentHeard):
            if has_session:
                self._feed(content)
            known = has_session and sender not in self._gaps
            self._send(sender, Answer(known))
        elif has_session:
            assert isinstance(content, ev.Event)
            self._feed(content)

    def _register(self, sender: Address, event: ev.AgentRegistered) -> None:
        if self.machine.postpones(event):
            self._feed(event)
            return
        refusal = self.machine.refusal(event)
        if refusal is not None:
            refused = Refused(refusal, self.machine.is_taken(event))
            self._send(sender, refused)
            self._feed(event)
            return
        self._gaps.discard(sender)
        commands = self._handle(event)
        accepted = Accepted(self.machine.generation, self.machine.restarts_used)
        self._send(sender, accepted)
        self._execute(commands)

    def _feed(self, event: ev.Event) -> None:
        self._execute(self._handle(event))

    def _handle(self, event: ev.Event) -> list[do.Command]:
        commands = self._watch.handle(event)
        for command in commands:
            self._look_at(self.machine, command)
        return commands

    def _execute(self, commands: list[do.Command]) -> None:
        nodes = self.machine.membership.nodes
        for command in commands:
            if isinstance(command, do.ReplaceWorker | do.KillWorker):
                to = nodes[command.node_rank].agent_incarnation
                self._send((command.node_rank, to), command)
            elif isinstance(command, do.RepeatOrder):
                to = nodes[command.node_rank].agent_incarnation
                self._send((command.node_rank, to), command.order)
            elif isinstance(command, do.EndJob):
                self.kill()
            elif not isinstance(command, do.RecordRecovery | do.ReportNoProgress):
                for node_rank in sorted(nodes):
                    if nodes[node_rank].is_present:
                        self._send((node_rank, nodes[node_rank].agent_incarnation), command)
        self._alarm.set(self.machine.next_deadline())

    def _send(self, to: Address, content: object) -> None:
        self._sequence[to] = self._sequence.get(to, 0) + 1
        packet = Packet(self._sequence[to], self.name, content)
        self._network.send(MANAGER, to, packet, is_background=isinstance(content, Answer))

    def _tick(self) -> None:
        if self.is_alive and self.machine.phase is not JobPhase.ENDED:
            self._feed(ev.Tick(self._clock.now(), "tick"))


_WITHOUT_COLLECTIVES = frozenset({"boot", "paused", "raised", "exiting", "returned"})


class SimulatedAgent:
    """One node."""

    def __init__(
        self,
        node_rank: int,
        machine: NodeMachine,
        timeouts: Timeouts,
        world: World,
        network: MemoryNetwork,
    ) -> None:
        self.node_rank, self.machine = node_rank, machine
        self.outcome: do.FinishRun | do.FallBack | None = None
        self.is_alive = True
        self.fail_starts = 0
        self._name = machine.agent_incarnation
        self.address: Address = (node_rank, self._name)
        self._timeouts, self._world, self._network = timeouts, world, network
        self._clock, self._rng = world.clock, world.rng
        self._alarm = Alarm(world.clock, self._tick)
        self._processes: dict[tuple[int, int], SimulatedWorker] = {}
        self._starts: dict[int, int] = {}  # by rank: of whose store its environment tells
        self._sequence = 0
        self._manager: Newest | None = None
        self._heard_at = 0.0
        self._is_joined = self._is_refused = False
        self._host_answered: bool | None = None  # of the manager, which is silent
        self._still_until = 0.0
        self._waiting: list[Callable[[], None]] = []  # to be done when it goes on
        self._gathered: list[ev.WorkerEvent] = []
        network.listen(self.address, self._receive)
        for life in machine.lives.present.values():
            if life.has_process:
                who = (life.rank, life.incarnation)
                self._spawn(do.SpawnWorker("start", 0, *who, False, 0, start=0))
        world.clock.call_in(self._rng.random() * 0.02, self._beat, is_background=True)

    @property
    def is_known(self) -> bool:
        """Whether a manager has accepted it."""
        return self._is_joined

    def has_news(self, manager: SimulatedManager | None) -> bool:
        """Whether its next heartbeats will bring more than a lease.

        A registration, a gap that was not noticed yet, the manager's silence.
        """
        if not self.is_alive or self._is_refused:
            return False
        if manager is None or not manager.is_alive:
            return self._is_joined
        if not self._is_joined:
            return True
        sent, heard = manager.link_to(self.address)
        to, back = (self.address, MANAGER), (MANAGER, self.address)
        return has_gap(
            heard, (self._name, self._sequence), self._network.under_way(*to)
        ) or has_gap(self._manager, (manager.name, sent), self._network.under_way(*back))

    # ------------------------------------------------------------------ processes

    def _spawn(self, command: do.SpawnWorker) -> None:
        rank, incarnation = command.rank, command.incarnation
        if self.fail_starts:
            self.fail_starts -= 1
            event = ev.WorkerStartFailed(
                self._clock.now(), "start", rank, incarnation, "fork: no memory"
            )
            self._clock.call_in(0.001, lambda: self._come(event))
            return
        start = self._starts.setdefault(rank, self._world.newest_start)
        if command.start is not None:
            start = self._starts[rank] = command.start
            if self.address[0] == 0:  # it has the store of each start, and writes down the newest
                self._world.newest_start = start
        worker = SimulatedWorker(
            self._world,
            command,
            start,
            lambda event: self._clock.call_in(0.0005, lambda: self._come(event)),
            self._exited,
        )
        self._processes[rank, incarnation] = worker
        started = ev.WorkerStarted(
            self._clock.now() + 0.001, "start", rank, incarnation, 1000 + rank
        )
        self._clock.call_in(0.001, lambda: self._come(started))

    def _exited(self, worker: SimulatedWorker, status: int) -> None:
        """The kernel: the alarm rings before the exit is known.

        Peers see a broken connection, or nothing at all.
        """
        now, life = self._clock.now(), (worker.rank, worker.incarnation)
        versions = () if worker.version is None else (worker.version,)
        if self._rng.random() < 0.9:
            alarm = ev.AlarmRang(
                now + 0.0005, f"alarm:{life}", *life, now, worker.version, worker.phase, versions
            )
            self._clock.call_in(0.0005, lambda: self._come(alarm))
        exit_s = 0.001 + self._rng.random() * 0.3
        ended = ev.WorkerExited(
            now + exit_s, f"exit:{life}", *life, status, worker.version, worker.phase, versions
        )
        self._clock.call_in(exit_s, lambda: self._come(ended))
        is_newest = self._world.workers[worker.rank] is worker  # else nobody is connected with it
        if is_newest and worker.phase not in _WITHOUT_COLLECTIVES:
            for peer in list(self._world.workers.values()):
                if peer.rank != worker.rank and (
                    not self._world.is_declared or self._rng.random() < 0.3
                ):
                    self._clock.call_in(self._rng.random() * 0.02, peer.broke)

    def kill(self) -> None:
        """The agent and all its workers are gone."""
        self.is_alive = False
        self._network.unlisten(self.address)
        for worker in self._processes.values():
            worker.die(-SIGKILL)

    def stand_still(self, seconds: float) -> None:
        """The agent does nothing for so long; what comes meanwhile it finds afterwards."""
        self._still_until = max(self._still_until, self._clock.now() + seconds)
        self._clock.call_at(self._still_until, self._go_on)

    def _go_on(self) -> None:
        if self._still_until <= self._clock.now():
            waiting, self._waiting = self._waiting, []
            for call in waiting:
                call()

    def _is_still(self, call: Callable[[], None]) -> bool:
        """Whether it stands still; then it does this later, in the order in which it came."""
        is_still = self._still_until > self._clock.now() or bool(self._waiting)
        if is_still:
            self._waiting.append(call)
        return is_still

    # ------------------------------------------------------------------ the machine

    def _come(self, event: ev.Event) -> None:
        """The kernel or a worker says something."""
        if not self._is_still(lambda: self._come(replace(event, now=self._clock.now()))):
            self._feed(event)

    def _feed(self, event: ev.Event) -> None:
        if not self.is_alive:
            return
        commands = self.machine.handle(event)
        self.machine.check()
        for command in commands:
            self._execute(command)
        self._alarm.set(self.machine.next_deadline())

    def _execute(self, command: do.Command) -> None:
        if isinstance(command, do.SpawnWorker):
            self._spawn(command)
        elif isinstance(command, do.SignalWorker):
            worker = self._processes.get((command.rank, command.incarnation))
            if worker is not None and (command.signal_number == SIGKILL or not worker.is_frozen):
                worker.die(-command.signal_number)
        elif isinstance(command, do.TellWorker):
            worker = self._processes.get((command.rank, command.incarnation))
            if worker is not None:  # else its start has failed, which the machine hears next
                worker.obey(command.command)
        elif isinstance(command, do.TellManager):
            self._tell(command.event)
        elif isinstance(command, do.FinishRun | do.FallBack):
            self._finish(command)

    def _finish(self, command: do.FinishRun | do.FallBack) -> None:
        self.outcome = command
        outcome = command.outcome if isinstance(command, do.FinishRun) else "fallback"
        self._send(
            ev.AgentLeft(self._clock.now(), "farewell", self.node_rank, outcome, command.reason)
        )
        self.kill()

    def _tick(self) -> None:
        if not self._is_still(self._tick):
            self._feed(ev.Tick(self._clock.now(), "tick"))

    # ------------------------------------------------------------------ the manager

    def _tell(self, event: object) -> None:
        """In a large job with what other ranks say at about the same time."""
        if not self._timeouts.gather_s or not may_wait(event):
            self._send(event)
            return
        assert isinstance(event, ev.WorkerEvent)
        if not self._gathered:
            self._clock.call_in(self._timeouts.gather_s, self._say_gathered)
        self._gathered.append(event)

    def _say_gathered(self) -> None:
        gathered, self._gathered = self._gathered, []
        if self.is_alive:
            for event in together(gathered):
                self._say(event)

    def _send(self, content: object) -> None:
        self._say_gathered()
        self._say(content)

    def _say(self, content: object) -> None:
        self._sequence += 1
        packet = Packet(self._sequence, self._name, content)
        self._network.send(
            self.address, MANAGER, packet, is_background=isinstance(content, ev.AgentHeard)
        )

    def _beat(self) -> None:
        if not self.is_alive or self._is_refused or self._is_still(self._beat):
            return
        now = self._clock.now()
        self._clock.call_in(self._timeouts.heartbeat_s, self._beat, is_background=True)
        if not self._is_joined:
            self._try_host(now)
            self._register()
        elif now - self._heard_at > self._timeouts.manager_silence_s:
            self._is_joined, self._host_answered = False, None
            self._feed(ev.ManagerLost(now, "silence"))
        else:
            self._send(ev.AgentHeard(now, "heartbeat", self.node_rank))

    def _try_host(self, now: float) -> None:
        answers = not self._network.is_parted(MANAGER, self.address)
        if answers != self._host_answered:
            self._host_answered = answers
            self._feed(ev.ManagerHostHeard(now, "reach", answers))

    def _register(self) -> None:
        self._send(self.machine.registration(self._clock.now()))

    def _receive(self, _sender: object, packet: object) -> None:
        assert isinstance(packet, Packet)
        if self._is_still(lambda: self._receive(_sender, packet)) or not self.is_alive:
            return
        self._heard_at = now = self._clock.now()
        self._manager, has_gap, is_other = newest_of(self._manager, packet)
        content = packet.content
        if isinstance(content, Accepted):
            self._is_joined = True
            self._feed(ev.ManagerJoined(now, "accepted", content.generation, content.restarts_used))
        elif isinstance(content, Refused):
            self._is_refused = True
            self._feed(ev.ManagerRefused(now, "refused", content.reason, content.is_taken))
        elif isinstance(content, Answer):
            if not content.known or has_gap or is_other:
                self._register()
        else:
            self._feed(ev.CommandReceived(now, "command", content))
            if has_gap:
                self._register()
