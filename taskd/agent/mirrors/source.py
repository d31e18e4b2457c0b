"""The snapshots of this node's ranks, on their way to the peer node.

Owns what of them has a mirror, and the word in each arena that tells the rank so: while there is a
mirror to wait for, ranks replace no snapshot before all of them have theirs
(`taskd.worker.saving.snapshots`). A peer that is not heard, or has no memory, is not waited for.

One snapshot at a time: offered, sent in pieces of which only a few are under way, verified by the
peer node, kept. Runs in the thread of `taskd.agent.mirrors.mirroring`.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

from taskd.core.policy.mirroring import MirrorPermission
from taskd.errors import ArenaError, RemoteProtocolError
from taskd.native.arena_copy import AWAITED, UNMIRRORED, Outgoing
from taskd.wire import mirroring
from taskd.wire.mirroring import (
    DAMAGED,
    GO,
    KEPT,
    LATER,
    PIECE_BYTES,
    REFUSED,
    TAKEN,
    UNDER_WAY_BYTES,
    Answer,
    Offer,
    Piece,
)

if TYPE_CHECKING:
    from taskd.core.commands import Pair
    from taskd.native.arena import Arena
    from taskd.native.arenas import Arenas
    from taskd.transport.base import Link

log = logging.getLogger(__name__)

_LOOK_S = 0.02  # between two looks for a new snapshot: two words of each rank
_LATER_S = 0.25  # after "later", or damage
WORD_S = 10.0  # so often this node says that it is there, if nothing else
SILENT_S = 10.0  # a peer node that says nothing for so long is not waited for, and asked again


@dataclass(slots=True)
class _Own:
    """A rank of this node.

    `mirrored`: seals of snapshots that have a mirror, enough for those that both can hold.
    """

    arenas: Arenas
    mirrored: deque[int] = field(default_factory=lambda: deque(maxlen=4))
    is_active: bool = False
    is_refused: bool = False

    def newest(self) -> tuple[Arena, int] | None:
        """The arena with the newest snapshot, and its seal."""
        return next(
            (
                (arena, seal)
                for arena in reversed(self.arenas.all())
                if (seal := arena.newest_seal())
            ),
            None,
        )

    def mark(self) -> None:
        """Tell the rank."""
        newest = self.newest()
        for arena in self.arenas.all():
            if not self.is_active:
                mark = UNMIRRORED
            elif newest is not None and arena is newest[0] and newest[1] in self.mirrored:
                mark = newest[1]
            else:
                mark = arena.mirror_mark or AWAITED
            if arena.mirror_mark != mark:
                arena.mirror_mark = mark


@dataclass(slots=True)
class _Transfer:
    """A snapshot on its way. `sent`: bytes of it."""

    number: int
    rank: int
    outgoing: Outgoing
    sent: int = 0


class MirrorSource:
    """See the module."""

    def __init__(self, job_id: str, node_rank: int, incarnation: str) -> None:
        self._job_id, self._node_rank, self._incarnation = job_id, node_rank, incarnation
        self._ranks: dict[int, _Own] = {}
        self._pair: Pair | None = None
        self._link: Link | None = None
        self._transfer: _Transfer | None = None
        self._transfers = 0
        self._heard_at = self._look_at = self._word_at = 0.0
        self._permission = MirrorPermission()
        self._is_silent = False

    # ------------------------------------------------------------ what is to be mirrored, and where

    def pair(self, pair: Pair, link: Link) -> None:
        """From now on to this peer node."""
        self.unpair()
        self._pair, self._link, self._word_at = pair, link, 0.0

    def unpair(self) -> None:
        """From now on to none, so that no rank waits for it. The link may be closed."""
        self._pair, self._link, self._transfer, self._is_silent = None, None, None, False
        for own in self._ranks.values():
            own.mirrored.clear()
            own.is_active = own.is_refused = False
            own.mark()

    def follow(self, arenas: dict[int, Arenas]) -> None:
        """These ranks have other arenas than before."""
        for rank, of_rank in arenas.items():
            if rank in self._ranks:
                self._ranks[rank].arenas.close()
            self._ranks[rank] = _Own(of_rank)
            if self._transfer is not None and self._transfer.rank == rank:
                self._transfer = None

    def permit(self, permission: MirrorPermission) -> None:
        """From now on this holds."""
        self._permission = permission

    def release(self) -> None:
        """Nobody is mirrored any more, and nobody is to wait for it."""
        for own in self._ranks.values():
            own.is_active = False
            own.mark()

    def close(self) -> None:
        """Give descriptors back."""
        for own in self._ranks.values():
            own.arenas.close()

    # ------------------------------------------------------------ the conversation

    def turn(self, now: float) -> float | None:
        """Read what the peer node said, send what is next.

        Returns when to come again at the latest; None: there is no peer node.
        """
        if self._link is None:
            return None
        for _, data in self._link.receive():
            try:
                frame = mirroring.decode(data)
            except RemoteProtocolError as error:
                log.debug("the peer node sent something that is no answer: %s", error)
                continue
            if (
                isinstance(frame, Answer)
                and self._transfer is not None
                and frame.transfer == self._transfer.number
            ):
                self._heard_at = now
                self._hear(self._transfer, frame, now)
        if self._transfer is not None and now - self._heard_at > SILENT_S:
            self._give_up_waiting()
        if self._transfer is None and now >= self._look_at:
            self._look_at = now + _LOOK_S
            self._offer_next(now)
        if self._transfer is None and now >= self._word_at and not self._is_silent:
            self._word_at = now + WORD_S
            # an answer to nothing: else the connection would be closed as a stranger's
            self._send(Answer(0, LATER))
        return self._look_at if self._transfer is None else self._heard_at + SILENT_S

    def _give_up_waiting(self) -> None:
        assert self._pair is not None
        self._transfer = None
        if not self._is_silent:
            self._is_silent = True
            log.warning(
                "node %d, which is to keep mirrors of node %d at %s, has been silent for "
                "%.0f s: snapshots go on without them until it "
                "answers",
                self._pair.buddy,
                self._node_rank,
                self._pair.address,
                SILENT_S,
            )
            self.release()

    def _offer_next(self, now: float) -> None:
        assert self._pair is not None
        for rank, own in list(self._ranks.items()):
            own.mark()
            newest = own.newest()
            if newest is None or own.is_refused or newest[1] in own.mirrored:
                continue
            try:
                outgoing = Outgoing(newest[0])
            except ArenaError:  # it is being overwritten just now
                continue
            outline = outgoing.outline
            if self._permission.is_void(outline.generation, outline.version):
                continue
            self._ranks[rank] = self._ranks.pop(rank)  # next time the others come first
            self._transfers += 1
            self._transfer = _Transfer(self._transfers, rank, outgoing)
            self._heard_at = now
            words = (getattr(outline, item.name) for item in fields(outline))
            self._send(
                Offer(
                    self._transfers,
                    self._job_id,
                    self._node_rank,
                    self._incarnation,
                    self._pair.incarnation,
                    rank,
                    *words,
                )
            )
            return

    def _hear(self, transfer: _Transfer, answer: Answer, now: float) -> None:
        assert self._pair is not None
        own = self._ranks[transfer.rank]
        if answer.stage in (GO, TAKEN, KEPT) and not own.is_active:
            own.is_active = True
            own.mark()
        if answer.stage in (GO, TAKEN):
            self._send_pieces(transfer, answer.taken)
            return
        self._transfer = None
        if answer.stage == KEPT:
            if not own.mirrored or self._is_silent:
                log.info(
                    "snapshots of rank %d are mirrored in the memory of node %d",
                    transfer.rank,
                    self._pair.buddy,
                )
            self._is_silent = False
            own.mirrored.append(transfer.outgoing.outline.seal)
            own.mark()
        elif answer.stage == REFUSED:
            own.is_refused, own.is_active = True, False
            own.mark()
            log.warning(
                "snapshots of rank %d have no mirror and are lost with this node: node %d says: %s",
                transfer.rank,
                self._pair.buddy,
                answer.reason,
            )
        elif answer.stage in (LATER, DAMAGED):
            self._look_at = now + _LATER_S

    def _send_pieces(self, transfer: _Transfer, taken: int) -> None:
        size = transfer.outgoing.outline.size
        while transfer.sent < size and transfer.sent - taken < UNDER_WAY_BYTES:
            data = transfer.outgoing.piece(transfer.sent, PIECE_BYTES)
            if not transfer.outgoing.is_intact():
                # the rank has rolled back, or does not wait: there is a newer one, or will be
                self._transfer = None
                return
            self._send(Piece(transfer.number, transfer.sent, data))
            transfer.sent += len(data)

    def _send(self, frame: Offer | Piece | Answer) -> None:
        assert self._link is not None
        # what is lost with a connection is sent anew after SILENT_S
        self._link.send(None, mirroring.encode(frame))
