"""Agents of a large job, imitated on real sockets: what a manager hears of thousands of nodes.

Each has a connection of its own and says what the agent and the workers of a node would: it
registers, tells with its heartbeats how far its ranks have come, and obeys. Nothing is trained, and
no process is started: ranks stop `OBEYS_AFTER_S` after they were told to, and commit as soon after
they may go on, all of them, which is hard for a manager: all reports come together.

On one machine the fleet must not need more than the manager. So it reads all that has come before
it obeys any of it, and packs only once what it says again and again. What comes while many agents
obey is read after a few of them have: real agents do not wait for each other.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import select
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING

from taskd.core import commands, events
from taskd.core.faults import Fault, FaultKind
from taskd.core.marks import Mark
from taskd.core.timeouts import Timeouts
from taskd.core.worker_state import WorkerState
from taskd.testing.zmtp import ZmtpConnection
from taskd.wire import batch, codec, messages, translate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from taskd.clock import Clock

OBEYS_AFTER_S = 0.04  # what four real ranks need to stop (benchmarks/recovery.py)
_CAUSE = "fleet"
_AT_ONCE = 16  # agents that say what is due before it is looked whether more has come
_TIMES_EVERY_S = 10.0  # the time spent in each phase is told this often
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
        self.heartbeat_s = Timeouts.derive().of_job(node_count).heartbeat_s
        self._times_every = round(_TIMES_EVERY_S / self.heartbeat_s)
        self._world_size = node_count * ranks_per_node
        self._sender = (job_id, "agent", node_rank, None, f"{node_rank:032x}")
        self._clock = clock
        self._sequence = self._beats = 0
        self._killed: int | None = None
        self._beat_at = 0.0
        self._packed_marks: tuple[object, bytes] = ((), b"")  # of what, and as it was sent
        self._link: ZmtpConnection | None = None

    def connect(self, address: str) -> ZmtpConnection:
        """Its connection."""
        self._link = ZmtpConnection(address, f"agent-{self.node_rank}".encode())
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
        every = self._times_every
        times = _TIMES if self._beats % every == self.node_rank % every else ()
        told = (self.generation, self.version, tuple(self.incarnations.values()), times)
        if self._packed_marks[0] != told:
            marks = tuple(
                Mark(
                    rank, life, self.generation, self.version, "forward", 0.0512, 0.0101, 0.0203,
                    slowest_s=0.21, times=times,
                )
                for rank, life in self.incarnations.items()
            )  # fmt: skip
            self._packed_marks = (told, codec.body_of(messages.Heartbeat(marks)))
        self._send_body(messages.Heartbeat.code, self._packed_marks[1], "heartbeat")

    def kill(self, rank: int) -> None:
        """A process of this node is gone."""
        self._killed, life = rank, self.incarnations[rank]
        detail = f"SIGKILL number {life}"
        fault = Fault(FaultKind.KILLED, rank, life, detail, version=self.version, signature=detail)
        self._tell(events.WorkerLost, rank, life, fault, 0.001, (self.version,))

    def take(
        self, envelope: codec.Envelope, message: messages.Message, at: float
    ) -> commands.Command | None:
        """Read what came at this time; what is to be obeyed is returned."""
        match message:
            case messages.Accepted():
                if self.accepted_at is None:
                    self.accepted_at = at
            case messages.HeartbeatAck():
                self.answered_s.append(at - self._beat_at)
                if not message.known:
                    self.register()
            case messages.Refused() | messages.Rejected():
                raise AssertionError(f"node {self.node_rank}: {message}")
            case _:
                command = translate.message_to_command(envelope, message)
                self.told_at[type(command).__name__, command.generation] = at
                return command
        return None

    def obey(self, command: commands.Command) -> None:
        """All ranks of this node do what they were told."""
        lives = self.incarnations
        match command:
            case commands.Interrupt():
                self.generation = command.generation
                stopped = [rank for rank in lives if rank != self._killed]
                self._tell_alike(stopped, events.WorkerPaused, self.generation, self.version, True)
            case commands.ReplaceWorker():
                rank, lives[command.rank] = command.rank, command.incarnation
                self._tell(events.WorkerStarted, rank, command.incarnation, 1)
                self._tell(events.WorkerDeclared, rank, command.incarnation, True)
                self._tell_alike([rank], events.WorkerPaused, command.generation, None, True)
                self._killed = None
            case commands.Resume():
                assert command.version is not None
                self.version = command.version + 1
                recovered = (command.generation, self.version, 0.1, 0.1, 0.1)
                self._tell_alike(list(lives), events.WorkerRecovered, *recovered)
            case commands.GiveUp() | commands.RestartGroup():
                raise AssertionError(f"node {self.node_rank} was told {command}")

    def _tell(self, kind: type[events.Event], *values: object) -> None:
        self._send(translate.event_to_message(kind(0.0, _CAUSE, *values)), _CAUSE)

    def _tell_alike(
        self, ranks: Sequence[int], kind: type[events.WorkerEvent], *values: object
    ) -> None:
        """As `batch.batch_of` has it, when each of these ranks reports the same."""
        if ranks:
            told = _told(kind, values)  # type: ignore[arg-type]  # a class has a hash, too
            lives = tuple(self.incarnations[rank] for rank in ranks)
            told = replace(told, ranks=tuple(ranks), incarnations=lives)
            self._send(messages.Batch((told,)), "reports")

    def _send(self, message: messages.Message, cause: str) -> None:
        self._send_body(message.code, codec.body_of(message), cause)

    def _send_body(self, code: int, body: bytes, cause: str) -> None:
        assert self._link is not None
        self._sequence += 1
        envelope = codec.Envelope(*self._sender, self.generation, self._sequence, cause)
        self._link.send(codec.frame_of(envelope, code, body))


@functools.lru_cache(maxsize=64)
def _told(kind: type[events.WorkerEvent], values: tuple[object, ...]) -> messages.Told:
    """What rank 0 would report; packed once for all, as they say it again and again."""
    message = translate.event_to_message(kind(0.0, _CAUSE, 0, 0, *values))
    return batch.batch_of([(_CAUSE, message)]).reports[0]


class Fleet:
    """The agents of these nodes, in one process and thread. Their heartbeats are spread evenly."""

    def __init__(self, agents: Sequence[ImitatedAgent], address: str, clock: Clock) -> None:
        self.agents = {agent.node_rank: agent for agent in agents}
        self._clock = clock
        self._agent_by_fd: dict[int, ImitatedAgent] = {}
        self._link_by_fd: dict[int, ZmtpConnection] = {}
        self._poll = select.epoll()
        for agent in agents:
            link = agent.connect(address)
            self._agent_by_fd[link.fileno()], self._link_by_fd[link.fileno()] = agent, link
            self._poll.register(link, select.EPOLLIN)
        self._last: tuple[bytes, tuple[codec.Envelope, messages.Message]] | None = None
        for agent in agents:
            agent.register()
        self._heartbeat_s = pause_s = agents[0].heartbeat_s
        now = clock.now() + pause_s
        spread = [(now + pause_s * i / len(agents), a.node_rank) for i, a in enumerate(agents)]
        self._beats = spread
        # when, who, what: in the order of time
        self._orders: deque[tuple[float, ImitatedAgent, commands.Command]] = deque()

    def hang_up(self, node_rank: int) -> None:
        """This agent ends its connection without a word, and is silent from then on."""
        agent = self.agents.pop(node_rank)
        fd = next(fd for fd, one in self._agent_by_fd.items() if one is agent)
        self._poll.unregister(fd)
        self._link_by_fd.pop(fd).close()
        self._beats = [beat for beat in self._beats if beat[1] != node_rank]
        heapq.heapify(self._beats)

    def turn(self, at_most_s: float) -> None:
        """Wait for what the manager says, at most so many seconds, and say what is due."""
        due = [self._beats[0][0], *(at for at, _, _ in itertools.islice(self._orders, 1))]
        arrived = []
        wait_s = min(at_most_s, max(0.0, min(due) - self._clock.now()))
        while ready := self._poll.poll(wait_s):
            wait_s, at = 0.0, self._clock.now()
            arrived += [
                (fd, data, at) for fd, _ in ready for data in self._link_by_fd[fd].receive()
            ]
        for fd, data, at in arrived:
            agent = self._agent_by_fd[fd]
            command = agent.take(*self._decoded(data), at)
            if command is not None:
                self._orders.append((at + OBEYS_AFTER_S, agent, command))
        now = self._clock.now()
        for _ in range(_AT_ONCE):
            if self._orders and self._orders[0][0] <= now:
                _, agent, command = self._orders.popleft()
                agent.obey(command)
            elif self._beats[0][0] <= now:
                beat_at, node_rank = self._beats[0]
                self.agents[node_rank].beat()
                heapq.heapreplace(self._beats, (max(beat_at + self._heartbeat_s, now), node_rank))

    def _decoded(self, data: bytes) -> tuple[codec.Envelope, messages.Message]:
        """What goes to all agents is the same for each of them."""
        if self._last is None or self._last[0] != data:
            self._last = data, codec.decode(data)
        return self._last[1]
