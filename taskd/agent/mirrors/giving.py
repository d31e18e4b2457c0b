"""Mirrors that are given back to a node that was replaced: the side of the node that keeps them.

Owns who may have which, as the manager has ordered, and the transfers that are under way. Speaks
when it is spoken to: whoever asks looks after the time, and asks again. Runs in the thread of
`taskd.agent.mirrors.mirroring`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from taskd.errors import ArenaError, RemoteProtocolError
from taskd.native.arena_copy import Outline
from taskd.wire.mirroring import (
    GO,
    LATER,
    PIECE_BYTES,
    REFUSED,
    TAKEN,
    UNDER_WAY_BYTES,
    Answer,
    Ask,
    Offer,
    Piece,
)

if TYPE_CHECKING:
    from taskd.agent.mirrors.store import MirrorStore
    from taskd.core.commands import ReturnMirrors
    from taskd.native.arena_copy import Outgoing
    from taskd.wire.mirroring import Frame


@dataclass(slots=True)
class _Transfer:
    """A snapshot on its way to whoever has asked for it. `sent`: bytes of it."""

    number: int
    outgoing: Outgoing
    sent: int = 0


class MirrorGiving:
    """See the module."""

    def __init__(self, job_id: str, node_rank: int, incarnation: str, store: MirrorStore) -> None:
        self._job_id, self._node_rank, self._incarnation = job_id, node_rank, incarnation
        self._store = store
        self._orders: dict[int, ReturnMirrors] = {}  # by owner
        self._transfers: dict[bytes, _Transfer] = {}  # by who has asked; one at a time

    def order(self, order: ReturnMirrors) -> None:
        """From now on the agent in the place of `owner` may have these."""
        self._orders[order.owner] = order

    def end(self) -> None:
        """The recovery is over: nobody may have any more."""
        self._orders.clear()
        self._transfers.clear()

    def hear(self, peer: bytes, frame: Ask | Answer) -> list[Frame]:
        """What to say to the peer. Raises RemoteProtocolError: it is a stranger."""
        return self._offer(peer, frame) if isinstance(frame, Ask) else self._go_on(peer, frame)

    def _offer(self, peer: bytes, ask: Ask) -> list[Frame]:
        order = self._orders.get(ask.node_rank)
        if (ask.job_id, ask.to) != (self._job_id, self._incarnation):
            raise RemoteProtocolError(
                "foreign", f"node {ask.node_rank} of job {ask.job_id} asked another agent's mirrors"
            )
        if order is None or order.incarnation != ask.incarnation:
            # the manager's word to this node may be later than that to the other one
            return [Answer(ask.transfer, LATER)]
        if ask.rank not in order.ranks or ask.version != order.version:
            raise RemoteProtocolError(
                "foreign",
                f"node {ask.node_rank} asked for version {ask.version} of rank {ask.rank}, which "
                "is not to be given back",
            )
        try:
            transfer = _Transfer(ask.transfer, self._store.outgoing(ask.rank, ask.version))
        except ArenaError as error:
            return [Answer(ask.transfer, REFUSED, reason=str(error))]
        self._transfers[peer] = transfer
        outline = transfer.outgoing.outline
        words = (getattr(outline, item.name) for item in fields(Outline))
        who = (self._job_id, self._node_rank, self._incarnation, ask.incarnation, ask.rank)
        return [Offer(ask.transfer, *who, *words)]

    def _go_on(self, peer: bytes, answer: Answer) -> list[Frame]:
        transfer = self._transfers.get(peer)
        if transfer is None or transfer.number != answer.transfer:
            return []
        if answer.stage not in (GO, TAKEN):
            del self._transfers[peer]
            return []
        size = transfer.outgoing.outline.size
        pieces: list[Frame] = []
        while transfer.sent < size and transfer.sent - answer.taken < UNDER_WAY_BYTES:
            data = transfer.outgoing.piece(transfer.sent, PIECE_BYTES)
            if not transfer.outgoing.is_intact():
                del self._transfers[peer]
                reason = f"the mirror on node {self._node_rank} was overwritten"
                return [Answer(answer.transfer, REFUSED, reason=reason)]
            pieces.append(Piece(transfer.number, transfer.sent, data))
            transfer.sent += len(data)
        return pieces
