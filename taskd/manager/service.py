"""The manager's loop: one thread, one wait, around the `RecoveryMachine`.

      agents (inside torchrun)  ── DEALER ──►  ROUTER :9601 ── events ──►  RecoveryMachine
      workers without agent     ◄──────────                 ◄─ commands ─

Order within one turn, and nowhere else: wait, decode, `handle`, execute each command. It sleeps
until a message, a signal or the next deadline, which is the machine's or that of the profiling
switch (a file, looked at once a second). Owns who may speak (`sessions`), decides nothing about
recovery, must not import torch. What a peer sends can be refused, counted and answered, but never
ends the loop.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import threading
import uuid
from typing import TYPE_CHECKING

from taskd import replay
from taskd.clock import MonotonicClock
from taskd.core import commands, events
from taskd.core.job.machine import EVENTS, RecoveryMachine
from taskd.core.policy.ladder import Strategy, allowed
from taskd.core.story import describe
from taskd.core.timeouts import Timeouts
from taskd.errors import InvalidTransition, RemoteProtocolError
from taskd.manager.profiling import ProfilingSwitch
from taskd.manager.records import Records, describe_fault
from taskd.manager.sessions import Refusals, Session, Sessions, show_peer
from taskd.transport import zeromq
from taskd.wire import codec, messages, translate

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Callable, Iterator

    from taskd.clock import Clock
    from taskd.config import ManagerConfig
    from taskd.core.marks import Mark
    from taskd.log import Identity
    from taskd.transport.base import Listener

log = logging.getLogger(__name__)

_SHOWN_ENTRIES = 20  # of the story, with a bug
_SHOWN_CHARACTERS = 300  # of a command in a log line: Resume of 4,096 ranks would fill a screen


class Service:
    """See the module. `run` returns when the job is over or a signal asks for it."""

    def __init__(
        self,
        config: ManagerConfig,
        link: Listener,
        clock: Clock | None = None,
        identity: Identity | None = None,
    ) -> None:
        """`link`: bound and ready, closed by `run`.

        `identity`: the log prefix, to be kept up to date.
        """
        self._config = config
        self._link = link
        self._clock = clock or MonotonicClock()
        self._identity = identity
        self._machine = _new_machine(config)
        self._story = replay.StoryWriter(self._machine)
        self._is_in_doubt = False  # the machine failed in the middle of something
        self._incarnation = uuid.uuid4().hex
        self._sequence = 0
        self._sessions = Sessions()
        self._refusals = Refusals()
        self._profiling = ProfilingSwitch(
            config.profiling_switch, self._clock.now(), self._sessions.ranks
        )
        self._records = Records(config.log.directory, config.job_id)
        self._result: bool | None = None
        self._ends_at: float | None = None  # the end of the grace period, once SIGTERM has come

    @property
    def result(self) -> bool | None:
        """Whether the job succeeded; None: it is not over."""
        return self._result

    # ------------------------------------------------------------------ the loop

    def run(self) -> bool:
        """Until the job is over.

        True: it succeeded, or SIGTERM or SIGINT ended the manager (training goes on without it).
        """
        log.info(
            "manager of job %s listens on %s (pid %d)",
            self._config.job_id,
            self._link.address,
            os.getpid(),
        )
        with contextlib.ExitStack() as stack:
            stack.callback(self._link.close)
            signals = stack.enter_context(_signals())
            while self._result is None:
                received = self.turn(signals)
                if received is not None and not self._may_save(received):
                    log.info(
                        "%s: the manager ends; training goes on without it, and a manager "
                        "that is started again "
                        "takes over",
                        received,
                    )
                    self._result = True
            log.info("refused in all: %s", self._refusals.summary())
        return self._result

    def _may_save(self, received: str) -> bool:
        """Where jobs are saved on SIGTERM, the agent of this pod has got it as well, and needs us for that."""
        now = self._clock.now()
        if (
            received != "SIGTERM"
            or Strategy.DUMP not in allowed(self._config.strategies)
            or self._ends_at is not None
        ):
            return False
        self._ends_at = now + self._config.grace_s
        log.warning(
            "SIGTERM: the manager stays until the job is saved, at most %.0f s (TASKD_GRACE_S)",
            self._config.grace_s,
        )
        return True

    def turn(self, signals: socket.socket | None = None) -> str | None:
        """One wait and everything that follows from it.

        Returns the name of a signal that asks to end.
        """
        deadlines = (self._machine.next_deadline(), self._profiling.next_deadline, self._ends_at)
        timeout_s = max(
            0.0, min(deadline for deadline in deadlines if deadline is not None) - self._clock.now()
        )
        ready = self._link.poll(timeout_s, [] if signals is None else [signals.fileno()])
        for peer, data in self._link.receive():
            self._take(peer, data)
        for reason in self._link.take_refused():
            self._refusals.add(
                b"(connecting)", "connection", f"a connection was not let in: {reason}"
            )
        if self._link.take_disconnects():
            self._sessions.doubt()
        now = self._clock.now()
        deadline = self._machine.next_deadline()
        if deadline is not None and now >= deadline:
            with self._surviving("what a deadline asks for"):
                self._feed(events.Tick(now, "tick"))
        code = self._profiling.turn(now)
        if code is not None:
            self._order(
                commands.SetProfiling("profiling", self._machine.generation, code),
                sorted(self._sessions.agents),
            )
        if self._ends_at is not None and now >= self._ends_at:
            return "the grace period is over"
        return signal.Signals(signals.recv(1)[0]).name if signals is not None and ready else None

    def _feed(self, event: events.Event) -> None:
        self._execute_all(self._handle(event))

    def _handle(self, event: events.Event) -> list[commands.Command]:
        log.debug("event %s", event)
        try:
            return self._machine.handle(event)
        except InvalidTransition:  # said before anything was changed
            raise
        except Exception:
            self._is_in_doubt = True
            raise

    @contextlib.contextmanager
    def _surviving(self, what: str, harm: Callable[[], None] = lambda: None) -> Iterator[None]:
        """The top of the shell.

        One thing that the machine or we cannot digest must not take the manager along.

        `harm` is called if that is what has happened.
        """
        try:
            yield
        except RemoteProtocolError:
            raise
        except Exception:
            log.exception(
                "a bug in taskd, please report it with %s: %s was dropped. The story ends:",
                self._story_path,
                what,
            )
            for entry in list(self._machine.story)[-_SHOWN_ENTRIES:]:
                log.error("  %.*s", _SHOWN_CHARACTERS, describe(entry))
            try:
                self._write_story()
            except Exception:
                log.exception("and the story could not be written")
            harm()
            if self._is_in_doubt:
                self._begin_anew()

    def _begin_anew(self) -> None:
        """The machine may have done half of something.

        Another one takes over what the agents say, as if we had been restarted.
        """
        node_ranks = tuple(sorted(self._sessions.agents))
        self._is_in_doubt = False
        self._machine = _new_machine(self._config)
        self._story = replay.StoryWriter(self._machine)
        self._incarnation = uuid.uuid4().hex
        self._sessions.agents.clear()
        log.error(
            "the manager begins anew: nodes %s are asked to register again; a recovery that "
            "was under way is begun again, "
            "and what was remembered of repeated faults is gone",
            list(node_ranks),
        )
        self._machine.handle(
            events.ManagerBeganAnew(
                self._clock.now(),
                "anew",
                tuple(rank for rank in node_ranks if not self._sessions.is_harmful(rank)),
            )
        )

    @property
    def _story_path(self) -> pathlib.Path:
        return self._config.log.directory / f"story-{self._machine.generation}.jsonl"

    # ------------------------------------------------------------------ what peers say

    def _take(self, peer: bytes, data: bytes) -> None:
        """One message.

        Whatever it is, and whatever it does to us, its sender is answered if he may speak.
        """
        envelope: codec.Envelope | None = None
        code: int | None = None
        try:
            envelope, message = codec.decode(data)
            code = message.code
            with self._surviving(
                f"{type(message).__name__} of {show_peer(peer)}",
                lambda: self._blame(peer, envelope, code),
            ):
                self._read(peer, envelope, message)
        except RemoteProtocolError as error:
            self._refusals.add(peer, error.reason, str(error))
            if error.type_code is not None:
                self._send(peer, messages.Unsupported(error.type_code), "unsupported")
                return
            said = envelope or error.envelope
            if isinstance(said, codec.Envelope):
                self._answer(
                    peer,
                    said,
                    error.message_code if code is None else code,
                    str(error),
                    is_read=envelope is not None,
                )

    def _answer(
        self, peer: bytes, envelope: codec.Envelope, code: int | None, reason: str, *, is_read: bool
    ) -> None:
        """Something of this agent was refused.

        It is alive all the same, and is told, or it would take us for dead.
        """
        is_ours = envelope.role == "agent" and envelope.job_id == self._config.job_id
        was_refused = is_read and code == messages.AgentRegistered.code
        if code is None or envelope.node_rank is None or not is_ours or was_refused:
            return
        session = self._sessions.agents.get(envelope.node_rank)
        if session is None or (session.peer, session.incarnation) != (peer, envelope.incarnation):
            if code == messages.AgentRegistered.code and not is_read:
                self._send(
                    peer,
                    messages.Refused(f"its registration breaks a rule: {reason}"),
                    envelope.cause,
                )
            return
        if not is_read:
            if envelope.sequence <= session.sequence:
                return
            session.sequence = envelope.sequence
            with self._surviving(f"a sign of life of node {envelope.node_rank}"):
                self._feed(events.AgentHeard(self._clock.now(), envelope.cause, envelope.node_rank))
        self._acknowledge(peer, known=not session.is_doubtful)
        self._send(peer, messages.Rejected(code, envelope.sequence, reason), envelope.cause)

    def _blame(self, peer: bytes, envelope: codec.Envelope | None, code: int | None) -> None:
        """A message of this agent was more than we could digest."""
        if (
            envelope is None
            or code is None
            or envelope.node_rank is None
            or envelope.role != "agent"
        ):
            return
        self._sessions.harm[envelope.node_rank] += 1
        self._send(
            peer,
            messages.Rejected(
                code, envelope.sequence, "a bug in taskd: the manager could not digest it"
            ),
            envelope.cause,
        )

    def _read(self, peer: bytes, envelope: codec.Envelope, message: messages.Message) -> None:
        if envelope.job_id != self._config.job_id:
            self._refuse(
                peer,
                "foreign",
                f"this manager serves job {self._config.job_id}, not "
                f"{envelope.job_id[:_SHOWN_CHARACTERS]}",
            )
        elif envelope.role == "agent" and envelope.node_rank is not None:
            self._read_agent(peer, envelope, message, envelope.node_rank)
        elif envelope.role == "worker" and envelope.rank is not None:
            self._read_worker(peer, envelope, message, envelope.rank)
        else:
            raise RemoteProtocolError(
                "malformed", f"a {envelope.role} without position does not speak to a manager"
            )

    def _read_agent(
        self, peer: bytes, envelope: codec.Envelope, message: messages.Message, node_rank: int
    ) -> None:
        now = self._clock.now()
        session = self._sessions.agents.get(node_rank)
        is_known = session is not None and (session.peer, session.incarnation) == (
            peer,
            envelope.incarnation,
        )
        if session is not None and is_known:
            if envelope.sequence <= session.sequence:
                log.debug("node %d: message %d again", node_rank, envelope.sequence)
                return
            session.sequence = envelope.sequence
        if isinstance(message, messages.AgentRegistered):
            self._register(peer, envelope, message)
            return
        if session is None or not is_known:
            # A manager that was restarted, or an agent that has been given up: it has to introduce
            # itself (again).
            self._acknowledge(peer, known=False)
            if not isinstance(message, messages.Heartbeat):
                raise RemoteProtocolError(
                    "foreign", f"node {node_rank} is not registered from there"
                )
            return
        self._feed(
            events.AgentHeard(
                now, envelope.cause, node_rank, self._marks(message, node_rank, session)
            )
        )
        if isinstance(message, messages.Heartbeat):
            self._acknowledge(peer, known=not session.is_doubtful)
            return
        event = translate.message_to_event(envelope, message, now)
        _check_position(event, node_rank, session)
        if isinstance(event, events.WorkerProfiling):
            self._hear_profiling(event)
            return
        self._feed(event)
        if isinstance(event, events.WorkerExamined):
            _log_stacks(event)
        if isinstance(event, events.AgentLeft):
            log.info("node %d left: %s %s", node_rank, event.outcome, event.detail)
            del self._sessions.agents[node_rank]

    def _marks(
        self, message: messages.Message, node_rank: int, session: Session
    ) -> tuple[Mark, ...]:
        """How far the workers of this node have come, if that is looked at."""
        marks = (
            message.marks
            if isinstance(message, messages.Heartbeat) and self._config.hang.is_on
            else ()
        )
        if any(mark.rank not in session.ranks for mark in marks):
            raise RemoteProtocolError(
                "foreign", f"node {node_rank} spoke of ranks that are not its own"
            )
        return marks

    def _hear_profiling(self, event: events.WorkerProfiling) -> None:
        try:
            self._profiling.heard(event.rank, event.incarnation, event.status)
        except ValueError as error:
            raise RemoteProtocolError("malformed", str(error)) from error

    def _register(
        self, peer: bytes, envelope: codec.Envelope, message: messages.AgentRegistered
    ) -> None:
        """An agent claims its position."""
        if (message.node_rank, message.agent_incarnation) != (
            envelope.node_rank,
            envelope.incarnation,
        ):
            self._refuse(peer, "foreign", "a registration for somebody else")
            return
        event = translate.message_to_event(envelope, message, self._clock.now())
        assert isinstance(event, events.AgentRegistered)
        refusal = self._sessions.refusal(message.node_rank) or self._machine.refusal(event)
        if refusal is not None:
            self._refuse(peer, "refused", refusal)
            return
        ranks = frozenset(report.rank for report in message.workers)
        if message.node_rank not in self._sessions.agents:
            log.info(
                "node %d of %d registered, ranks %s of %d",
                message.node_rank,
                message.node_count,
                sorted(ranks),
                message.world_size,
            )
        answers = self._handle(event)
        self._sessions.agents[message.node_rank] = Session(
            peer, envelope.incarnation, envelope.sequence, ranks
        )
        # First the welcome: what follows is for an agent that knows that it has been accepted.
        welcome = messages.Accepted(
            self._machine.generation, self._machine.restarts_used, self._incarnation
        )
        self._send(peer, welcome, envelope.cause)
        self._execute_all(answers)
        if self._profiling.wanted is not None:
            self._order(
                commands.SetProfiling(
                    "profiling", self._machine.generation, self._profiling.wanted
                ),
                [message.node_rank],
            )

    def _read_worker(
        self, peer: bytes, envelope: codec.Envelope, message: messages.Message, rank: int
    ) -> None:
        """A training process without agent: known, and told that the manager lives.

        The newest one of a rank counts.
        """
        session = self._sessions.workers.get(rank)
        is_known = session is not None and (session.peer, session.incarnation) == (
            peer,
            envelope.incarnation,
        )
        if isinstance(message, messages.RegisterWorker):
            if message.rank != rank:
                self._refuse(peer, "foreign", "a registration for somebody else")
                return
            log.info(
                "rank %d registered without an agent (pid %d, %s)",
                rank,
                message.pid,
                message.framework,
            )
            self._sessions.workers[rank] = Session(
                peer, envelope.incarnation, envelope.sequence, frozenset((rank,))
            )
            welcome = messages.Accepted(
                self._machine.generation, self._machine.restarts_used, self._incarnation
            )
            self._send(peer, welcome, envelope.cause)
        elif isinstance(message, messages.Heartbeat):
            self._acknowledge(peer, known=is_known)
        else:
            raise RemoteProtocolError(
                "foreign", f"a worker without agent does not report {type(message).__name__}"
            )

    # ------------------------------------------------------------------ what we say

    def _send(self, peer: bytes, message: messages.Message, cause: str) -> bool:
        self._sequence += 1
        envelope = codec.Envelope(
            job_id=self._config.job_id,
            role="manager",
            node_rank=None,
            rank=None,
            incarnation=self._incarnation,
            generation=self._machine.generation,
            sequence=self._sequence,
            cause=cause,
        )
        return self._link.send(peer, codec.encode(envelope, message))

    def _acknowledge(self, peer: bytes, *, known: bool) -> None:
        self._send(
            peer,
            messages.HeartbeatAck(self._incarnation, known, self._machine.generation),
            "heartbeat",
        )

    def _refuse(self, peer: bytes, reason: str, text: str) -> None:
        self._send(peer, messages.Refused(text), "refused")
        raise RemoteProtocolError(reason, text)

    # ------------------------------------------------------------------ commands

    def _execute_all(self, orders: list[commands.Command]) -> None:
        for command in orders:
            # The machine has decided: what one order meets must not cost the others.
            with self._surviving(f"the order {type(command).__name__}"):
                self._execute(command)
        if self._identity is not None:
            self._identity.generation = self._machine.generation

    def _execute(self, command: commands.Command) -> None:
        match command:
            case (
                commands.ReplaceWorker()
                | commands.KillWorker()
                | commands.Publish()
                | commands.Pair()
            ):
                self._order(command, [command.node_rank])
            case commands.GiveUp():
                self._log_end(command)
                self._order(command, sorted(self._sessions.agents))
            case (
                commands.Interrupt()
                | commands.Advance()
                | commands.Resume()
                | commands.RestartGroup()
                | commands.Release()
                | commands.Dump()
            ):
                self._order(command, sorted(self._sessions.agents))
            case commands.RecordRecovery():
                self._records.recovery(command.record)
                self._write_story()
            case commands.ReportStraggler():
                log.warning(
                    "rank %d is slower than the others: %.0f ms per step in %s, they %.0f ms",
                    command.rank,
                    1000 * command.own_s,
                    command.phase,
                    1000 * command.others_s,
                )
            case commands.ReportNoProgress():
                log.warning(
                    "the job gets no further: %s. What fails is in recoveries.jsonl, with "
                    "the tracebacks",
                    command.text,
                )
            case commands.ReportNoBuddy():
                log.warning(
                    "no snapshot can be mirrored: all nodes are on one host (%s), which "
                    "would take its mirrors along. Training goes on",
                    command.host,
                )
            case commands.EndJob():
                self._result = command.succeeded
                if command.left_alone:
                    log.warning(
                        "this manager ends: %s. Training goes on as plain torchrun does "
                        "it, and torchrun tells how it ends",
                        command.reason,
                    )
                    return
                log.log(
                    logging.INFO if command.succeeded else logging.ERROR,
                    "the job has %s: %s",
                    "succeeded" if command.succeeded else "failed",
                    command.reason,
                )
            case _:
                raise TypeError(f"{type(command).__name__} is no command for a manager")

    def _order(self, command: commands.Command, node_ranks: list[int]) -> None:
        log.info("%.*s", _SHOWN_CHARACTERS, describe(command).strip())
        message = translate.command_to_message(command)
        for node_rank in node_ranks:
            session = self._sessions.agents.get(node_rank)
            if session is None or self._send(session.peer, message, command.cause):
                continue
            # its connection is down; when it is back it registers and hears it again
            session.is_doubtful = True
            log.warning(
                "node %d cannot be reached now: %s waits for it", node_rank, type(command).__name__
            )

    def _log_end(self, command: commands.GiveUp) -> None:
        log.error("the job is given up: %s", command.reason)
        if command.fault is not None:
            log.error("the cause: %s", describe_fault(command.fault))
            for line in (command.fault.traceback or "").splitlines():
                log.error("  %s", line)

    def _write_story(self) -> None:
        self._records.story(self._machine.generation, self._story.lines())


def _check_position(event: events.Event, node_rank: int, session: Session) -> None:
    """An agent may speak only of its own node and of the ranks that it registered.

    And only what a manager can hear.
    """
    if not isinstance(event, (*EVENTS, events.WorkerProfiling)):
        raise RemoteProtocolError("malformed", f"{type(event).__name__} is not for a manager")
    if isinstance(event, events.WorkerEvent) and event.rank not in session.ranks:
        raise RemoteProtocolError(
            "foreign", f"node {node_rank} spoke of rank {event.rank}, which is not its own"
        )
    if (
        isinstance(
            event, (events.AgentLeft, events.AgentDraining, events.AgentMirrors, events.MirrorsHeld)
        )
        and event.node_rank != node_rank
    ):
        raise RemoteProtocolError("foreign", f"node {node_rank} spoke for node {event.node_rank}")


def _log_stacks(event: events.WorkerExamined) -> None:
    log.error("the stacks of rank %d, which hangs (incarnation %d):", event.rank, event.incarnation)
    for line in event.traceback.splitlines():
        log.error("  %s", line)


def _new_machine(config: ManagerConfig) -> RecoveryMachine:
    timeouts = Timeouts.derive(
        config.fault_timeout_s,
        hang_floor_s=config.hang.floor_s,
        hang_ceiling_s=config.hang.ceiling_s,
    )
    return RecoveryMachine(
        config.job_id, timeouts, config.node_count, config.ranks_per_node, config.strategies
    )


@contextlib.contextmanager
def _signals() -> Iterator[socket.socket | None]:
    """A socket that gets one byte for SIGTERM and SIGINT, so that they end the wait.

    None outside the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield None
        return
    reader, writer = socket.socketpair()
    with reader, writer:
        reader.setblocking(False)
        writer.setblocking(False)
        former_fd = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        former = {
            number: signal.signal(number, lambda *_: None)
            for number in (signal.SIGTERM, signal.SIGINT)
        }
        try:
            yield reader
        finally:
            signal.set_wakeup_fd(former_fd)
            for number, handler in former.items():
                signal.signal(number, handler)


def open_service(config: ManagerConfig, identity: Identity | None = None) -> Service:
    """A service on its port. Raises `TransportError` if that is taken."""
    return Service(
        config, zeromq.Router(config.bind_address, secret=config.secret), identity=identity
    )
