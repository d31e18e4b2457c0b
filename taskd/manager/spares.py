"""The torchruns that wait for a place in the job: what they say, and what they are told.

Who gets which place is decided in `taskd.core.policy.spares`.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from taskd.core import commands, events
from taskd.core.policy.spares import Spares
from taskd.core.timeouts import Timeouts
from taskd.errors import RemoteProtocolError
from taskd.log import SHOWN_CHARACTERS, Allowance
from taskd.wire import messages, translate

if TYPE_CHECKING:
    from collections.abc import Collection

    from taskd.clock import Clock
    from taskd.config import ManagerConfig
    from taskd.manager.electorate import VoterDesk
    from taskd.manager.guarded import GuardedMachine
    from taskd.manager.outbox import Outbox
    from taskd.wire import codec

log = logging.getLogger(__name__)

_LINES, _INTERVAL_S = 1000, 3600.0  # anybody may say that he is a spare
_NAME_CHARACTERS = 64
_NO_USE = (
    "this job replaces no nodes: a spare needs recover in TASKD_RECOVER_STRATEGY, for the manager "
    "and for every torchrun"
)


class SpareDesk:
    """`take` is called for each message of a spare, `turn` after whatever else happened."""

    def __init__(
        self,
        config: ManagerConfig,
        clock: Clock,
        guarded: GuardedMachine,
        outbox: Outbox,
        voters: VoterDesk,
    ) -> None:
        """`voters`: says whether a place may be given away."""
        self._clock, self._guarded, self._outbox = clock, guarded, outbox
        self._spares = Spares(Timeouts.derive(config.fault_timeout_s), clock.now())
        self._connections: dict[str, bytes] = {}  # by the spare's incarnation
        self._voters = voters
        self._listens: dict[str, str] = {}  # by the same: where it hears of another manager
        self._hosts: dict[str, str] = {}  # where it is, for people, by the same
        self._imports: events.ImportsKnown | None = None  # as a node has told
        self._allowance = Allowance(_LINES, _INTERVAL_S)

    @property
    def next_deadline(self) -> float | None:
        """When `turn` has something to do."""
        return self._spares.next_deadline()

    @property
    def listeners(self) -> list[str]:
        """Where spares can be told of another manager."""
        return [address for address in self._listens.values() if address]

    def take(self, peer: bytes, envelope: codec.Envelope, message: messages.Message) -> None:
        """Read one message. Raises `RemoteProtocolError`."""
        spare, now = envelope.incarnation, self._clock.now()
        if not isinstance(spare, str) or self._connections.get(spare, peer) != peer:
            raise RemoteProtocolError("foreign", "a spare speaks for itself alone")
        if isinstance(message, messages.Heartbeat):
            self._outbox.acknowledge(peer, known=self._spares.heard(spare, now))
            return
        event = translate.message_to_event(envelope, message, now)
        if isinstance(event, events.SpareRegistered):
            self._register(peer, spare, event)
        elif not isinstance(event, events.SpareLeft):
            raise RemoteProtocolError(
                "foreign", f"a spare does not report {type(message).__name__}"
            )
        elif spare in self._spares:
            self._spares.leave(spare, now, takes_place=event.takes_place)
            self._say("the spare on %s leaves: %s", spare, event.reason)

    def learn(self, event: events.ImportsKnown) -> None:
        """What workers import, spares may import beforehand."""
        self._imports = event
        for spare in self._spares.names:
            self._tell_imports(spare)

    def turn(self, now: float) -> None:
        """Offer the places of lost nodes to those who wait."""
        lost = self._guarded.machine.lost_nodes
        for offer in self._spares.offers(lost if lost and self._voters.may_replace() else (), now):
            log.warning(
                "node %d is lost: its place is offered to the spare on %s",
                offer.node_rank,
                self._hosts[offer.spare],
            )
            machine = self._guarded.machine
            told = (machine.generation, offer.node_rank, machine.meeting_store)
            self._tell(offer.spare, commands.OfferPlace("spare", *told))
        for spare in [spare for spare in self._connections if spare not in self._spares]:
            del self._connections[spare], self._hosts[spare], self._listens[spare]
            self._voters.note_change()

    def lose(self, connections: Collection[bytes]) -> None:
        """Their connections broke. Who is still there registers again."""
        for spare, peer in self._connections.items() if connections else ():
            if peer in connections and spare in self._spares:
                self._spares.leave(spare, self._clock.now())
                self._say("the spare on %s leaves: %s", spare, "its connection broke")

    def dismiss(self, *, succeeded: bool, reason: str) -> None:
        """The job is over."""
        for spare in self._spares.names:
            generation = self._guarded.machine.generation
            self._tell(spare, commands.Dismiss("over", generation, succeeded, reason))

    def _register(self, peer: bytes, spare: str, event: events.SpareRegistered) -> None:
        machine, node_rank = self._guarded.machine, event.node_rank
        if event.asks and not self._spares.may_answer(
            event.now, is_sure=machine.is_sure(node_rank)
        ):
            return
        if event.asks and not machine.is_late(node_rank):
            order = commands.Proceed("spare", machine.generation)
            self._outbox.send(peer, translate.command_to_message(order), order.cause)
            return
        refusal = _NO_USE if not machine.replaces_nodes else self._spares.refusal(spare)
        if refusal is not None:
            self._outbox.refuse(peer, "refused", refusal)
        is_new = spare not in self._spares
        self._spares.join(spare, event.host, event.now)
        self._connections[spare], self._hosts[spare] = peer, event.name[:_NAME_CHARACTERS]
        self._listens[spare] = event.listens[:_NAME_CHARACTERS]
        self._voters.note_change()
        if is_new and self._spares.is_barred(event.host):
            self._say(
                "a spare waits on %s, and is offered nothing: %s", spare, "it lost places before"
            )
        elif is_new:
            self._say("a spare waits on %s (%s wait now)", spare, str(len(self._spares)))
        self._outbox.welcome(peer, event.cause)
        self._tell_imports(spare)

    def _tell_imports(self, spare: str) -> None:
        if self._imports is not None:
            told = (self._imports.modules, self._imports.variables)
            generation = self._guarded.machine.generation
            self._tell(spare, commands.Preload("imports", generation, *told))

    def _tell(self, spare: str, command: commands.Command) -> None:
        """One that cannot be reached registers when it is back, and is offered a place again."""
        message = translate.command_to_message(command)
        self._outbox.send(self._connections[spare], message, command.cause)

    def _say(self, text: str, spare: str, detail: str) -> None:
        if self._allowance.takes(self._clock.now()):
            log.info(text, self._hosts[spare], detail[:SHOWN_CHARACTERS])
