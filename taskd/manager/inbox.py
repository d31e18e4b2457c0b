"""What peers say to the manager: each message is checked, becomes an event, and is answered.

Whatever a peer sends can be refused, counted and answered, but never ends the manager. An agent
that is registered is alive whatever it says: a refused message counts as a sign of life.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from taskd.core import events
from taskd.core.job.speakers import Strangers, objection
from taskd.core.timeouts import Timeouts
from taskd.errors import RemoteProtocolError
from taskd.log import SHOWN_CHARACTERS, Allowance, SayOnce
from taskd.manager.sessions import Session, show_peer
from taskd.wire import batch, codec, messages, translate

if TYPE_CHECKING:
    from taskd.clock import Clock
    from taskd.config import ManagerConfig
    from taskd.manager.electorate import VoterDesk
    from taskd.manager.executor import Executor
    from taskd.manager.guarded import GuardedMachine
    from taskd.manager.outbox import Outbox
    from taskd.manager.profiling_switch import ProfilingSwitch
    from taskd.manager.sessions import Refusals, Sessions
    from taskd.manager.spares import SpareDesk

log = logging.getLogger(__name__)

_FRAMEWORK_CHARACTERS = 16  # "pt" or "ms"
# lines for processes without an agent, which anybody may say he is: within so many seconds
_LINES, _INTERVAL_S = 1000, 3600.0
_REGISTRATION = messages.MESSAGE_BY_RECORD[events.AgentRegistered]


class Inbox:
    """`take` is called for each message that arrives."""

    def __init__(
        self,
        config: ManagerConfig,
        clock: Clock,
        sessions: Sessions,
        refusals: Refusals,
        guarded: GuardedMachine,
        outbox: Outbox,
        executor: Executor,
        profiling: ProfilingSwitch,
        spares: SpareDesk,
        voters: VoterDesk,
    ) -> None:
        self._job_id = config.job_id
        self._takes_marks = config.hang.is_on
        timeouts = Timeouts.derive(config.fault_timeout_s)
        self._answer_every_s = timeouts.manager_silence_s / 4  # three may be lost
        self._clock = clock
        self._sessions = sessions
        self._refusals = refusals
        self._guarded = guarded
        self._outbox = outbox
        self._executor = executor
        self._profiling = profiling
        self._spares = spares
        self._voters = voters
        self._strangers = Strangers()
        self._early = SayOnce()  # who does not get its place yet, as was said
        self._allowance = Allowance(_LINES, _INTERVAL_S)
        # who has sent a heartbeat, by whether it is known as it should be
        self._answers: dict[bool, list[bytes]] = {True: [], False: []}

    def answer(self) -> None:
        """Answer the heartbeats that were taken, all at once: thousands come in a second."""
        for known, peers in self._answers.items():
            if peers:
                self._outbox.acknowledge_all(peers, known=known)
                peers.clear()

    def take(self, peer: bytes, data: bytes) -> None:
        """Read one message. Raises nothing. `answer` is to be called when all have been read."""
        try:
            envelope, message = codec.decode(data)
        except RemoteProtocolError as error:
            self._refused(peer, error, is_readable=error.envelope is not None)
            if error.type_code is not None:
                is_ours = getattr(error.envelope, "job_id", None) == self._job_id
                unsupported = messages.Unsupported(error.type_code)
                self._outbox.send(peer, unsupported, "unsupported", is_of_job=is_ours)
            elif isinstance(error.envelope, codec.Envelope) and error.message_code is not None:
                self._answer_unread(peer, error.envelope, error.message_code, str(error))
            return
        what = f"{type(message).__name__} of {show_peer(peer)}"
        try:
            with self._guarded.surviving(what, lambda: self._blame(peer, envelope, message.code)):
                self._read(peer, envelope, message)
        except RemoteProtocolError as error:
            self._refused(peer, error, is_readable=True)
            session = self._session_of(peer, envelope)
            if session is not None and message.code != _REGISTRATION.code:
                self._reject(peer, session, envelope, message.code, str(error))

    def _refused(self, peer: bytes, error: RemoteProtocolError, *, is_readable: bool) -> None:
        """Count it, and hang up on a stranger who has sent too much that is refused."""
        self._refusals.add(peer, error.reason, str(error))
        if self._strangers.refused(peer, is_readable=is_readable) and not self._sessions.knows(
            peer
        ):
            self._outbox.hang_up(peer)

    def _session_of(self, peer: bytes, envelope: codec.Envelope) -> Session | None:
        """The session of the agent that sent this; None: it is not registered from there."""
        node_rank = envelope.node_rank
        if envelope.role != "agent" or envelope.job_id != self._job_id or node_rank is None:
            return None
        session = self._sessions.agent(node_rank, peer, envelope.incarnation)
        # One that was taken for lost has to introduce itself again.
        return session if self._guarded.machine.is_present(node_rank) else None

    def _answer_unread(self, peer: bytes, envelope: codec.Envelope, code: int, reason: str) -> None:
        """Answer a message whose envelope alone could be read, if an agent of this job sent it."""
        session = self._session_of(peer, envelope)
        if session is not None and envelope.node_rank is not None:
            if session.advance(envelope.sequence):
                with self._guarded.surviving(f"a sign of life of node {envelope.node_rank}"):
                    self._executor.feed(
                        events.AgentHeard(self._clock.now(), envelope.cause, envelope.node_rank)
                    )
                self._reject(peer, session, envelope, code, reason)
        elif (
            code == _REGISTRATION.code
            and (envelope.role, envelope.job_id) == ("agent", self._job_id)
            and envelope.node_rank is not None
        ):
            refused = messages.Refused(f"its registration breaks a rule: {reason}")
            self._outbox.send(peer, refused, envelope.cause)

    def _reject(
        self, peer: bytes, session: Session, envelope: codec.Envelope, code: int, reason: str
    ) -> None:
        """Tell an agent that it was heard, and that this message was not taken in."""
        self._outbox.acknowledge(peer, known=not session.is_doubtful)
        rejected = messages.Rejected(code, envelope.sequence, reason)
        self._outbox.send(peer, rejected, envelope.cause)

    def _blame(self, peer: bytes, envelope: codec.Envelope, code: int) -> None:
        """A message of this agent made the manager fail."""
        if envelope.role != "agent" or envelope.node_rank is None:
            return
        self._sessions.quarantine.blame(envelope.node_rank)
        reason = "a bug in taskd: the manager could not digest it"
        self._outbox.send(peer, messages.Rejected(code, envelope.sequence, reason), envelope.cause)

    def _read(self, peer: bytes, envelope: codec.Envelope, message: messages.Message) -> None:
        if envelope.job_id != self._job_id:
            self._outbox.refuse(
                peer,
                "foreign",
                f"this manager does not serve job {envelope.job_id[:SHOWN_CHARACTERS]}",
                is_of_job=False,
            )
        elif envelope.role == "agent" and envelope.node_rank is not None:
            self._read_agent(peer, envelope, message, envelope.node_rank)
        elif envelope.role == "worker" and envelope.rank is not None:
            self._read_worker(peer, envelope, message, envelope.rank)
        elif envelope.role == "spare":
            self._spares.take(peer, envelope, message)
        else:
            raise RemoteProtocolError(
                "malformed", f"a {envelope.role} without position does not speak to a manager"
            )

    def _read_agent(
        self, peer: bytes, envelope: codec.Envelope, message: messages.Message, node_rank: int
    ) -> None:
        session = self._session_of(peer, envelope)
        is_registration = isinstance(message, _REGISTRATION)
        if session is not None and not session.advance(envelope.sequence):
            if not session.is_ahead(envelope.sequence):
                log.debug("node %d: message %d again", node_rank, envelope.sequence)
                return
            if not is_registration:  # which is the way out of this
                session.is_doubtful = True
                raise RemoteProtocolError(
                    "malformed", f"message {envelope.sequence} comes after {session.sequence}"
                )
        if is_registration:
            self._register(peer, envelope, message)
            return
        is_heartbeat = isinstance(message, messages.Heartbeat)
        if session is None:
            # A manager that was restarted, or an agent that has been given up: it has to introduce
            # itself (again).
            self._outbox.acknowledge(peer, known=False)
            if is_heartbeat:
                return
            raise RemoteProtocolError("foreign", f"node {node_rank} is not registered from there")
        now = self._clock.now()
        marks = (
            message.marks if isinstance(message, messages.Heartbeat) and self._takes_marks else ()
        )
        heard = events.AgentHeard(now, envelope.cause, node_rank, marks)
        _check_speaker(heard, node_rank, session)
        self._executor.feed(heard)
        if is_heartbeat:
            # in a large job not each heartbeat is answered
            if session.answers(now, self._answer_every_s if self._sessions.is_large else 0.0):
                self._answers[not session.is_doubtful].append(peer)
            return
        if isinstance(message, messages.Batch):
            self._take_batch(peer, session, envelope, message, node_rank)
            return
        event = translate.message_to_event(envelope.cause, message, now)
        _check_speaker(event, node_rank, session)
        self._take_in(event, node_rank)

    def _take_batch(
        self,
        peer: bytes,
        session: Session,
        envelope: codec.Envelope,
        reports: messages.Batch,
        node_rank: int,
    ) -> None:
        """Each report for itself: what is refused of one is no matter of the others."""
        batch.check(reports)
        now = self._clock.now()
        for told in reports.reports:
            try:
                event = batch.read(told, now)
                _check_speaker(event, node_rank, session)
                self._take_in(event, node_rank)
            except RemoteProtocolError as error:
                self._refused(peer, error, is_readable=True)
                self._reject(peer, session, envelope, told.type, str(error))

    def _take_in(self, event: events.Event, node_rank: int) -> None:
        """An event of a registered agent that may say it."""
        if isinstance(event, events.WorkerProfiling):
            try:
                self._profiling.heard(event.rank, event.incarnation, event.status)
            except ValueError as error:
                raise RemoteProtocolError("malformed", str(error)) from error
            return
        if isinstance(event, events.RosterKept):
            self._voters.keeps(event)
            return
        if isinstance(event, events.ImportsKnown):
            self._spares.learn(event)
            return
        self._executor.feed(event)
        if isinstance(event, events.WorkerExamined):
            _log_stacks(event)
        if isinstance(event, events.AgentLeft):
            log.info("node %d left: %s %s", node_rank, event.outcome, event.detail)
            del self._sessions.agents[node_rank]

    def _register(self, peer: bytes, envelope: codec.Envelope, message: messages.Message) -> None:
        """An agent claims its position."""
        event = translate.message_to_event(envelope.cause, message, self._clock.now())
        assert isinstance(event, events.AgentRegistered)
        node_rank = event.node_rank
        if (node_rank, event.agent_incarnation) != (envelope.node_rank, envelope.incarnation):
            self._outbox.refuse(peer, "foreign", "a registration for somebody else")
        if self._guarded.machine.postpones(event):
            self._say_taken(peer, envelope, node_rank)
            self._executor.feed(event)
            return
        if self._voters.is_deposed_by(event.agent_incarnation, event.term):
            self._executor.depose(f"node {node_rank} has voted for another manager")
            return
        if self._is_early(event):
            self._say_early(peer, envelope, event)
            return
        refusal = (
            self._sessions.quarantine.refusal(node_rank)
            or self._sessions.claim_refusal(node_rank, peer, envelope.incarnation)
            or self._guarded.machine.refusal(event)
        )
        if refusal is not None:
            is_taken = self._guarded.machine.is_taken(event)
            self._outbox.refuse(peer, "refused", refusal, is_taken=is_taken)
        contradiction = self._voters.contradicts(event)
        if contradiction is not None:
            self._executor.depose(contradiction)
            return
        if self._voters.is_stranger(event):
            self._say_early(peer, envelope, event)
            return
        ranks = frozenset(report.rank for report in event.workers)
        if node_rank not in self._sessions.agents:
            log.info(
                "node %d of %d registered, ranks %.*s of %d",
                node_rank,
                event.node_count,
                SHOWN_CHARACTERS,
                sorted(ranks),
                event.world_size,
            )
        answers = self._guarded.handle(self._voters.without_roster(event))
        self._voters.register(event)
        self._sessions.accept(
            node_rank, Session(peer, envelope.incarnation, envelope.sequence, ranks)
        )
        # First the welcome: what follows is for an agent that knows that it has been accepted.
        self._outbox.welcome(peer, envelope.cause)
        self._executor.execute_all(answers)
        if self._profiling.wanted is not None:
            self._executor.set_profiling(self._profiling.wanted, [node_rank])

    def _say_taken(self, peer: bytes, envelope: codec.Envelope, node_rank: int) -> None:
        """Another agent has the place that this one asks for."""
        if self._sessions.notes_waiting(node_rank):
            log.warning(
                "node %d: another torchrun asks for this place, whose agent counts as present "
                "still. It gets it when that is lost; two torchruns of one index are a mistake",
                node_rank,
            )
        why = "another agent has its place, and is not lost yet"
        self._outbox.send(peer, messages.Postponed(why), envelope.cause)

    def _say_early(
        self, peer: bytes, envelope: codec.Envelope, event: events.AgentRegistered
    ) -> None:
        """Nobody has the place that this one asks for, and it does not get it yet."""
        why = self._voters.why_early
        if self._early.is_new(event.node_rank, event.agent_incarnation):
            log.warning(
                "node %d asks for its place, and does not get it yet: %s", event.node_rank, why
            )
        self._outbox.send(peer, messages.Postponed(why), envelope.cause)

    def _is_early(self, event: events.AgentRegistered) -> bool:
        """Whether it asks for a place that may not be given to it yet; it asks again."""
        node_rank, name = event.node_rank, event.agent_incarnation
        if self._voters.is_pair:
            return not self._voters.may_take(node_rank, name)
        if node_rank not in self._guarded.machine.lost_nodes:
            return False
        holder = self._sessions.holders.get(node_rank)
        is_same = holder is not None and holder.incarnation == name
        is_known = self._voters.is_voter(event)  # to an earlier life of this manager
        return not is_same and not is_known and not self._voters.may_take(node_rank, name)

    def _read_worker(
        self, peer: bytes, envelope: codec.Envelope, message: messages.Message, rank: int
    ) -> None:
        """A training process without agent: known, and told that the manager lives.

        The newest one of a rank counts.
        """
        if isinstance(message, messages.RegisterWorker):
            if message.rank != rank:
                self._outbox.refuse(peer, "foreign", "a registration for somebody else")
            new = Session(peer, envelope.incarnation, envelope.sequence, frozenset((rank,)))
            if not self._sessions.accept_worker(rank, new):
                self._outbox.refuse(peer, "refused", "too many processes without an agent")
            if self._allowance.takes(self._clock.now()):
                log.info(
                    "rank %d registered without an agent (pid %d, %.*s)",
                    rank,
                    message.pid,
                    _FRAMEWORK_CHARACTERS,
                    message.framework,
                )
            self._outbox.welcome(peer, envelope.cause)
        elif isinstance(message, messages.Heartbeat):
            session = self._sessions.workers.get(rank)
            is_known = session is not None and session.is_of(peer, envelope.incarnation)
            self._outbox.acknowledge(peer, known=is_known)
        else:
            raise RemoteProtocolError(
                "foreign", f"a worker without agent does not report {type(message).__name__}"
            )


def _check_speaker(event: events.Event, node_rank: int, session: Session) -> None:
    problem = objection(event, node_rank, session.ranks)
    if problem is not None:
        raise RemoteProtocolError(*problem)


def _log_stacks(event: events.WorkerExamined) -> None:
    log.error("the stacks of rank %d, which hangs (incarnation %d):", event.rank, event.incarnation)
    for line in event.traceback.splitlines():
        log.error("  %s", line)
