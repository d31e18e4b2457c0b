"""Agents of a large job, imitated on real sockets: what a manager hears of thousands of nodes.

Each has a connection of its own and says what the agent and the workers of a node would: it
registers, tells each second how far its ranks have come, and obeys. Nothing is trained, and no
process is started: ranks stop at once when they are told to, and commit at once when they may go
on, which is the hardest for a manager: all reports come together.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

from taskd.core import commands, events
from taskd.core.faults import Fault, FaultKind
from taskd.core.marks import Mark
from taskd.core.worker_state import WorkerState
from taskd.transport import zeromq
from taskd.wire import codec, messages, translate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from taskd.clock import Clock

BEAT_S = 1.0  # as `Timeouts.heartbeat_s` of the default fault timeout
TIMES_EVERY = 10  # heartbeats: the time spent in each phase is told this often
_PER_CONTEXT = 500  # sockets: ZeroMQ allows 1023 in each
_TIMES = tuple((name, 1000, 25.0) for name in ("data", "forward", "backward", "optimizer"))


class ImitatedAgent:
    """One node. `version` is what all its ranks have committed.

    `told_at`: by the name and the generation of an order, when it arrived (seconds of the clock).
    """

    def __init__(
        self, job_id: str, node_rank: int, node_count: int, ranks_per_node: int, clock: Clock
    ) -> None:
        self.node_rank, self.node_count = node_rank, node_count
        first = node_rank * ranks_per_node
        self.incarnations = dict.fromkeys(range(first, first + ranks_per_node), 0)
        self.version, self.generation = 5, 0
        self.accepted_at: float | None = None
        self.answered_s: list[float] = []  # from a heartbeat to its answer
        self.registrations = 0
        self.told_at: dict[tuple[str, int], float] = {}
        self._world_size = node_count * ranks_per_node
        self._sender = (job_id, "agent", node_rank, None, f"{node_rank:032x}")
        self._clock = clock
        self._sequence = self._beats = 0
        self._killed: int | None = None
        self._beat_at = 0.0
        self._link: zeromq.Dealer | None = None

    def connect(self, address: str, beside: zeromq.Dealer | None) -> zeromq.Dealer:
        """Its connection."""
        self._link = zeromq.Dealer(address, f"agent-{self.node_rank}", beside=beside)
        return self._link

    def register(self) -> None:
        """All ranks run, and are in their function."""
        self.registrations += 1
        reports = tuple(
            events.WorkerReport(
                rank, life, WorkerState.RUNNING, declared=True, version=self.version, entered=True
            )
            for rank, life in self.incarnations.items()
        )
        self._tell(
            events.AgentRegistered, self.node_rank, str(self._sender[-1]), self.node_count,
            self._world_size, 1000, self.generation, 0, reports,
        )  # fmt: skip

    def beat(self) -> None:
        """A sign of life; all ranks train."""
        if self.accepted_at is None:
            self.register()
            return
        self._beats += 1
        self._beat_at = self._clock.now()
        times = _TIMES if self._beats % TIMES_EVERY == self.node_rank % TIMES_EVERY else ()
        marks = tuple(
            Mark(
                rank, life, self.generation, self.version, "forward", 0.0512, 0.0101, 0.0203,
                slowest_s=0.21, times=times,
            )
            for rank, life in self.incarnations.items()
        )  # fmt: skip
        self._send(messages.Heartbeat(marks), "heartbeat")

    def kill(self, rank: int) -> None:
        """A process of this node is gone."""
        self._killed, life = rank, self.incarnations[rank]
        detail = f"SIGKILL number {life}"
        fault = Fault(FaultKind.KILLED, rank, life, detail, version=self.version, signature=detail)
        self._tell(events.WorkerLost, rank, life, fault, 0.001, (self.version,))

    def take(self, data: bytes) -> None:
        """Obey."""
        envelope, message = codec.decode(data)
        match message:
            case messages.Accepted():
                if self.accepted_at is None:
                    self.accepted_at = self._clock.now()
            case messages.HeartbeatAck():
                self.answered_s.append(self._clock.now() - self._beat_at)
                if not message.known:
                    self.register()
            case messages.Refused() | messages.Rejected():
                raise AssertionError(f"node {self.node_rank}: {message}")
            case _:
                command = translate.message_to_command(envelope, message)
                self.told_at[type(command).__name__, command.generation] = self._clock.now()
                self._obey(command)

    def _obey(self, command: commands.Command) -> None:
        lives = self.incarnations
        match command:
            case commands.Interrupt():
                self.generation = command.generation
                for rank, life in lives.items():
                    if rank != self._killed:
                        args = (rank, life, self.generation, self.version, True)
                        self._tell(events.WorkerPaused, *args)
            case commands.ReplaceWorker():
                rank, lives[command.rank] = command.rank, command.incarnation
                self._tell(events.WorkerStarted, rank, command.incarnation, 1)
                self._tell(events.WorkerDeclared, rank, command.incarnation, True)
                paused = (rank, command.incarnation, command.generation, None, True)
                self._tell(events.WorkerPaused, *paused)
                self._killed = None
            case commands.Resume():
                assert command.version is not None
                self.version = command.version + 1
                for rank, life in lives.items():
                    recovered = (rank, life, command.generation, self.version, 0.1, 0.1, 0.1)
                    self._tell(events.WorkerRecovered, *recovered)
            case commands.GiveUp() | commands.RestartGroup():
                raise AssertionError(f"node {self.node_rank} was told {command}")

    def _tell(self, kind: type[events.Event], *values: object) -> None:
        event = kind(0.0, "fleet", *values)
        self._send(translate.event_to_message(event), "fleet")

    def _send(self, message: messages.Message, cause: str) -> None:
        assert self._link is not None
        self._sequence += 1
        envelope = codec.Envelope(*self._sender, self.generation, self._sequence, cause)
        assert self._link.send(None, codec.encode(envelope, message))


class Fleet:
    """The agents of these nodes, in one process and thread. Their heartbeats are spread evenly."""

    def __init__(self, agents: Sequence[ImitatedAgent], address: str, clock: Clock) -> None:
        self.agents = {agent.node_rank: agent for agent in agents}
        self._clock = clock
        beside: zeromq.Dealer | None = None
        agent_by_link = {}
        for index, agent in enumerate(agents):
            link = agent.connect(address, beside if index % _PER_CONTEXT else None)
            beside = link if index % _PER_CONTEXT == 0 else beside
            agent_by_link[link] = agent
        self._agent_by_link = agent_by_link
        self._arrivals = zeromq.Arrivals(agent_by_link)
        for agent in agents:
            agent.register()
        now = clock.now() + BEAT_S
        spread = [(now + BEAT_S * i / len(agents), a.node_rank) for i, a in enumerate(agents)]
        self._beats = spread

    def hang_up(self, node_rank: int) -> None:
        """This agent ends its connection without a word, and is silent from then on."""
        agent = self.agents.pop(node_rank)
        link = next(link for link, one in self._agent_by_link.items() if one is agent)
        self._arrivals.forget(link)
        link.close()
        self._beats = [beat for beat in self._beats if beat[1] != node_rank]
        heapq.heapify(self._beats)

    def turn(self, at_most_s: float) -> None:
        """Wait for what the manager says, at most so many seconds, and say what is due."""
        until_beat_s = max(0.0, self._beats[0][0] - self._clock.now())
        for link in self._arrivals.wait(min(at_most_s, until_beat_s)):
            for _, data in link.receive():
                self._agent_by_link[link].take(data)
        now = self._clock.now()
        while self._beats[0][0] <= now:
            due, node_rank = self._beats[0]
            self.agents[node_rank].beat()
            heapq.heapreplace(self._beats, (max(due + BEAT_S, now), node_rank))
