"""The link of a client to the manager.

Registers, gives signs of life, registers again when the manager forgot it.

Used by agents without processes of their own (callbacks) and by workers without agent (taskd.api).
Owns the dealer and the sequence. Decides nothing: what the manager orders is handed to the caller.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from taskd.core.timeouts import Timeouts
from taskd.errors import RemoteProtocolError
from taskd.transport import zeromq
from taskd.wire import codec, messages, translate

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from taskd.clock import Clock
    from taskd.core import commands

log = logging.getLogger(__name__)


class Upstream:
    """See the module. The caller waits with `poll`, then calls `turn`."""

    def __init__(
        self,
        address: str,
        secret: bytes | None,
        clock: Clock,
        *,
        envelope: codec.Envelope,
        registration: Callable[[], messages.Message],
        fault_timeout_s: float,
    ) -> None:
        """`envelope`: what every message of ours carries.

        `registration` is asked whenever one is needed.
        """
        identity = f"{envelope.role}-{envelope.node_rank}-{envelope.rank}-{envelope.incarnation}"
        self._dealer = zeromq.Dealer(address, identity, secret=secret)
        self._address = address
        self._clock = clock
        self._envelope = envelope
        self._registration = registration
        self._timeouts = Timeouts.derive(fault_timeout_s)
        self._sequence = 0
        self._next_beat = clock.now()
        self._heard_at: float | None = None
        self._manager_incarnation: str | None = None
        self.has_joined = False
        self.has_ever_joined = False
        self.refusal: str | None = None
        self.generation = 0
        self.restarts_used = 0

    def poll(self, timeout_s: float | None = None, fds: Sequence[int] = ()) -> set[int]:
        """Wait for the manager, for `fds`, or until the next sign of life is due (earlier: `timeout_s`)."""
        until_beat_s = max(0.0, self._next_beat - self._clock.now())
        return self._dealer.poll(
            until_beat_s if timeout_s is None else min(until_beat_s, timeout_s), fds
        )

    def turn(self) -> list[commands.Command]:
        """Read what the manager said, and speak if it is time. Returns its orders."""
        orders: list[commands.Command] = []
        for _, data in self._dealer.receive():
            try:
                orders += self._hear(*codec.decode(data))
            except RemoteProtocolError as error:
                log.warning("what answers at %s is no manager of ours: %s", self._address, error)
        now = self._clock.now()
        if now >= self._next_beat and self.refusal is None:
            self._beat(now)
        return orders

    def send(self, message: messages.Message, cause: str) -> None:
        """Say something to the manager."""
        self._sequence += 1
        envelope = codec.Envelope(
            job_id=self._envelope.job_id,
            role=self._envelope.role,
            node_rank=self._envelope.node_rank,
            rank=self._envelope.rank,
            incarnation=self._envelope.incarnation,
            generation=self.generation,
            sequence=self._sequence,
            cause=cause,
        )
        self._dealer.send(None, codec.encode(envelope, message))

    def close(self) -> None:
        """Leave; last words get a moment to go out."""
        self._dealer.close()

    def _hear(self, envelope: codec.Envelope, message: messages.Message) -> list[commands.Command]:
        if envelope.role != "manager" or envelope.job_id != self._envelope.job_id:
            raise RemoteProtocolError("foreign", f"from a {envelope.role} of job {envelope.job_id}")
        self._heard_at = self._clock.now()
        if isinstance(message, messages.Accepted):
            self.has_joined = self.has_ever_joined = True
            self._manager_incarnation = message.manager_incarnation
            self.generation, self.restarts_used = message.generation, message.restarts_used
        elif isinstance(message, messages.Refused):
            self.refusal = message.reason
            log.error("the manager at %s refused us: %s", self._address, message.reason)
        elif isinstance(message, messages.HeartbeatAck):
            if not message.known or message.manager_incarnation != self._manager_incarnation:
                self._register()
        elif isinstance(message, messages.Rejected):
            log.warning(
                "the manager at %s has not taken in a message of this process (%s)",
                self._address,
                message.reason,
            )
        elif isinstance(message, messages.Unsupported):
            log.warning(
                "the manager at %s is older than this process: it does not know message type %d",
                self._address,
                message.type,
            )
        else:
            return [translate.message_to_command(envelope, message)]
        return []

    def _register(self) -> None:
        self.has_joined = False
        self.send(self._registration(), "registration")

    def _beat(self, now: float) -> None:
        self._next_beat = now + self._timeouts.heartbeat_s
        if self._heard_at is not None and now - self._heard_at > self._timeouts.manager_silence_s:
            self.has_joined = False
        if self.has_joined:
            self.send(messages.Heartbeat(), "heartbeat")
        else:
            self._register()
