"""The connection of one process to the manager: of agents, spares, workers without an agent.

Owns the socket, the numbering of what is said, and the spacing of heartbeats. What the manager says
comes out as events of the core: `ManagerJoined`, `ManagerRefused`, `ManagerLost` and
`CommandReceived`. When to register again, and when the manager counts as lost, is decided in
`taskd.core.policy.registration`.
"""

from __future__ import annotations

import logging
import secrets
from typing import TYPE_CHECKING

from taskd.core import events
from taskd.core.policy.registration import Registration
from taskd.errors import LocalProtocolError, RemoteProtocolError, TransportError
from taskd.transport import curve, zeromq
from taskd.wire import batch, codec, messages, translate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from taskd.clock import Clock
    from taskd.core.marks import Mark
    from taskd.core.timeouts import Timeouts

log = logging.getLogger(__name__)

_INTRODUCTION_S = 5.0  # for hosts under load; a host that nobody can reach costs as much


class ManagerConnection:
    """See the module. The caller waits with `poll`; then `turn`, or `receive` and `beat`."""

    def __init__(
        self,
        address: str,
        secret: bytes | None,
        clock: Clock,
        timeouts: Timeouts,
        *,
        job_id: str,
        role: str,
        node_rank: int | None,
        incarnation: str,
        rank: int | None = None,
        register: Callable[[], object],
    ) -> None:
        """`job_id` to `rank`: who speaks, see `codec.Envelope`.

        Args:
            address: of the manager, host:port.
            secret: what both sides know; None: connections are open.
            clock: for heartbeats and silence.
            timeouts: of the job.
            register: says by `send` who this process is; called whenever that is due.
        """
        self.session = Registration(timeouts)
        self.address = address
        self.generation = 0  # that of what is said; kept up to date by the caller
        self.beat_at = self._begins_at = clock.now()  # when the next heartbeat is due
        self._sender = (job_id, role, node_rank, rank, incarnation)
        who = "-".join(str(part) for part in self._sender[1:] if part is not None)
        self._place = role if node_rank is None else f"node {node_rank}"
        # All but the end of it is known to others. Whoever connects under the whole name is this
        # process: it says it to its manager, and to nobody else.
        self._identity, self._secret = f"{who}.{secrets.token_hex(16)}", secret
        # With a secret, what other holders of it do not have: the key by which the manager knows
        # this process from its start to its end.
        self._key = None if secret is None else curve.draw()
        self._clock = clock
        self._timeouts = timeouts
        self._dealer = self._connect()
        self.stranger = ""  # what answers at the address if it is no manager of this job
        self.postponed = ""  # why the manager does not take this process yet
        self._register = register
        # hears of messages that the manager has not taken in
        self.rejected: Callable[[messages.Rejected], None] = self._log_rejected
        self._sequence = 0
        self._gathered: list[tuple[str, messages.Message]] = []  # cause, message
        self._gather_until = 0.0
        self._sends_batches = True

    def poll(
        self,
        timeout_s: float | None = None,
        fds: Sequence[int] = (),
        links: Sequence[zeromq.Router | zeromq.Dealer] = (),
    ) -> set[int]:
        """Wait for the manager, `fds`, `links`, for `timeout_s` or until a heartbeat is due.

        Returns those of `fds` that are readable.
        """
        now = self._clock.now()
        wait_s = max(0.0, self.beat_at - now)
        if timeout_s is not None:
            wait_s = min(wait_s, timeout_s)
        if self._gathered and now < self._gather_until:
            wait_s = min(wait_s, self._gather_until - now)
        else:
            self._say_gathered()
        former = self._dealer.connection
        ready = zeromq.poll([self._dealer, *links], wait_s, fds)
        if self._dealer.connection not in (0, former) and not self.session.is_registered:
            self.beat_at = max(self._clock.now(), self._begins_at)  # there is somebody to tell
        return ready

    def turn(self) -> Iterator[events.Event]:
        """`receive`, and `beat` if it is time."""
        yield from self.receive()
        if self._clock.now() >= self.beat_at:
            yield from self.beat()

    def receive(self) -> Iterator[events.Event]:
        """What the manager said since the last call; never blocks."""
        for _, data in self._dealer.receive():
            try:
                event = self._event_of(*codec.decode(data))
            except RemoteProtocolError as error:
                if error.reason == "foreign":
                    if str(error) != self.stranger:
                        log.warning(
                            "what answers at %s is no manager of ours: %s", self.address, error
                        )
                    self.stranger = str(error)
                else:
                    log.warning(
                        "the manager at %s sent something that is no message: %s",
                        self.address,
                        error,
                    )
            else:
                if event is not None:
                    yield event

    def beat(
        self, marks: tuple[Mark, ...] = (), next_s: float | None = None
    ) -> Iterator[events.Event]:
        """Say that this process is alive, or try again to register.

        Args:
            marks: how far the workers have come.
            next_s: until the next heartbeat, if it is to be sooner than usual.
        """
        now = self._clock.now()
        self.beat_at = now + (self._timeouts.heartbeat_s if next_s is None else next_s)
        if self.session.is_refused:
            return
        if self.session.loses_manager(now):
            yield events.ManagerLost(now, "silence")
        if not self.session.is_registered:
            if self.session.asks(self._dealer.connection):
                self._register()
            return
        try:
            self.send(messages.Heartbeat(marks), "heartbeat")
        except LocalProtocolError as error:  # hundreds of workers on one node
            log.warning("%s: hangs are not looked for here: %s", self._place, error)
            self.send(messages.Heartbeat(), "heartbeat")

    def send(self, message: messages.Message, cause: str) -> int:
        """Say something to the manager, and return its number. Raises `LocalProtocolError`."""
        self._say_gathered()
        self._dealer.send(None, self.encode(message, cause))
        return self._sequence

    def gather(self, message: messages.Message, cause: str) -> None:
        """Say this (`batch.may_wait`) with what else there is, before the next `poll` waits.

        In a large job it waits `Timeouts.gather_s`. The order of what is said is kept.
        """
        if not self._gathered:
            self._gather_until = self._clock.now() + self._timeouts.gather_s
        self._gathered.append((cause, message))
        if len(self._gathered) == batch.MAX_REPORTS:
            self._say_gathered()

    def _say_gathered(self) -> None:
        gathered, self._gathered = self._gathered, []
        if len(gathered) > 1 and self._sends_batches:
            try:
                self._dealer.send(None, self.encode(batch.batch_of(gathered), "reports"))
            except LocalProtocolError:  # a worker has written something odd: the others go alone
                pass
            else:
                return
        for cause, message in gathered:
            try:
                self._dealer.send(None, self.encode(message, cause))
            except LocalProtocolError as error:
                log.warning(
                    "%s: the manager goes on without a %s: %s. Please report it",
                    self._place,
                    type(message).__name__,
                    error,
                )

    def encode(self, message: messages.Message, cause: str) -> bytes:
        """The bytes of a message of this process. Raises `LocalProtocolError` if too large."""
        self._sequence += 1
        envelope = codec.Envelope(*self._sender, self.generation, self._sequence, cause)
        return codec.encode(envelope, message)

    def redirect(self, address: str, delay_s: float = 0.0) -> None:
        """Look for the manager there from now on. What was not sent yet is dropped.

        Raises `TransportError`: it is no address, and nothing has changed.
        """
        former, self.address = self.address, address
        if address == former:
            # Two connections of one name at one manager: what the former one still has to send
            # would make it the one that is answered.
            self._dealer.abandon()
        try:
            dealer = self._connect()
        except TransportError:
            self.address = former
            raise
        if address != former:
            self._dealer.close()
        self._dealer, self.stranger, self.postponed = dealer, "", ""
        self._gathered.clear()
        self.beat_at = self._begins_at = self._clock.now() + delay_s
        self.session = Registration(self._timeouts)

    def introduce(self) -> None:
        """Register before last words that a manager would not take from somebody unknown.

        For a process that ends before it is accepted: it waits for a connection for a moment, but
        not where the last attempt has failed.
        """
        is_unwanted = self.session.is_refused or self.postponed
        if self.session.is_registered or is_unwanted:
            return
        if self._dealer.attempts.wait(_INTRODUCTION_S):
            self._register()

    def close(self) -> None:
        """Leave; last words get a moment to go out."""
        self._say_gathered()
        if self._dealer.connection:
            self._dealer.part()
        else:
            self._dealer.close()

    def reaches(self, timeout_s: float) -> bool:
        """Whether anybody listens at the address."""
        return self._dealer.attempts.reaches(timeout_s)

    @property
    def why_unheard(self) -> str:
        """What is known of why no manager answers, as the end of a sentence; "": nothing."""
        if not self._dealer.attempts.is_turned_away:
            return ""
        return (
            " (somebody listens there and ends the connection: another TASKD_SECRET_FILE than "
            "here, or none on one side; another version of taskd; or no manager)"
        )

    def _connect(self) -> zeromq.Dealer:
        return zeromq.Dealer(
            self.address,
            self._identity,
            secret=self._secret,
            key=self._key,
            unacknowledged_s=self._timeouts.unacknowledged_s,
            watches=True,
        )

    def _event_of(self, envelope: codec.Envelope, message: messages.Message) -> events.Event | None:
        """What this message means; None: nothing to the caller."""
        if envelope.role != "manager" or envelope.job_id != self._sender[0]:
            which = "this" if envelope.job_id == self._sender[0] else "another"
            raise RemoteProtocolError("foreign", f"it is a {envelope.role} of {which} job")
        now = self._clock.now()
        self.session.heard(now)
        match message:
            case messages.Accepted():
                is_known = self.session.is_registered  # a network that was away brings several
                self.session.accepted(message.manager_incarnation)
                self.postponed = ""
                log.log(
                    logging.DEBUG if is_known else logging.INFO,
                    "joined the manager at %s as %s",
                    self.address,
                    self._place,
                )
                return events.ManagerJoined(
                    now, "accepted", message.generation, message.restarts_used, message.term
                )
            case messages.Refused():
                self.session.refused()
                log.error(
                    "the manager at %s refused us: %s",
                    self.address,
                    message.reason,
                )
                return events.ManagerRefused(now, "refused", message.reason, message.is_taken)
            case messages.Postponed():
                self._note_postponed(message.reason)
            case messages.HeartbeatAck():
                if self.session.acknowledged(
                    is_known=message.known, manager_incarnation=message.manager_incarnation
                ):
                    self._register()
            case messages.Rejected():
                self.rejected(message)
            case messages.Unsupported():
                if message.type == messages.Batch.code:
                    self._sends_batches = False
                    self._register()  # once that is accepted, it hears all that was lost
                log.warning(
                    "the manager does not know message type %d: the manager at %s is older than "
                    "this process",
                    message.type,
                    self.address,
                )
            case _:
                command = translate.message_to_command(envelope, message)
                return events.CommandReceived(now, envelope.cause, command)
        return None

    def _note_postponed(self, reason: str) -> None:
        if reason != self.postponed:
            log.warning(
                "the manager at %s does not take %s yet: %s", self.address, self._place, reason
            )
        self.postponed = reason

    def _log_rejected(self, answer: messages.Rejected) -> None:
        log.warning(
            "the manager at %s has not taken in a message of this process (%s)",
            self.address,
            answer.reason,
        )
