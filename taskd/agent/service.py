"""The agent's loop: one thread, one wait, inside torchrun's main thread.

      manager ◄── DEALER ──►  Service  ◄── socketpair per worker ──►  worker runtimes
                                 │
                     forkserver, death alarm, black boxes (through `Host`)

Order within one turn: wait, decode, `NodeMachine.handle`, execute each command, feed results back.
What workers said is read before their deaths, so that a last word counts. Decides nothing about
recovery, and must not know torch: `Host` stands for torchrun and its processes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import signal
import uuid
from typing import TYPE_CHECKING

from taskd.agent.endings import Endings
from taskd.agent.mirroring import Mirroring
from taskd.agent.remains import with_remains
from taskd.agent.reports import Reports
from taskd.agent.vitals import Vitals
from taskd.core import commands, events
from taskd.core.node import NodeMachine
from taskd.core.profiling import Exchange
from taskd.core.timeouts import Timeouts
from taskd.errors import LocalProtocolError, RemoteProtocolError, TaskdError
from taskd.native import last_words
from taskd.native.death_alarm import DeathAlarm
from taskd.transport import zeromq
from taskd.wire import codec, messages, translate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from taskd.agent.drain import Drain
    from taskd.agent.host import Host, Worker
    from taskd.clock import Clock
    from taskd.config import AgentConfig
    from taskd.core.faults import Fault
    from taskd.log import Identity
    from taskd.native.black_box import BlackBox

log = logging.getLogger(__name__)

_EXAMINE_LOOK_S = 0.005  # between two looks at a box to which stacks are being written
# between two glances at the workers, and between two heartbeats while one stands still
_CLOSE_LOOK_S = 0.25
_BUGS = (TaskdError, AssertionError, LookupError, TypeError, ValueError, AttributeError)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How the run ended.

    "succeeded", "failed" or "fallback" (no manager: go on as plain torchrun).
    """

    kind: str
    reason: str
    faults: tuple[Fault, ...] = ()


class Service:
    """See the module. `run` returns when this node's part of the job is over."""

    def __init__(
        self,
        host: Host,
        config: AgentConfig,
        clock: Clock,
        *,
        identity: Identity,
        generation: int,
        restarts_used: int,
        drain: Drain,
    ) -> None:
        """`identity`: the log prefix, kept up to date.

        `generation` and `restarts_used`: not 0 after a restart without a manager.
        """
        self._identity = identity
        self._drain = drain
        self._host = host
        self._config = config
        self._clock = clock
        self._timeouts = Timeouts.derive(config.fault_timeout_s)
        self._incarnation = uuid.uuid4().hex
        self._machine = NodeMachine(
            host.node_rank,
            tuple(host.ranks),
            self._timeouts,
            node_count=host.node_count,
            world_size=host.world_size,
            max_restarts=host.max_restarts,
            agent_incarnation=self._incarnation,
            generation=generation,
            restarts_used=restarts_used,
            wait_for_exit=config.wait_for_exit,
            incarnations={rank: worker.incarnation for rank, worker in host.workers.items()},
        )
        self._dealer = zeromq.Dealer(
            config.manager_address,
            identity=f"agent-{host.node_rank}-{self._incarnation}",
            secret=config.secret,
        )
        self._alarm = DeathAlarm()
        self._vitals = Vitals()
        # token of the death alarm -> the life it watches
        self._watched: dict[int, tuple[int, int, BlackBox]] = {}
        self._endings = Endings()
        # lives that write down their stacks
        self._examined: dict[tuple[int, int], tuple[BlackBox, int, float]] = {}
        self._profiling = Exchange()
        self._mirroring = Mirroring(
            config, clock, host.node_rank, self._incarnation, is_alone=host.node_count == 1
        )
        self._sequence = 0
        self._reports = Reports(host.node_rank, self._send)
        self._outcome: Outcome | None = None
        self._started_at = clock.now()
        self._next_beat = self._next_glance = self._started_at
        self._manager_heard_at: float | None = None
        self._manager_incarnation: str | None = None
        self._joined = False
        self._refused = False
        self._warned = False

    # ------------------------------------------------------------------ the loop

    def run(self) -> Outcome:
        """Until the node's work is over.

        Exceptions of torchrun's signal handlers pass through; the manager is told.
        """
        farewell = ("stopped", "torchrun was interrupted")
        self._alarm.wake_soon()
        try:
            self._read_workers()  # what happened while torchrun waited for the start
            self._read_processes()
            while self._outcome is None:
                self._turn()
            farewell = (self._outcome.kind, self._outcome.reason)
            return self._outcome
        finally:
            with contextlib.suppress(OSError):
                # Also of a fallback: a manager that was only stopped finds it when it goes on.
                self._say(
                    events.AgentLeft(self._clock.now(), "farewell", self._host.node_rank, *farewell)
                )
            self._mirroring.close()
            self._dealer.close()
            self._alarm.close()
            self._endings.close()

    def _turn(self) -> None:
        now = self._clock.now()
        if now >= self._next_beat or self._sees_standing(now):
            self._beat(now)
        deadlines = [
            self._next_beat,
            self._next_glance,
            *filter(None, [self._machine.next_deadline()]),
        ]
        if self._examined:
            deadlines.append(now + _EXAMINE_LOOK_S)
        if self._drain.deadline is not None:
            deadlines.append(self._drain.deadline)
        channels = [
            worker.channel.fd for worker in self._host.workers.values() if not worker.channel.closed
        ]
        fds = [
            *channels,
            *self._host.fds,
            *self._mirroring.fds,
            *([] if self._drain.is_asked else [self._drain.fd]),
            *([self._alarm.fd] if self._alarm.available else []),
        ]
        self._dealer.poll(max(0.0, min(deadlines) - now), fds)
        self._read_workers()
        self._read_examined()
        self._read_alarm()
        self._read_processes()
        self._read_manager()
        self._say_of_mirrors(self._mirroring.read(now))
        self._read_drain()
        now = self._clock.now()
        deadline = self._machine.next_deadline()
        if deadline is not None and now >= deadline:
            self._feed(events.Tick(now, "tick"))

    def _feed(self, event: events.Event) -> None:
        log.debug("event %s", event)
        try:
            for command in self._machine.handle(event):
                self._execute(command)
        except _BUGS:
            # The top of the shell: an event that we cannot digest must not take healthy workers
            # along. Not `Exception`: torchrun's signal handlers raise one of those wherever the
            # main thread is.
            log.exception(
                "a bug in taskd, please report it: %s of node %d was dropped",
                type(event).__name__,
                self._host.node_rank,
            )
        self._identity.generation = self._machine.generation

    # ------------------------------------------------------------------ what happened

    def _read_workers(self) -> None:
        for rank in sorted(self._host.workers):
            self._read_worker(rank)

    def _read_worker(self, rank: int) -> None:
        """What this worker said.

        Called before its death is looked at, too: its last word counts.
        """
        worker = self._host.workers[rank]
        for data in worker.channel.receive():
            try:
                envelope, message = codec.decode(data)
                event = translate.message_to_event(envelope, message, self._clock.now())
            except RemoteProtocolError as error:
                log.warning("rank %d sent something that is no message: %s", rank, error)
                continue
            if not isinstance(event, events.WorkerEvent) or (event.rank, event.incarnation) != (
                rank,
                worker.incarnation,
            ):
                log.warning("rank %d spoke for somebody else: %s", rank, type(event).__name__)
            elif isinstance(event, events.WorkerReady):
                self._watch(rank, worker, guarded=event.guarded)
                wanted = self._profiling.for_new_worker()
                if wanted is not None:
                    self._set_profiling(rank, worker, wanted, event.cause)
            elif isinstance(event, events.WorkerProfiling):
                self._hear_profiling(event)
            elif isinstance(event, events.WorkerMirrors):
                self._say_of_mirrors(self._mirroring.want(event.now))
            elif isinstance(event, events.WorkerUncaught):
                self._endings.said((rank, event.incarnation), event.fault)
            else:
                self._feed(event)

    def _read_alarm(self) -> None:
        if not self._alarm.available:
            return
        for token, died_at in self._alarm.read():
            rank, incarnation, box = self._watched.pop(token)
            self._read_worker(rank)
            self._vitals.doubt(rank, incarnation, box)
            self._feed(
                events.AlarmRang(
                    self._clock.now(),
                    f"alarm:{rank}.{incarnation}",
                    rank,
                    incarnation,
                    died_at,
                    box.version,
                    box.phase.name.lower(),
                    tuple(sorted(box.read_extras())),
                    self._snapshots_of(rank),
                )
            )

    def _snapshots_of(self, rank: int) -> tuple[int, ...]:
        worker = self._host.workers.get(rank)
        return () if worker is None else worker.arenas.versions()

    def _read_drain(self) -> None:
        """This node is to end. Without a manager, or when the time is up: as without us."""
        drain = self._drain
        if not drain.is_asked:
            return
        now = self._clock.now()
        if not drain.is_told and self._joined:
            drain.is_told = True
            log.warning(
                "node %d is to end (SIGTERM): the job is to be saved first, within %.0f s",
                self._host.node_rank,
                self._config.grace_s,
            )
            self._feed(
                events.AgentDraining(
                    now, "drain", self._host.node_rank, "SIGTERM", self._config.grace_s
                )
            )
        if not drain.is_told or (drain.deadline is not None and now >= drain.deadline):
            log.error(
                "node %d ends without having saved: %s",
                self._host.node_rank,
                f"{self._config.grace_s:.0f} s (TASKD_GRACE_S) are over"
                if drain.is_told
                else "it has no manager",
            )
            drain.end_at_once()

    def _read_processes(self) -> None:
        for event in self._host.read():
            rank, incarnation, box = event.rank, event.incarnation, event.box
            self._read_worker(rank)
            now, cause = self._clock.now(), f"process:{rank}.{incarnation}"
            if event.what == "started":
                self._endings.started((rank, incarnation), event.note)
                self._feed(events.WorkerStarted(now, cause, rank, incarnation, event.pid))
            elif event.what == "failed":
                self._feed(
                    events.WorkerStartFailed(
                        now, cause, rank, incarnation, event.error, event.snapshots
                    )
                )
            else:
                self._vitals.doubt(rank, incarnation, box)
                self._feed(
                    events.WorkerExited(
                        now,
                        cause,
                        rank,
                        incarnation,
                        event.status,
                        box.version,
                        box.phase.name.lower(),
                        tuple(sorted(box.read_extras())),
                        self._endings.words((rank, incarnation), event.status, box, now),
                        event.snapshots,
                    )
                )

    def _watch(self, rank: int, worker: Worker, *, guarded: bool) -> None:
        """Arm the death alarm of a worker that has a guard."""
        if not (guarded and self._alarm.available):
            return
        token = len(self._watched) + 1
        while token in self._watched:
            token += 1
        self._watched[token] = (rank, worker.incarnation, worker.box)
        self._alarm.watch(token, worker.box)

    # ------------------------------------------------------------------ the manager

    def _read_manager(self) -> None:
        for _, data in self._dealer.receive():
            try:
                envelope, message = codec.decode(data)
                self._check_manager(envelope)
                self._hear(envelope, message)
            except RemoteProtocolError as error:
                log.warning(
                    "the manager at %s sent something that is no message: %s",
                    self._config.manager_address,
                    error,
                )

    def _check_manager(self, envelope: codec.Envelope) -> None:
        if envelope.role != "manager" or envelope.job_id != self._config.job_id:
            raise RemoteProtocolError("foreign", f"from a {envelope.role} of job {envelope.job_id}")

    def _hear(self, envelope: codec.Envelope, message: messages.Message) -> None:
        now = self._clock.now()
        self._manager_heard_at = now
        if isinstance(message, messages.Accepted):
            # it may be a new manager
            self._joined, self._warned, self._drain.is_told = True, False, False
            self._manager_incarnation = message.manager_incarnation
            log.info(
                "joined the manager at %s as node %d",
                self._config.manager_address,
                self._host.node_rank,
            )
            self._feed(
                events.ManagerJoined(now, "accepted", message.generation, message.restarts_used)
            )
            for answer in self._profiling.answers():
                self._say(events.WorkerProfiling(now, "accepted", *answer))
            self._say_of_mirrors(self._mirroring.introduction(now))
        elif isinstance(message, messages.Refused):
            self._refused = True
            log.error(
                "node %d: the manager at %s refused us: %s. This torchrun goes on without a "
                "manager.",
                self._host.node_rank,
                self._config.manager_address,
                message.reason,
            )
            self._feed(events.ManagerRefused(now, "refused", message.reason))
        elif isinstance(message, messages.HeartbeatAck):
            if not message.known or message.manager_incarnation != self._manager_incarnation:
                self._joined = False
                self._register(now)
        elif isinstance(message, messages.Rejected):
            self._reports.rejected(message)
        elif isinstance(message, messages.Unsupported):
            log.warning(
                "the manager does not know message type %s: it is older than this agent",
                message.type,
            )
        else:
            command = translate.message_to_command(envelope, message)
            if isinstance(command, commands.SetProfiling):
                self._order_profiling(command)
                return
            self._say_of_mirrors(self._mirroring.obey(command, self._host.workers, now))
            if isinstance(command, commands.Pair):
                return
            self._feed(events.CommandReceived(now, envelope.cause, command))

    def _beat(self, now: float) -> None:
        """Once a second: a sign of life, or another try to register.

        And notice if the manager has fallen silent.
        """
        self._mirroring.follow(self._host.workers)
        marks = self._vitals.look(now, self._next_beat_s(), self._host.workers)
        self._next_beat = now + self._next_beat_s()
        if self._refused:
            return
        if not self._joined:
            self._register(now)
            if not self._warned and now - self._started_at > self._timeouts.manager_silence_s:
                self._warned = True
                log.warning(
                    "no manager answers at %s: training goes on as with plain torchrun. "
                    "Start one there with "
                    "`python manager.py`, or set "
                    "TASKD_MANAGER_ADDR.",
                    self._config.manager_address,
                )
            return
        assert self._manager_heard_at is not None
        if now - self._manager_heard_at > self._timeouts.manager_silence_s:
            self._joined = False
            log.warning(
                "the manager at %s has been silent for %.0f s: training goes on, a fault "
                "waits for it",
                self._config.manager_address,
                now - self._manager_heard_at,
            )
            self._feed(events.ManagerLost(now, "silence"))
            return
        try:
            self._send(messages.Heartbeat(marks), "heartbeat")
        except LocalProtocolError as error:  # hundreds of workers on one node
            log.warning("node %d: hangs are not looked for here: %s", self._host.node_rank, error)
            self._send(messages.Heartbeat(), "heartbeat")

    def _next_beat_s(self) -> float:
        """Sooner while somebody stands: the manager decides by what it knows of all."""
        is_close = self._joined and self._vitals.is_urgent
        return (
            min(_CLOSE_LOOK_S, self._timeouts.heartbeat_s)
            if is_close
            else self._timeouts.heartbeat_s
        )

    def _sees_standing(self, now: float) -> bool:
        """Whether a worker has come to a stand since the last heartbeat.

        Then the next one is due at once.
        """
        if now < self._next_glance:
            return False
        self._next_glance = now + _CLOSE_LOOK_S
        return (
            self._joined
            and not self._vitals.is_urgent
            and self._vitals.sees_standing(now, self._host.workers)
        )

    def _register(self, now: float) -> None:
        self._say(self._machine.registration(now))

    def _say(self, event: events.Event) -> None:
        self._reports.say(event)

    def _send(self, message: messages.Message, cause: str) -> int:
        self._sequence += 1
        self._dealer.send(None, codec.encode(self._envelope(cause), message))
        return self._sequence

    def _envelope(self, cause: str) -> codec.Envelope:
        return codec.Envelope(
            job_id=self._config.job_id,
            role="agent",
            node_rank=self._host.node_rank,
            rank=None,
            incarnation=self._incarnation,
            generation=self._machine.generation,
            sequence=self._sequence,
            cause=cause,
        )

    def _say_of_mirrors(self, said: Sequence[events.Event]) -> None:
        """Beside the machine, too: a manager that joins later hears it then."""
        for event in said if self._joined else ():
            self._say(event)

    # ------------------------------------------------------------------ profiling, beside the
    # machine: it decides nothing

    def _order_profiling(self, command: commands.SetProfiling) -> None:
        try:
            self._profiling.ask(command.wanted)
        except ValueError as error:
            raise RemoteProtocolError("malformed", str(error)) from error
        for rank, worker in sorted(self._host.workers.items()):
            self._set_profiling(rank, worker, command.wanted, command.cause)

    def _set_profiling(self, rank: int, worker: Worker, wanted: int, cause: str) -> None:
        if not worker.channel.closed:
            command = commands.SetProfiling(cause, self._machine.generation, wanted)
            self._tell(
                commands.TellWorker(cause, command.generation, rank, worker.incarnation, command)
            )

    def _hear_profiling(self, event: events.WorkerProfiling) -> None:
        try:
            self._profiling.heard(event.rank, event.incarnation, event.status)
        except ValueError as error:
            log.warning("rank %d sent something that is no message: %s", event.rank, error)
            return
        if self._joined:
            self._say(event)

    # ------------------------------------------------------------------ commands

    def _execute(self, command: commands.Command) -> None:
        log.debug("command %s", command)
        match command:
            case commands.SpawnWorker():
                self._spawn(command)
            case commands.SignalWorker():
                self._endings.signalled((command.rank, command.incarnation), command.signal_number)
                self._host.signal(command.rank, command.incarnation, command.signal_number)
            case commands.ExamineWorker():
                self._examine(command)
            case commands.TellWorker():
                self._tell(command)
            case commands.TellManager():
                assert isinstance(command.event, events.Event)
                self._say(command.event)
            case commands.FinishRun():
                self._outcome = Outcome(command.outcome, command.reason, command.faults)
            case commands.FallBack():
                self._outcome = Outcome("fallback", command.reason)
            case _:
                message = f"{type(command).__name__} is no command for an agent"
                raise TypeError(message)

    def _spawn(self, command: commands.SpawnWorker) -> None:
        try:
            self._host.spawn(
                command.rank,
                command.incarnation,
                generation=command.generation,
                gated=command.gated,
                restarts_used=command.restarts_used,
            )
        except OSError as error:  # no descriptors, no memory
            self._feed(
                events.WorkerStartFailed(
                    self._clock.now(), command.cause, command.rank, command.incarnation, str(error)
                )
            )

    def _examine(self, command: commands.ExamineWorker) -> None:
        """Let a rank that hangs write down its stacks.

        It does not go on behind them, even if it was only stopped.
        """
        worker = self._host.workers.get(command.rank)
        if worker is None or worker.incarnation != command.incarnation or worker.pid is None:
            return
        count = last_words.request(worker.pid, worker.box, stay=True)
        if count is not None:
            deadline = self._clock.now() + self._timeouts.examine_s
            self._examined[command.rank, command.incarnation] = (worker.box, count, deadline)
            self._host.signal(command.rank, command.incarnation, signal.SIGCONT)

    def _read_examined(self) -> None:
        """Stacks that have been written, or as far as they were when time is over."""
        now = self._clock.now()
        for life, (box, count, deadline) in list(self._examined.items()):
            words = last_words.answer(box, count)
            if words is None and now >= deadline:
                words = last_words.wait(box, count, now)
            elif words is None:
                continue
            del self._examined[life]
            if words is not None:
                self._feed(
                    events.WorkerExamined(now, f"examined:{life[0]}.{life[1]}", *life, words.text())
                )

    def _tell(self, command: commands.TellWorker) -> None:
        worker = self._host.workers.get(command.rank)
        if worker is None or worker.incarnation != command.incarnation:
            return
        self._sequence += 1
        order = (
            with_remains(command.command, command.rank, self._host.workers, self._mirroring.find)
            if isinstance(command.command, commands.Dump)
            else command.command
        )
        data = codec.encode(self._envelope(command.cause), translate.command_to_message(order))
        if not worker.channel.send(data):
            log.info(
                "rank %d: %s came too late, the worker has closed its channel",
                command.rank,
                type(command.command).__name__,
            )
