"""Snapshots of this node's ranks, fetched from their mirrors: this node has replaced a lost one.

Owns the conversation with the agent that keeps them, and where the snapshots are put: into the
arenas of the ranks, whose processes wait at the gate meanwhile. One snapshot after the other:

    Ask ──►  ◄── Offer    Answer ──►  ◄── Piece, Piece, …    the last Piece is there: verified, kept

Ends with what the manager is to hear. Runs in the thread of `taskd.agent.mirrors.mirroring`.
"""

from __future__ import annotations

import logging
from dataclasses import fields
from typing import TYPE_CHECKING

from taskd.core.events import MirrorsReturned
from taskd.errors import ArenaError, RemoteProtocolError
from taskd.native.arena_copy import Incoming, Outline
from taskd.wire import mirroring
from taskd.wire.mirroring import (
    DAMAGED,
    GO,
    KEPT,
    LATER,
    REFUSED,
    TAKEN,
    Answer,
    Ask,
    Offer,
    Piece,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from taskd.core.commands import ReturnMirrors
    from taskd.native.arenas import Arenas
    from taskd.transport.zeromq import Dealer

log = logging.getLogger(__name__)

_LATER_S = 0.1  # after "later": the other agent has not heard of it yet
_SILENT_S = 10.0  # without a word: asked again, as the connection may have been lost
_TRIES = 3  # of a snapshot that was damaged on its way


class MirrorFetch:
    """One order of the manager. `link` and `arenas` are its own from now on."""

    def __init__(
        self,
        order: ReturnMirrors,
        job_id: str,
        link: Dealer,
        arenas: Mapping[int, Arenas],
        tell: Callable[[MirrorsReturned], None],
    ) -> None:
        """`tell` gets the answer, once."""
        self.order, self.link = order, link
        self._job_id, self._arenas, self._tell = job_id, arenas, tell
        self._todo = list(order.ranks)
        self._damaged, self._transfer, self._is_over = 0, 0, False
        self._incoming: Incoming | None = None
        self._ask_at = 0.0

    def close(self) -> None:
        """Give link and descriptors back."""
        self._is_over = True
        self.link.close()
        for arenas in self._arenas.values():
            arenas.close()

    def go_on(self, link: Dealer) -> None:
        """The former link was closed: ask on this one."""
        self.link, self._ask_at = link, 0.0

    def turn(self, now: float) -> float | None:
        """Hear, go on, ask. Returns when to come again at the latest; None: it is over."""
        for _, data in self.link.receive():
            try:
                frame = mirroring.decode(data)
            except RemoteProtocolError as error:
                log.debug("what was to be a mirror cannot be read: %s", error)
                continue
            if not self._is_over and frame.transfer == self._transfer:
                self._ask_at = now + _SILENT_S
                self._hear(frame, now)
        while not self._is_over and self._todo and self._has(self._todo[0]):
            del self._todo[0]
            self._incoming = None
            self._ask_at = now
        if not self._is_over and not self._todo:
            self._end("")
        if not self._is_over and now >= self._ask_at:
            self._ask(now)
        return None if self._is_over else self._ask_at

    def _has(self, rank: int) -> bool:
        """Whether the snapshot is there, perhaps because of an earlier order."""
        return self._arenas[rank].find(self.order.version) is not None

    def _ask(self, now: float) -> None:
        order = self.order
        self._transfer += 1
        self._incoming, self._ask_at = None, now + _SILENT_S
        who = (self._job_id, order.owner, order.incarnation, order.holder_incarnation)
        self._say(Ask(self._transfer, *who, self._todo[0], order.version))

    def _hear(self, frame: mirroring.Frame, now: float) -> None:
        if isinstance(frame, Offer):
            self._take_offer(frame)
        elif isinstance(frame, Piece):
            self._take_piece(frame, now)
        elif isinstance(frame, Answer) and frame.stage == LATER:
            self._ask_at = now + _LATER_S
        elif isinstance(frame, Answer) and frame.stage == REFUSED:
            self._end(frame.reason)

    def _take_offer(self, offer: Offer) -> None:
        outline = Outline(*(getattr(offer, item.name) for item in fields(Outline)))
        wanted = (self._todo[0], self.order.version)
        if (offer.rank, offer.version) != wanted or outline.true_seal() not in (None, offer.seal):
            self._end(f"what was offered is not version {wanted[1]} of rank {wanted[0]}")
            return
        try:
            self._incoming = Incoming(self._arenas[offer.rank].fitting(outline.size), outline)
        except (ArenaError, OSError) as error:
            self._say(Answer(self._transfer, REFUSED, reason=str(error)))
            self._end(str(error))
            return
        self._say(Answer(self._transfer, GO))

    def _take_piece(self, piece: Piece, now: float) -> None:
        incoming = self._incoming
        if incoming is None or piece.offset != incoming.arrived:
            return  # of a connection before: it is asked for again
        try:
            incoming.put(piece.data)
            if incoming.arrived < incoming.outline.size:
                self._say(Answer(self._transfer, TAKEN, incoming.arrived))
                return
            incoming.complete()
        except ArenaError as error:
            self._say(Answer(self._transfer, DAMAGED, reason=str(error)))
            self._damaged += 1
            if self._damaged >= _TRIES:
                self._end(str(error))
            self._ask_at = now
            return
        self._say(Answer(self._transfer, KEPT, incoming.arrived))
        self._damaged = 0

    def _end(self, reason: str) -> None:
        self._is_over = True
        order = self.order
        done = tuple(rank for rank in order.ranks if rank not in self._todo)
        which = (order.version, order.owner, order.holder)
        if reason:
            log.warning(
                "snapshots of version %d have not come back to node %d from their mirrors on node "
                "%d: %s",
                *which,
                reason,
            )
        else:
            log.info("snapshots of version %d are back on node %d from node %d", *which)
        self._tell(answer_to(order, done, reason))

    def _say(self, frame: mirroring.Frame) -> None:
        self.link.send(None, mirroring.encode(frame))  # what is lost is asked for after _SILENT_S


def answer_to(order: ReturnMirrors, ranks: tuple[int, ...], reason: str) -> MirrorsReturned:
    """What the manager is to hear: these ranks have their snapshots, and why others have not."""
    which = (order.owner, order.generation, order.holder, order.version)
    return MirrorsReturned(0.0, "mirrors", *which, ranks, reason)
