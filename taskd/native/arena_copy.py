"""A snapshot as plain bytes, out of one arena and into another.

For its mirror in the memory of another node.

    Outgoing(arena)   a snapshot in pieces: from the arena of the rank, or of its mirror
    Incoming(arena)   the same bytes into a buffer of an arena on another node

What comes in is believed when it is complete and every checksum fits, not before: until then the
mirror holds what it held, less the older of its two snapshots. The word of the mirror in the header
of a rank's arena is written by its agent and read by its worker:

    0        no mirror, or none at present: snapshots are made without regard to it
    1        there is to be one, and it has nothing yet
    other    the seal (`Arena.newest_seal`) of the newest snapshot of which the mirror is whole

Knows neither network nor nodes.
"""

from __future__ import annotations

from dataclasses import asdict, astuple, dataclass
from typing import TYPE_CHECKING

from taskd.errors import ArenaError
from taskd.native import arena_index
from taskd.native.arena_memory import MAX_WORD, SlotWords, sum_of_bytes
from taskd.native.copying import copier_of_kind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from taskd.native.arena import Arena
    from taskd.native.arena_memory import Held

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

    def words(self, sequence: int) -> SlotWords:
        """Those of a slot that holds the same snapshot, as the one of this sequence."""
        return SlotWords(
            sequence,
            self.version,
            self.generation,
            self.data_bytes,
            self.index_bytes,
            self.index_sum,
        )

    def true_seal(self) -> int | None:
        """What `seal` is to be.

        None: checksums of this kind cannot be verified here, or there can be no such numbers.
        """
        copier, words = copier_of_kind(self.kind), self.words(self.sequence)
        *numbers, index_sum = astuple(words)
        is_possible = all(0 <= number <= MAX_WORD for number in numbers)
        if copier is None or not is_possible or not 0 <= index_sum < 1 << 64:
            return None
        return sum_of_bytes(copier, words.pack())


class Outgoing:
    """A snapshot of an arena whose writer may be at work."""

    def __init__(self, arena: Arena, version: int | None = None) -> None:
        """The newest one, or the newest of this version. Raises ArenaError: there is none."""
        found = (held for held in arena.versions() if version in (None, held.version))
        held, memory = next(found, None), arena.memory
        if held is None or memory is None:
            raise ArenaError("there is no whole snapshot in this arena")
        words, seal = asdict(memory.words_of(held.slot)), memory.seal_of(held.slot)
        self.outline = Outline(kind=memory.copier.kind, seal=seal, **words)
        self._memory, self._held = memory, held
        self._start = memory.buffer_start(held.slot)

    def piece(self, offset: int, count: int) -> bytes:
        """Its bytes from `offset`. They are of this snapshot if `is_intact` says so afterwards."""
        count = min(count, self.outline.size - offset)
        return bytes(self._memory.view(self._start + offset, count))

    def is_intact(self) -> bool:
        """Whether the writer has not begun to overwrite it."""
        return self._memory.read_slot(self._held.slot) == self._held


class Incoming:
    """A snapshot on its way into an arena. Dropped without `complete`, it never was."""

    def __init__(self, arena: Arena, outline: Outline) -> None:
        """Raises ArenaError: it can have no place here."""
        if outline.size > arena.capacity:
            raise ArenaError(
                f"a snapshot of {outline.size} bytes does not fit, a buffer has {arena.capacity}"
            )
        memory = arena.memory
        if memory is None or outline.kind != memory.copier.kind:
            raise ArenaError(
                "its checksums are of another kind: libtaskd is missing, or switched "
                "off (TASKD_NATIVE), on one of the two nodes"
            )
        writer = arena.begin(outline.version, outline.generation)
        self.outline, self.arrived, self.slot = outline, 0, writer.slot
        self._memory, self._start, self._sequence = memory, writer.start, writer.sequence

    def put(self, data: bytes) -> None:
        """The next bytes. Raises ArenaError: they are too many."""
        if self.arrived + len(data) > self.outline.size:
            raise ArenaError(
                f"{self.arrived + len(data)} bytes have come of a snapshot of {self.outline.size}"
            )
        self._memory.write(self._start + self.arrived, data)
        self.arrived += len(data)

    def complete(self) -> Held:
        """Verify every byte, and publish. Raises ArenaError: something is missing or damaged."""
        outline, memory = self.outline, self._memory
        if self.arrived != outline.size:
            raise ArenaError(f"{self.arrived} of {outline.size} bytes have come")
        index = bytes(memory.view(self._start + outline.data_bytes, outline.index_bytes))
        if sum_of_bytes(memory.copier, index) != outline.index_sum:
            raise ArenaError("the checksum of its index does not fit")
        try:
            entries, _ = arena_index.decode(index, outline.data_bytes)
        except ValueError as error:
            raise ArenaError(str(error)) from error
        wrong = memory.wrong_entries(entries, self._start)
        if wrong:
            raise ArenaError(f"the checksum of {wrong[0]!r} does not fit")
        return memory.publish(self.slot, outline.words(self._sequence))


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
