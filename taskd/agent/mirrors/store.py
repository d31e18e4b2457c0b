"""Mirrors of other nodes' snapshots in the memory of this one.

Owns that memory: an arena for each rank, with two buffers as on its own node, so that the newest
whole mirror survives whatever becomes of the next one. Frames come in and answers go out in the
thread of `taskd.agent.mirrors.mirroring`, which alone touches arenas; what the agent's loop asks is
answered from a table under a lock that is never held for longer than a look at it.

Which mirrors may be begun is `taskd.core.policy.mirroring`'s business.
"""

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields

from taskd.core.policy.mirroring import MirrorPermission
from taskd.errors import ArenaError, RemoteProtocolError
from taskd.log import SayOnce
from taskd.native.arena import Arena
from taskd.native.arena_copy import Incoming, Outgoing, Outline
from taskd.native.arenas import Arenas
from taskd.wire.mirroring import DAMAGED, GO, KEPT, LATER, REFUSED, TAKEN, Answer, Offer, Piece

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a whole mirror is, and the generation in which its snapshot was made."""

    generation: int
    seal: int
    arena: Arena
    slot: int


@dataclass(slots=True)
class _Mirror:
    """What there is of one rank, a rank of `node_rank`."""

    node_rank: int
    arenas: Arenas
    table: dict[int, _Place] = field(default_factory=dict)  # by version


@dataclass(frozen=True, slots=True)
class _Transfer:
    """A snapshot that is coming."""

    number: int
    rank: int
    arena: Arena
    incoming: Incoming


class MirrorStore:
    """See the module."""

    def __init__(
        self, job_id: str, node_rank: int, incarnation: str, tell: Callable[[], None]
    ) -> None:
        """`tell` is called, in the thread, when a mirror has become whole while frozen."""
        self._job_id, self._node_rank, self._incarnation, self._tell = (
            job_id,
            node_rank,
            incarnation,
            tell,
        )
        self._transfers: dict[int, tuple[bytes, _Transfer]] = {}  # by node: who sends it, and what
        self._once = SayOnce()
        self._lock = threading.Lock()
        # Below: under the lock, except that only the thread changes which mirrors there are.
        self._mirrors: dict[int, _Mirror] = {}
        self._sources: dict[int, str] = {}
        self._permission = MirrorPermission()
        self._is_swept = False

    # ------------------------------------------------------------ for the agent's loop

    def held(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """The versions of each rank that are whole."""
        with self._lock:
            return tuple(
                (rank, tuple(sorted(mirror.table)))
                for rank, mirror in sorted(self._mirrors.items())
                if mirror.table
            )

    def find(self, rank: int, version: int) -> int | None:
        """A descriptor of the arena that holds this version."""
        with self._lock:
            place = self._mirrors[rank].table.get(version) if rank in self._mirrors else None
            return None if place is None else place.arena.fd

    def permit(self, permission: MirrorPermission) -> None:
        """From now on this holds. What is void by it is forgotten."""
        with self._lock:
            self._permission, self._is_swept = permission, False
            for mirror in self._mirrors.values():
                mirror.table = {
                    version: place
                    for version, place in mirror.table.items()
                    if not permission.is_void(place.generation, version)
                }

    def serve(self, sources: Mapping[int, str]) -> None:
        """Keep the snapshots of these nodes only. Values: the incarnations of their agents."""
        with self._lock:
            self._sources, self._is_swept = dict(sources), False
            for mirror in self._mirrors.values():
                if mirror.node_rank not in self._sources:
                    mirror.table = {}

    # ------------------------------------------------------------ in the thread

    def outgoing(self, rank: int, version: int) -> Outgoing:
        """The mirror of this version, to be given back. Raises ArenaError: there is none."""
        with self._lock:
            place = self._mirrors[rank].table.get(version) if rank in self._mirrors else None
        if place is None:
            raise ArenaError(
                f"node {self._node_rank} keeps no snapshot of version {version} of rank {rank}"
            )
        return Outgoing(place.arena, version)

    def hear(self, peer: bytes, frame: Offer | Piece) -> Answer | None:
        """What to answer, if anything.

        Raises RemoteProtocolError: a stranger, or somebody who has lost the thread.
        """
        self._sweep()
        return (
            self._take_offer(peer, frame)
            if isinstance(frame, Offer)
            else self._take_piece(peer, frame)
        )

    def _sweep(self) -> None:
        """Let arenas follow what the agent's loop has decided."""
        with self._lock:
            if self._is_swept:
                return
            self._is_swept, permission = True, self._permission
            gone = {
                rank: mirror
                for rank, mirror in self._mirrors.items()
                if mirror.node_rank not in self._sources
            }
            for rank in gone:
                del self._mirrors[rank]
            self._transfers = {
                node_rank: known
                for node_rank, known in self._transfers.items()
                if node_rank in self._sources
            }
        for mirror in gone.values():
            _discard(mirror.arenas)
        for mirror in self._mirrors.values():
            mirror.arenas.forget_after(permission.version, permission.generation)

    def _take_offer(self, peer: bytes, offer: Offer) -> Answer:
        outline = Outline(*(getattr(offer, item.name) for item in fields(Outline)))
        with self._lock:
            is_known = self._sources.get(offer.node_rank) == offer.incarnation
            may_begin = self._permission.may_begin(offer.generation, offer.version)
        if (offer.job_id, offer.to, is_known) != (self._job_id, self._incarnation, True):
            raise RemoteProtocolError(
                "foreign",
                f"an offer of node {offer.node_rank} of job "
                f"{offer.job_id}, which is no source of this node",
            )
        if outline.true_seal() not in (None, offer.seal):
            raise RemoteProtocolError(
                "malformed", f"the offer of a snapshot of rank {offer.rank} was damaged on its way"
            )
        self._transfers.pop(offer.node_rank, None)
        if not may_begin:
            return Answer(offer.transfer, LATER)
        mirror = self._mirrors.get(offer.rank)
        if mirror is not None and mirror.node_rank != offer.node_rank:
            raise RemoteProtocolError(
                "foreign",
                f"node {offer.node_rank} spoke of rank {offer.rank} of node {mirror.node_rank}",
            )
        if self._keeps(mirror, offer):
            # The answer was lost. A second copy would take the room of the snapshot before it.
            return Answer(offer.transfer, KEPT, outline.size)
        try:
            if mirror is None:
                mirror = _Mirror(offer.node_rank, Arenas.create())
                with self._lock:
                    self._mirrors[offer.rank] = mirror
            # this may take seconds: never under the lock
            arena = mirror.arenas.fitting(outline.size)
            transfer = self._begin(offer, mirror, arena, outline)
        except (ArenaError, OSError) as error:
            if self._once.is_new(offer.rank, str(error)):
                log.warning(
                    "node %d takes no mirror of rank %d of node %d: %s",
                    self._node_rank,
                    offer.rank,
                    offer.node_rank,
                    error,
                )
            return Answer(offer.transfer, REFUSED, reason=str(error))
        if transfer is None:
            return Answer(offer.transfer, LATER)
        self._transfers[offer.node_rank] = peer, transfer
        return Answer(offer.transfer, GO)

    def _keeps(self, mirror: _Mirror | None, offer: Offer) -> bool:
        """Whether this snapshot is there, whole."""
        with self._lock:
            place = None if mirror is None else mirror.table.get(offer.version)
        return place is not None and place.seal == offer.seal

    def _begin(
        self, offer: Offer, mirror: _Mirror, arena: Arena, outline: Outline
    ) -> _Transfer | None:
        with self._lock:
            if not self._permission.may_begin(offer.generation, offer.version):
                return None
            incoming = Incoming(arena, outline)
            mirror.table = {
                version: place
                for version, place in mirror.table.items()
                if (place.arena, place.slot) != (arena, incoming.slot)
            }
        return _Transfer(offer.transfer, offer.rank, arena, incoming)

    def _take_piece(self, peer: bytes, piece: Piece) -> Answer:
        node_rank, transfer = next(
            (
                (node_rank, transfer)
                for node_rank, (sender, transfer) in self._transfers.items()
                if (sender, transfer.number) == (peer, piece.transfer)
            ),
            (None, None),
        )
        if node_rank is None or transfer is None:
            raise RemoteProtocolError("malformed", "a piece of a snapshot that is not expected")
        incoming = transfer.incoming
        if (
            piece.offset != incoming.arrived
            or incoming.arrived + len(piece.data) > incoming.outline.size
        ):
            del self._transfers[node_rank]
            raise RemoteProtocolError(
                "malformed",
                f"a piece at {piece.offset}, where one at "
                f"{incoming.arrived} was expected: the mirror "
                "is dropped",
            )
        incoming.put(piece.data)
        if incoming.arrived < incoming.outline.size:
            return Answer(piece.transfer, TAKEN, incoming.arrived)
        del self._transfers[node_rank]
        return self._complete(transfer)

    def _complete(self, transfer: _Transfer) -> Answer:
        outline = transfer.incoming.outline
        try:
            held = transfer.incoming.complete()
        except ArenaError as error:
            log.warning(
                "node %d: a mirror of version %d of rank %d was damaged on its way and is "
                "dropped: %s. The one before it stays",
                self._node_rank,
                outline.version,
                transfer.rank,
                error,
            )
            return Answer(transfer.number, DAMAGED, reason=str(error))
        mirror = self._mirrors[transfer.rank]
        outgrown: list[Arena] = []
        with self._lock:
            if mirror.node_rank in self._sources and not self._permission.is_void(
                outline.generation, outline.version
            ):
                mirror.table[outline.version] = _Place(
                    outline.generation, outline.seal, transfer.arena, held.slot
                )
            is_frozen = self._permission.is_frozen
            # the larger one holds two: see Snapshotter
            if sum(place.arena is transfer.arena for place in mirror.table.values()) > 1:
                outgrown = [arena for arena in mirror.arenas.all() if arena is not transfer.arena]
                mirror.table = {
                    version: place
                    for version, place in mirror.table.items()
                    if place.arena is transfer.arena
                }
        for arena in outgrown:
            mirror.arenas.discard(arena)
        if is_frozen:
            self._tell()
        return Answer(transfer.number, KEPT, outline.size)

    def close(self) -> None:
        """Give all memory back, as soon as nobody else reads it."""
        for mirror in self._mirrors.values():
            mirror.arenas.close()


def _discard(arenas: Arenas) -> None:
    for arena in arenas.all():
        arenas.discard(arena)
    arenas.close()
