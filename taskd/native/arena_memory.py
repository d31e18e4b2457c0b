"""The memory of an arena: its header, its two slots and buffers, and the checksums over them.

     0           header, one page: struct below; slot 0 at 512, slot 1 at 1024; the word of the
                 mirror at 2048 (arena_copy)
     4096        buffer 0, `capacity` bytes: tensors, each at a multiple of 64, and behind them the
                 index (arena_index)
     4096 + capacity
                 buffer 1

    header words   magic, layout version, capacity, kind of checksum (copying), checksum of those
    slot words     state (0 empty, 1 writing, 2 complete), sequence, version, generation, bytes used
                   by tensors, bytes of the index, checksum of the index, checksum of the six words
                   before it

Each word is 64 bits, native-endian, written at once. A snapshot is published by its state, last;
every copy has a barrier at its beginning and its end. The checksums hang together: that of the slot
covers that of the index, and the index those of the tensors. A tensor of more than `PIECE_BYTES`
has the checksum of its pieces' checksums.
"""

import ctypes
import mmap
import os
import stat
import struct
import sys
from contextlib import suppress
from dataclasses import dataclass

from taskd.errors import ArenaError
from taskd.native import arena_index, node_memory
from taskd.native.copying import Copier, copier_of_kind
from taskd.native.node_memory import PAGE_BYTES

MAGIC = 0x414E455241444B54  # "TKDARENA"
LAYOUT_VERSION = 1
PIECE_BYTES = 16 << 20  # a copy looks up between two of them: 2 ms
MAX_WORD = (1 << 63) - 1  # versions, generations and sequences beyond it are nonsense
EMPTY, WRITING, COMPLETE = range(3)  # states of a slot
SLOTS = (0, 1)

_HEADER = struct.Struct("=5Q")
_SLOT = struct.Struct("=7Q")  # behind the state; the first six are under the seventh
_SLOT_OFFSETS = (512, 1024)
_MIRROR_OFFSET = 2048
_WORD = 8


@dataclass(frozen=True, slots=True)
class Held:
    """A complete snapshot in an arena.

    `version` in number of committed steps, the `generation` in which it was made, its tensors'
    bytes.
    """

    version: int
    generation: int
    data_bytes: int
    sequence: int
    slot: int


@dataclass(frozen=True, slots=True)
class SlotWords:
    """What a slot says of its snapshot, but for state and seal."""

    sequence: int
    version: int
    generation: int
    data_bytes: int
    index_bytes: int
    index_sum: int

    def pack(self) -> bytes:
        """As in the slot."""
        words = (self.sequence, self.version, self.generation, self.data_bytes, self.index_bytes)
        return _SLOT.pack(*words, self.index_sum, 0)[:-_WORD]

    def held(self, slot: int) -> Held:
        """The snapshot, once it is in this slot."""
        return Held(self.version, self.generation, self.data_bytes, self.sequence, slot)


class Memory:
    """An arena, mapped; it lives as long as whoever reads or writes it.

    Owns its descriptor from `take` on.
    """

    fd = -1  # also of one whose constructor was interrupted

    def __init__(self, fd: int, capacity: int, copier: Copier) -> None:
        """`capacity`: bytes of one buffer. Raises OSError: it cannot be mapped."""
        self.capacity, self.copier = capacity, copier
        size = PAGE_BYTES + 2 * capacity
        self._map = mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        with suppress(OSError, AttributeError):
            # a core file of a crashed worker is large enough without it
            self._map.madvise(mmap.MADV_DONTDUMP)
        self._bytes = memoryview(self._map)
        self._words = self._bytes[:PAGE_BYTES].cast("Q")
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        # sequence of a snapshot whose tensors did not fit their checksums -> why
        self.damaged: dict[int, str] = {}

    def take(self, fd: int) -> None:
        """From now on its descriptor is closed with it."""
        self.fd = fd

    @classmethod
    def format(cls, fd: int, capacity: int, copier: Copier) -> "Memory":
        """A file of the right size, made an empty arena. Raises OSError: it cannot be mapped."""
        memory = cls(fd, capacity, copier)
        with suppress(OSError):
            # now: at its first snapshot, faults at each page would make it three times as long
            node_memory.populate(memory.address, len(memory._bytes))
        words = _HEADER.pack(MAGIC, LAYOUT_VERSION, capacity, copier.kind, 0)
        memory.write(0, words[:-_WORD])
        memory._words[4] = copier.checksum(memory.address, _HEADER.size - _WORD)
        return memory

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called, or it owns no descriptor yet."""
        return self.fd < 0

    def close(self, *, is_discarded: bool = False) -> None:
        """Give memory and descriptor back. Views that are still held keep the memory.

        `is_discarded`: the node gets the memory, whoever else holds it.
        """
        fd, self.fd = self.fd, -1  # first: other threads go on meanwhile
        try:
            if is_discarded:
                node_memory.clear(fd)
        finally:
            self._words.release()
            with suppress(BufferError):
                self._bytes.release()
                self._map.close()
            os.close(fd)

    def __del__(self) -> None:
        if not self.is_closed:
            self.close()

    # ------------------------------------------------------------ bytes

    def buffer_start(self, slot: int) -> int:
        """Where the buffer of a slot is."""
        return PAGE_BYTES + slot * self.capacity

    def view(self, offset: int, count: int) -> memoryview:
        """The bytes themselves, read-only."""
        return self._bytes[offset : offset + count].toreadonly()

    def room(self, offset: int, count: int) -> memoryview:
        """The bytes themselves, to be written."""
        return self._bytes[offset : offset + count]

    def write(self, offset: int, data: bytes) -> int:
        """Copy them there; returns their checksum."""
        return self.copier.copy(self.address + offset, _address_of(data), len(data))

    def copy_in(self, offset: int, address: int, count: int) -> list[int]:
        """Copy from an address, in pieces; returns the checksum of each."""
        target, copy = self.address + offset, self.copier.copy
        if count <= PIECE_BYTES:
            return [copy(target, address, count)]
        return [
            copy(target + at, address + at, min(PIECE_BYTES, count - at))
            for at in range(0, count, PIECE_BYTES)
        ]

    def sum_of(self, offset: int, count: int, target: int | None = None) -> int:
        """The checksum of an area, as a Writer makes it.

        `target`: it is copied to this address, and the checksum is of what arrives there.
        """
        if self.is_closed:
            raise ArenaError("the arena was closed: open a snapshot of another one")
        source, sums = self.address + offset, []
        for at in range(0, count, PIECE_BYTES):
            piece = min(PIECE_BYTES, count - at)
            sums.append(
                self.copier.checksum(source + at, piece)
                if target is None
                else self.copier.copy(target + at, source + at, piece)
            )
        return self.joined(sums)

    def joined(self, sums: list[int]) -> int:
        """The checksum of a tensor with these pieces."""
        if len(sums) == 1:
            return sums[0]
        return sum_of_bytes(self.copier, struct.pack(f"={len(sums)}Q", *sums))

    # ------------------------------------------------------------ slots

    def invalidate(self, slot: int, state: int) -> None:
        """From now on it holds nothing. `state`: EMPTY or WRITING."""
        word = _SLOT_OFFSETS[slot] // _WORD
        self._words[word] = state
        # its checksum, so that no wrong bit in the state can revive it
        self._words[word + _SLOT.size // _WORD] = 0

    def publish(self, slot: int, words: SlotWords) -> Held:
        """From now on it holds this snapshot, which is in its buffer."""
        seal = self.write(_SLOT_OFFSETS[slot] + _WORD, words.pack())
        self.write(_SLOT_OFFSETS[slot] + _SLOT.size, seal.to_bytes(_WORD, sys.byteorder))
        self._words[_SLOT_OFFSETS[slot] // _WORD] = COMPLETE
        return words.held(slot)

    def seal_of(self, slot: int) -> int:
        """The checksum of what a slot says."""
        return self._words[(_SLOT_OFFSETS[slot] + _SLOT.size) // _WORD]

    def words_of(self, slot: int) -> SlotWords:
        """What a slot says, true or not."""
        return SlotWords(*_SLOT.unpack_from(self._bytes, _SLOT_OFFSETS[slot] + _WORD)[:-1])

    def read_slot(self, slot: int) -> Held | str:
        """What is published there, or why it is nothing ("": it was never used)."""
        if self.is_closed:
            return "the arena was closed"
        state, is_sealed = self._words[_SLOT_OFFSETS[slot] // _WORD], self.seal_of(slot) != 0
        if state == EMPTY and not is_sealed:
            return ""
        if state == WRITING and not is_sealed:
            return "a snapshot was begun and never completed"
        offset = _SLOT_OFFSETS[slot] + _WORD
        packed = bytes(self._bytes[offset : offset + _SLOT.size])
        *fields, seal = _SLOT.unpack(packed)
        words = SlotWords(*fields)
        if state != COMPLETE or sum_of_bytes(self.copier, packed[:-_WORD]) != seal:
            return "its header is damaged"
        if (
            max(words.sequence, words.version, words.generation) > MAX_WORD
            or words.data_bytes + words.index_bytes > self.capacity
        ):
            return "its header makes no sense"
        return self.damaged.get(words.sequence) or words.held(slot)

    def read_index(self, held: Held) -> tuple[list[arena_index.Entry], bytes] | str:
        """Entries and rest of a snapshot, or why there are none."""
        words = self.words_of(held.slot)
        if held.data_bytes + words.index_bytes > self.capacity:
            return "its header has changed"
        start = self.buffer_start(held.slot) + held.data_bytes
        index = bytes(self._bytes[start : start + words.index_bytes])
        if sum_of_bytes(self.copier, index) != words.index_sum:
            return f"the index of version {held.version} is damaged"
        try:
            return arena_index.decode(index, held.data_bytes)
        except ValueError as error:
            return f"version {held.version}: {error}"

    def wrong_entries(self, entries: list[arena_index.Entry], start: int) -> list[str]:
        """Names of the tensors, in a buffer that begins at `start`, whose checksum does not fit."""
        return [
            entry.name
            for entry in entries
            if self.sum_of(start + entry.offset, entry.length) != entry.checksum
        ]

    @property
    def mirror_mark(self) -> int:
        """The word of the mirror."""
        return self._words[_MIRROR_OFFSET // _WORD]

    @mirror_mark.setter
    def mirror_mark(self, mark: int) -> None:
        self._words[_MIRROR_OFFSET // _WORD] = mark


def open_memory(fd: int) -> Memory:
    """The arena behind a descriptor.

    Raises:
        ArenaError: it is none; the text is nothing but the reason.
        OSError: what is wrong with the descriptor.
    """
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise ArenaError("it is not a file in memory")
    try:
        is_fixed = node_memory.is_fixed(fd)
    except OSError:
        is_fixed = False
    if not is_fixed:
        raise ArenaError("it could be cut while it is read (not sealed)")
    head = os.pread(fd, _HEADER.size, 0)
    if len(head) < _HEADER.size:
        raise ArenaError(f"it has {status.st_size} bytes, which is no header")
    magic, layout_version, capacity, kind, checksum = _HEADER.unpack(head)
    if magic != MAGIC:
        raise ArenaError("it does not begin like one")
    if layout_version != LAYOUT_VERSION:
        raise ArenaError(
            f"it has layout version {layout_version}, {LAYOUT_VERSION} is understood: "
            "another version of taskd wrote it"
        )
    copier = copier_of_kind(kind)
    if copier is None:
        raise ArenaError(
            f"its checksums are of kind {kind}, which this process cannot verify: is "
            "libtaskd switched off here (TASKD_NATIVE)?"
        )
    if sum_of_bytes(copier, head[:-_WORD]) != checksum:
        raise ArenaError("its header is damaged")
    if capacity % PAGE_BYTES or status.st_size != PAGE_BYTES + 2 * capacity:
        raise ArenaError(
            f"it has {status.st_size} bytes, two buffers of {capacity} bytes were "
            "expected: it was cut"
        )
    memory = Memory(fd, capacity, copier)
    memory.take(fd)
    return memory


def sum_of_bytes(copier: Copier, data: bytes) -> int:
    """The checksum of bytes that Python holds."""
    return copier.checksum(_address_of(data), len(data))


def _address_of(data: bytes) -> int:
    return ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value or 0
