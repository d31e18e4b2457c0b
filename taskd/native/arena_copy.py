"""A snapshot as plain bytes, out of one arena and into another.

For its mirror in the memory of another node.

    Outgoing(arena)   the newest snapshot in pieces                     arena of the rank, on its node
    Incoming(arena)   the same bytes into the buffer of another arena   arena of the mirror, on the buddy

What comes in is believed when it is complete and every checksum fits, not before: until then the
mirror holds what it held, less the older of its two snapshots. The word of the mirror in the header
of a rank's arena is written by its agent and read by its worker:

    0        no mirror, or none at present: snapshots are made without regard to it
    1        there is to be one, and it has nothing yet
    other    the seal (`Arena.newest_seal`) of the newest snapshot of which the mirror is whole

Knows neither network nor nodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from taskd.errors import ArenaError
from taskd.native import arena_index
from taskd.native.arena import _MAX_WORD, _SLOT, _SLOT_OFFSETS, _WORD, Arena, Held, _sum_of_bytes
from taskd.native.copying import copier_of_kind

if TYPE_CHECKING:
    from collections.abc import Sequence

UNMIRRORED = 0
AWAITED = 1


@dataclass(frozen=True, slots=True)
class Outline:
    """What is to be known of a snapshot before its bytes.

    The words of its slot, `seal` the last of them, and the `kind` of its checksums.

    First come `data_bytes` of tensors, then the index.
    """

    kind: int
    sequence: int
    version: int
    generation: int
    data_bytes: int
    index_bytes: int
    index_sum: int
    seal: int

    @property
    def size(self) -> int:
        """All of its bytes."""
        return self.data_bytes + self.index_bytes

    def true_seal(self) -> int | None:
        """What `seal` is to be.

        None: checksums of this kind cannot be verified here, or there can be no such numbers.
        """
        copier = copier_of_kind(self.kind)
        words = (self.sequence, self.version, self.generation, self.data_bytes, self.index_bytes)
        if (
            copier is None
            or not all(0 <= word <= _MAX_WORD for word in words)
            or not 0 <= self.index_sum < 1 << 64
        ):
            return None
        return _sum_of_bytes(copier, _SLOT.pack(*words, self.index_sum, 0)[:-_WORD])


class Outgoing:
    """The newest snapshot of an arena whose writer may be at work."""

    def __init__(self, arena: Arena) -> None:
        """Raises ArenaError: there is none."""
        newest = next(iter(arena.versions()), None)
        if newest is None or arena._copier is None:  # noqa: SLF001
            raise ArenaError("there is no whole snapshot in this arena")
        words = _SLOT.unpack_from(arena._bytes, _SLOT_OFFSETS[newest.slot] + _WORD)  # noqa: SLF001
        self.outline = Outline(arena._copier.kind, *words)  # noqa: SLF001
        self._arena, self._held = arena, newest
        self._start = arena._buffer_start(newest.slot)  # noqa: SLF001

    def piece(self, offset: int, count: int) -> bytes:
        """Its bytes from `offset`. They are of this snapshot if `is_intact` says so afterwards."""
        start = self._start + offset
        return bytes(self._arena._bytes[start : start + min(count, self.outline.size - offset)])  # noqa: SLF001

    def is_intact(self) -> bool:
        """Whether the writer has not begun to overwrite it."""
        return self._arena._read_slot(self._held.slot) == self._held  # noqa: SLF001


class Incoming:
    """A snapshot on its way into an arena. Dropped without `complete`, it never was."""

    def __init__(self, arena: Arena, outline: Outline) -> None:
        """Raises ArenaError: it can have no place here."""
        if outline.size > arena.capacity:
            raise ArenaError(
                f"a snapshot of {outline.size} bytes does not fit, a buffer has {arena.capacity}"
            )
        if arena._copier is None or outline.kind != arena._copier.kind:  # noqa: SLF001
            raise ArenaError(
                "its checksums are of another kind: libtaskd is missing, or switched "
                "off (TASKD_NATIVE), on one of the two nodes"
            )
        self.outline, self.arrived = outline, 0
        self._writer = arena.begin(outline.version, outline.generation)
        self._arena, self._copier, self.slot = arena, arena._copier, self._writer._slot  # noqa: SLF001

    def put(self, data: bytes) -> None:
        """The next bytes. Raises ArenaError: they are too many."""
        if self.arrived + len(data) > self.outline.size:
            raise ArenaError(
                f"{self.arrived + len(data)} bytes have come of a snapshot of {self.outline.size}"
            )
        self._arena._write(self._writer._start + self.arrived, data)  # noqa: SLF001
        self.arrived += len(data)

    def complete(self) -> Held:
        """Verify every byte, and publish. Raises ArenaError: something is missing or damaged."""
        outline, start = self.outline, self._writer._start  # noqa: SLF001
        if self.arrived != outline.size:
            raise ArenaError(f"{self.arrived} of {outline.size} bytes have come")
        index = bytes(self._arena._bytes[start + outline.data_bytes : start + outline.size])  # noqa: SLF001
        if _sum_of_bytes(self._copier, index) != outline.index_sum:
            raise ArenaError("the checksum of its index does not fit")
        try:
            entries, _ = arena_index.decode(index, outline.data_bytes)
        except ValueError as error:
            raise ArenaError(str(error)) from error
        wrong = [
            entry.name
            for entry in entries
            if self._arena._sum_of(start + entry.offset, entry.length) != entry.checksum  # noqa: SLF001
        ]
        if wrong:
            raise ArenaError(f"the checksum of {wrong[0]!r} does not fit")
        writer = self._writer
        words = (
            writer._sequence,  # noqa: SLF001
            outline.version,
            outline.generation,
            outline.data_bytes,
            outline.index_bytes,
            outline.index_sum,
        )
        self._arena._publish(writer._slot, words)  # noqa: SLF001
        return Held(
            outline.version,
            outline.generation,
            outline.data_bytes,
            writer._sequence,  # noqa: SLF001
            writer._slot,  # noqa: SLF001
        )


def is_mirrored(arenas: Sequence[Arena]) -> bool:
    """Whether a mirror is to be waited for."""
    return any(arena.mirror_mark for arena in arenas)


def may_go_on(arenas: Sequence[Arena]) -> bool:
    """Whether the newest snapshot of a rank has its mirror, or is to have none.

    The one before it is not needed any more.

    `arenas`: of the rank, the newest last.
    """
    marks = {arena.mirror_mark for arena in arenas} - {UNMIRRORED}
    seal = next((seal for arena in reversed(arenas) if (seal := arena.newest_seal())), None)
    return not marks or seal is None or seal in marks
