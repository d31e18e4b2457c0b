"""The torchruns that wait for a place in the job: what they say, and what they are told.

Who gets which place is decided in `taskd.core.policy.spares`.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from taskd.core import commands, events
from taskd.core.policy.pairs import WaitingSpare
from taskd.core.policy.spares import Spares
from taskd.core.timeouts import Timeouts
from taskd.errors import RemoteProtocolError
from taskd.log import SHOWN_CHARACTERS, Allowance
from taskd.transport.base import NAMELESS
from taskd.wire import messages, translate

if TYPE_CHECKING:
    from collections.abc import Collection

    from taskd.clock import Clock
    from taskd.config import ManagerConfig
    from taskd.manager.electorate import VoterDesk
    from taskd.manager.executor import Executor
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
        executor: Executor,
    ) -> None:
        """`voters`: says who may have a place. `executor`: to end this manager."""
        self._clock, self._guarded, self._outbox = clock, guarded, outbox
        self._spares = Spares(Timeouts.derive(config.fault_timeout_s), clock.now())
        self._connections: dict[str, bytes] = {}  # by the spare's incarnation
        self._voters, self._executor = voters, executor
        self._listens: dict[str, str] = {}  # by the same: where it hears of another manager
        self._hosts: dict[str, str] = {}  # where it is, for people, by the same
        self._machines: dict[str, str] = {}  # the same for all torchruns there, by the same
        self._told: dict[str, object] = {}  # key of the roster, by the same
        self._witness: str | None = None  # who is known to have a vote
        self._is_held_back = False
        self._unserved: dict[int, str] = {}  # by place: why nobody takes it, as was said last
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

    @property
    def candidates(self) -> list[WaitingSpare]:
        """Those that wait, in the order in which they get a place."""
        return [
            WaitingSpare(name, self._listens[name], may_vote=self._may_vote(name))
            for name in self._spares.names
            if name in self._listens
        ]

    def take(self, peer: bytes, envelope: codec.Envelope, message: messages.Message) -> None:
        """Read one message. Raises `RemoteProtocolError`."""
        spare, now = envelope.incarnation, self._clock.now()
        is_former = peer.startswith(NAMELESS)  # of one that has connected anew
        if not isinstance(spare, str) or is_former or self._connections.get(spare, peer) != peer:
            raise RemoteProtocolError("foreign", "a spare speaks for itself alone")
        if isinstance(message, messages.Heartbeat):
            self._outbox.acknowledge(peer, known=self._spares.heard(spare, now))
            return
        event = translate.message_to_event(envelope.cause, message, now)
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
        free = lost if self._voters.may_offer(lost) else ()
        takers = self._voters.takers(free, self._spares.names)
        for offer in self._spares.offers(free, now, takers):
            log.warning(
                "node %d is lost: its place is offered to the spare on %s",
                offer.node_rank,
                self._hosts[offer.spare],
            )
            machine = self._guarded.machine
            told = (machine.generation, offer.node_rank, machine.meeting_store)
            self._tell(offer.spare, commands.OfferPlace("spare", *told))
        for spare in [spare for spare in self._connections if spare not in self._spares]:
            for known in (self._connections, self._hosts, self._listens, self._machines):
                del known[spare]
            self._told.pop(spare, None)
            self._voters.note_change()
        self._say_if_held_back(lost)
        self._say_if_unserved(free)

    def _say_if_unserved(self, lost: Collection[int]) -> None:
        """Once for each reason, as long as the place is free."""
        unserved = self._spares.unserved(lost)
        for node_rank, why in unserved.items():
            if self._unserved.get(node_rank) != why:
                log.warning(
                    "node %d is lost, and nobody takes its place yet: %s; start its torchrun "
                    "again, or a spare on another host",
                    node_rank,
                    why,
                )
        self._unserved = unserved

    def tell_witness(self) -> None:
        """The spare that votes has to know the newest roster."""
        roster = self._voters.roster
        if roster is None:
            return
        for spare in self._connections:
            if self._voters.lacks(spare) and self._told.get(spare) != roster.key:
                self._told[spare] = roster.key
                generation = self._guarded.machine.generation
                self._tell(spare, commands.KeepRoster("roster", generation, roster))
        witness = self._voters.witness
        if witness is not None and witness != self._witness and witness in self._hosts:
            log.info(
                "the spare on %s has a vote: if the host of the manager is lost, a node and this "
                "spare go on",
                self._hosts[witness],
            )
        if witness is not None or roster.witness is None:
            self._witness = witness

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
        if self._voters.is_deposed_by(spare, event.term):
            where = event.name[:_NAME_CHARACTERS]
            self._executor.depose(f"the spare on {where} has voted for another manager")
            return
        refusal = _NO_USE if not machine.replaces_nodes else self._spares.refusal(spare)
        if refusal is not None:
            self._outbox.refuse(peer, "refused", refusal)
        is_new = spare not in self._spares
        self._spares.join(spare, event.host, event.now)
        self._connections[spare], self._hosts[spare] = peer, event.name[:_NAME_CHARACTERS]
        self._listens[spare] = event.listens[:_NAME_CHARACTERS]
        self._machines[spare] = event.host
        self._told.pop(spare, None)
        self._voters.note_known(spare, event.roster)
        self._voters.note_change()
        if is_new and self._spares.is_barred(event.host):
            self._say(
                "a spare waits on %s, and is offered nothing: %s", spare, "it lost places before"
            )
        elif is_new:
            self._say("a spare waits on %s (%s wait now)", spare, str(len(self._spares)))
        self._outbox.welcome(peer, event.cause)
        self._tell_imports(spare)

    def _may_vote(self, spare: str) -> bool:
        return bool(self._listens[spare]) and not self._spares.is_barred(self._machines[spare])

    def _say_if_held_back(self, lost: Collection[int]) -> None:
        is_held_back = self._voters.is_held_back(lost, self._spares.names)
        is_held_back = is_held_back and not self._spares.expected
        if is_held_back and not self._is_held_back:
            log.warning(
                "node %d is lost, and the spare that has a vote is out of reach: the two may go on "
                "with another manager, so nobody else gets the place before one of them is back",
                min(lost),
            )
        self._is_held_back = is_held_back

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
