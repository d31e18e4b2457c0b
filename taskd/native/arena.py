"""The arena of a rank: node memory that holds its newest two snapshots and outlives its process.

One memfd, made by the worker, held by the agent as well, readable by whoever has the descriptor,
also after the writer's death, without a lock. Two buffers take turns, so that a death in the middle
of a copy costs the snapshot that was being made and not the one before it.

        0  header, one page: struct below; slot 0 at 512, slot 1 at 1024; the word of the mirror at 2048 (arena_copy)
     4096  buffer 0, `capacity` bytes: tensors, each at a multiple of 64, and behind them the index (arena_index)
     4096 + capacity  buffer 1

    header words   magic, layout version, capacity, kind of checksum (copying), checksum of those four
    slot words     state (0 empty, 1 writing, 2 complete), sequence, version, generation, bytes used by tensors, bytes of the index,
                   checksum of the index, checksum of the six words before it

Each word is 64 bits, native-endian, written at once. A snapshot is published by its state, last;
every copy has a barrier at its beginning and its end. The checksums hang together: that of the slot
covers that of the index, and the index those of the tensors. Nothing that is read is believed
before they fit, so any bytes may stand in an arena: what does not fit does not exist, and
`problems()` says why.

A tensor of more than `PIECE_BYTES` has the checksum of its pieces' checksums. This module knows
neither torch nor when a snapshot is due.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import stat
import struct
import sys
from contextlib import suppress
from dataclasses import dataclass

from taskd.errors import ArenaError
from taskd.native import arena_index, node_memory
from taskd.native.arena_index import Entry, aligned
from taskd.native.copying import Copier, copier, copier_of_kind
from taskd.native.node_memory import PAGE_BYTES

MAGIC = 0x414E455241444B54  # "TKDARENA"
LAYOUT_VERSION = 1
PIECE_BYTES = 16 << 20  # a copy looks up between two of them: 2 ms

_HEADER = struct.Struct("=5Q")
_SLOT = struct.Struct("=7Q")  # behind the state; the first six are under the seventh
_SLOT_OFFSETS = (512, 1024)
_MIRROR_OFFSET = 2048
_WORD = 8
_EMPTY, _WRITING, _COMPLETE = range(3)
_MAX_WORD = (1 << 63) - 1  # versions, generations and sequences beyond it are nonsense
_MADV_POPULATE_WRITE = 23  # Linux 5.14; not in Python's mmap yet

# For the padding between tensors and for the index of a small state; 1/128 leaves something of the
# promised 1 % for pages and header.
_SPARE_BYTES = 128 << 10
_SPARE_PART = 128


def capacity_for(shard_bytes: int) -> int:
    """Bytes of one buffer for a state of `shard_bytes`: not quite 1 % more, whole pages."""
    wanted = shard_bytes + max(shard_bytes // _SPARE_PART, _SPARE_BYTES)
    return -(-wanted // PAGE_BYTES) * PAGE_BYTES


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


class Snapshot:
    """One snapshot, verified when it was opened.

    Its views are of the arena's own memory: nothing is copied.

    The writer, if it lives, may overwrite it: who has copied out of the views asks `is_intact()`
    afterwards.
    """

    def __init__(
        self, arena: Arena, held: Held, entries: list[Entry], rest: bytes, start: int
    ) -> None:
        self.held = held
        self.entries = {entry.name: entry for entry in entries}
        self.rest = rest
        self._arena = arena
        self._start = start

    def view(self, name: str) -> memoryview:
        """The bytes of a tensor, read-only. KeyError: there is none of this name."""
        entry = self.entries[name]
        start = self._start + entry.offset
        return self._arena._bytes[start : start + entry.length].toreadonly()  # noqa: SLF001

    def address(self, name: str) -> int:
        """Where a tensor's bytes are. KeyError: there is none of this name."""
        return self._arena._address + self._start + self.entries[name].offset  # noqa: SLF001

    def copy_out(self, name: str, address: int) -> None:
        """Copy a tensor's bytes to an address, which has room for its length.

        Raises:
            ArenaError: what was copied has not the checksum any more: it was overwritten. The text
                names the tensor.
        """
        entry = self.entries[name]
        if self._arena._sum_of(self._start + entry.offset, entry.length, address) != entry.checksum:  # noqa: SLF001
            raise ArenaError(
                f"snapshot of version {self.held.version}: tensor {name!r} was "
                "overwritten while it was copied; open it again"
            )

    def is_intact(self) -> bool:
        """Whether the writer has not begun to overwrite it."""
        return self._arena._read_slot(self.held.slot) == self.held  # noqa: SLF001


class Writer:
    """A snapshot in the making: `add` a tensor, `put` its bytes, and so on, then `complete`.

    Dropped without it, the snapshot never was.
    """

    def __init__(
        self, arena: Arena, slot: int, version: int, generation: int, sequence: int
    ) -> None:
        self._arena, self._slot, self._version, self._generation, self._sequence = (
            arena,
            slot,
            version,
            generation,
            sequence,
        )
        self._start = arena._buffer_start(slot)  # noqa: SLF001
        self._end = 0  # of what has been put, from the start of the buffer
        self._entries: list[Entry] = []
        self._name: str | None = None  # of the tensor that is being put
        self._dtype, self._length = "", 0
        self._shape: tuple[int, ...] = ()
        self._sums: list[int] = []
        self._put_bytes = 0

    def add(self, name: str, dtype: str, shape: tuple[int, ...], length: int) -> None:
        """Begin the next tensor, of `length` bytes.

        Raises:
            ArenaError: it does not fit into the buffer.
        """
        self._finish_entry()
        self._end = aligned(self._end)
        if self._end + length > self._arena.capacity:
            raise ArenaError(
                f"the snapshot of version {self._version} does not fit its arena: "
                f"tensor {name!r} ends at {self._end + length} bytes, "
                f"a buffer has {self._arena.capacity}; make a larger arena"
            )
        self._name, self._dtype, self._shape, self._length = name, dtype, shape, length
        self._sums, self._put_bytes = [], 0

    def put(self, address: int, count: int) -> None:
        """Copy the next `count` bytes of the tensor from an address.

        All that is left of it, or a multiple of `PIECE_BYTES`.
        """
        if self._put_bytes + count > self._length or (self._put_bytes % PIECE_BYTES and count):
            raise ArenaError(
                f"tensor {self._name!r} of {self._length} bytes was given {count} "
                f"bytes behind {self._put_bytes}"
            )
        target = self._start + self._end
        self._sums += self._arena._copy_in(target, address, count)  # noqa: SLF001
        self._put_bytes += count
        self._end += count

    def complete(self, rest: bytes = b"") -> Held:
        """Write the index, with whatever else belongs to the snapshot, and publish.

        Raises:
            ArenaError: the index does not fit behind the tensors, or the last tensor is not
                complete. Nothing is published.
        """
        self._finish_entry()
        index = arena_index.encode(self._entries, rest)
        data_bytes = aligned(self._end)
        arena = self._arena
        if data_bytes + len(index) > arena.capacity:
            raise ArenaError(
                f"the snapshot of version {self._version} does not fit its arena: "
                f"{data_bytes} bytes of tensors and {len(index)} of index, "
                f"a buffer has {arena.capacity}; make a larger arena"
            )
        index_sum = arena._write(self._start + data_bytes, index)  # noqa: SLF001
        words = (self._sequence, self._version, self._generation, data_bytes, len(index), index_sum)
        arena._publish(self._slot, words)  # noqa: SLF001
        return Held(self._version, self._generation, data_bytes, self._sequence, self._slot)

    def _finish_entry(self) -> None:
        if self._name is None:
            return
        if self._put_bytes != self._length:
            raise ArenaError(
                f"tensor {self._name!r} is not complete: {self._put_bytes} of {self._length} bytes"
            )
        checksum = self._arena._joined(self._sums)  # noqa: SLF001
        self._entries.append(
            Entry(
                self._name,
                self._dtype,
                self._shape,
                self._end - self._length,
                self._length,
                checksum,
            )
        )
        self._name = None


class Arena:
    """Two buffers of node memory. `create` and `attach` make one; it owns its descriptor.

    One writer at a time, any number of readers.
    """

    def __init__(self, fd: int, capacity: int, kind: Copier | None, problem: str = "") -> None:
        self.capacity = capacity  # bytes of one buffer; 0: this is no arena
        self._fd = fd
        self._copier = kind
        self._problem = problem
        # sequence of a snapshot whose tensors did not fit their checksums -> why
        self._damaged: dict[int, str] = {}
        self._bytes = memoryview(b"")
        self._map: mmap.mmap | None = None
        self._address = 0
        if problem:
            return
        self._map = mmap.mmap(
            fd, PAGE_BYTES + 2 * capacity, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE
        )
        with suppress(OSError, AttributeError):
            # a core file of a crashed worker is large enough without it
            self._map.madvise(mmap.MADV_DONTDUMP)
        self._bytes = memoryview(self._map)
        self._words = self._bytes[:PAGE_BYTES].cast("Q")
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    # ------------------------------------------------------------ making one

    @classmethod
    def create(cls, shard_bytes: int, file: int | None = None) -> Arena:
        """A new, empty arena for a state of `shard_bytes`: twice that and 1 %, allocated at once.

        `file`: an empty memfd (`node_memory.empty_file`) to make it in; its descriptor then belongs
        to the result. Default: a new one.

        Raises:
            ArenaError: the node has not as much memory; the text says what limits it.
            OSError: no descriptor is left.
        """
        capacity = capacity_for(shard_bytes)
        size = PAGE_BYTES + 2 * capacity
        fd = node_memory.empty_file("taskd-arena") if file is None else file
        try:
            node_memory.fill(fd, size)
        except ArenaError:
            os.close(fd)
            raise
        kind = copier()
        try:
            arena = cls(fd, capacity, kind)
        except OSError as error:
            os.close(fd)
            raise ArenaError(
                f"no node memory for snapshots: {node_memory.human(size)} could not "
                f"be mapped: {error.strerror}; raise ulimit -v"
            ) from error
        arena._populate()
        words = _HEADER.pack(MAGIC, LAYOUT_VERSION, capacity, kind.kind, 0)
        arena._write(0, words[:-_WORD])
        arena._words[4] = kind.checksum(arena._address, _HEADER.size - _WORD)
        return arena

    @classmethod
    def attach(cls, fd: int) -> Arena:
        """The arena behind a descriptor, which from now on belongs to the result.

        Never fails: one that is no arena holds no snapshots, and `problems()` says what it is.
        """
        try:
            capacity, kind = _examine(fd)
            return cls(fd, capacity, kind)
        except ArenaError as error:
            return cls(fd, 0, None, f"descriptor {fd} is no arena: {error}")
        except OSError as error:
            is_open = error.errno != errno.EBADF  # else its number is somebody else's soon
            return cls(
                fd if is_open else -1,
                0,
                None,
                f"descriptor {fd} is no arena that can be used: {error.strerror}",
            )

    @property
    def fd(self) -> int:
        """For handing it to another process. -1 after close()."""
        return self._fd

    def discard(self) -> None:
        """Close it and give its memory back to the node, whoever else holds it.

        Nothing is left in it.
        """
        if self._map is not None:
            self._map.madvise(mmap.MADV_REMOVE)
        self.close()

    # ------------------------------------------------------------ writing

    def begin(self, version: int, generation: int) -> Writer:
        """A new snapshot in place of the older one, or of one that is not whole.

        Raises:
            ArenaError: this is no arena, or it was closed.
        """
        if self._copier is None or self._fd < 0:
            raise ArenaError(
                f"no snapshot of version {version} can be written: "
                f"{self._problem or 'the arena was closed'}"
            )
        if not (0 <= version <= _MAX_WORD and 0 <= generation <= _MAX_WORD):
            raise ArenaError(
                f"version {version} and generation {generation} cannot be those of a snapshot"
            )
        found = {held.slot: held.sequence for held in self.versions()}
        slot = min((0, 1), key=lambda slot: found.get(slot, -1))
        self._invalidate(slot, _WRITING)
        return Writer(
            self, slot, version, generation, max((*found.values(), *self._damaged), default=0) + 1
        )

    def forget_after(self, version: int, generation: int | None = None) -> None:
        """Drop the snapshots beyond `version`.

        The job has rolled back, and what comes now is not what they were. `generation`: older ones
        only.

        Else the next snapshot would overwrite the older one, which everybody has rolled back to.
        """
        for held in self.versions():
            if held.version > version and (generation is None or held.generation < generation):
                self._invalidate(held.slot, _EMPTY)

    def _invalidate(self, slot: int, state: int) -> None:
        word = _SLOT_OFFSETS[slot] // _WORD
        self._words[word] = state
        # its checksum, so that no wrong bit in the state can revive it
        self._words[word + _SLOT.size // _WORD] = 0

    def _publish(self, slot: int, words: tuple[int, ...]) -> None:
        packed = _SLOT.pack(*words, 0)[:-_WORD]
        checksum = self._write(_SLOT_OFFSETS[slot] + _WORD, packed)
        self._write(_SLOT_OFFSETS[slot] + _SLOT.size, checksum.to_bytes(_WORD, sys.byteorder))
        self._words[_SLOT_OFFSETS[slot] // _WORD] = _COMPLETE

    def _buffer_start(self, slot: int) -> int:
        return PAGE_BYTES + slot * self.capacity

    def _write(self, offset: int, data: bytes) -> int:
        assert self._copier is not None
        source = ctypes.c_char_p(data)
        return self._copier.copy(
            self._address + offset, ctypes.cast(source, ctypes.c_void_p).value or 0, len(data)
        )

    def _copy_in(self, offset: int, address: int, count: int) -> list[int]:
        assert self._copier is not None
        target, copy = self._address + offset, self._copier.copy
        if count <= PIECE_BYTES:
            return [copy(target, address, count)]
        return [
            copy(target + at, address + at, min(PIECE_BYTES, count - at))
            for at in range(0, count, PIECE_BYTES)
        ]

    def _populate(self) -> None:
        """Map the pages now.

        Else the first snapshot meets a fault at each of them, which makes it three times as long.
        """
        assert self._map is not None
        with suppress(OSError, ValueError):
            self._map.madvise(_MADV_POPULATE_WRITE)

    # ------------------------------------------------------------ reading

    def versions(self) -> list[Held]:
        """Complete snapshots, the newest first.

        Their index has been verified, their tensors have not: `open` does that.
        """
        found = [
            held
            for slot in (0, 1)
            if isinstance(held := self._read_slot(slot), Held)
            and isinstance(self._read_index(held), tuple)
        ]
        return sorted(found, key=lambda held: held.sequence, reverse=True)

    def open(self, version: int) -> Snapshot:
        """The newest snapshot of this version, every tensor verified: about 0.1 s per GB.

        Raises:
            ArenaError: there is none, or it is damaged; from then on it does not exist for this
                reader.
        """
        reasons = []
        for held in self.versions():
            if held.version != version:
                continue
            index = self._read_index(held)
            if not isinstance(index, tuple):
                continue
            snapshot = Snapshot(self, held, *index, start=self._buffer_start(held.slot))
            wrong = [
                entry.name
                for entry in index[0]
                if self._sum_of(snapshot._start + entry.offset, entry.length) != entry.checksum  # noqa: SLF001
            ]
            if not wrong:
                return snapshot
            reason = (
                f"the checksum of {wrong[0]!r}{_others(len(wrong) - 1)} does not fit: its "
                "memory was overwritten"
            )
            if snapshot.is_intact():  # else a living writer is at it
                self._damaged[held.sequence] = reason
            reasons.append(reason)
        why = (
            "; ".join(reasons or self.problems())
            or f"it holds {[held.version for held in self.versions()]}"
        )
        raise ArenaError(f"there is no snapshot of version {version} in this arena: {why}")

    def newest_seal(self) -> int:
        """The checksum of the newest snapshot's slot, which is that of no other snapshot.

        0: there is none. Reads two slots and no more.
        """
        found = [held for slot in (0, 1) if isinstance(held := self._read_slot(slot), Held)]
        newest = max(found, key=lambda held: held.sequence, default=None)
        return (
            0 if newest is None else self._words[(_SLOT_OFFSETS[newest.slot] + _SLOT.size) // _WORD]
        )

    @property
    def mirror_mark(self) -> int:
        """What the agent has written about the mirror of this arena.

        See `taskd.native.arena_copy`.
        """
        return self._words[_MIRROR_OFFSET // _WORD] if self.capacity and self._fd >= 0 else 0

    @mirror_mark.setter
    def mirror_mark(self, mark: int) -> None:
        self._words[_MIRROR_OFFSET // _WORD] = mark

    def problems(self) -> list[str]:
        """What is in the arena and cannot be used, one line each: for the log."""
        if self._problem:
            return [self._problem]
        found = []
        for slot in (0, 1):
            held = self._read_slot(slot)
            reason = held if isinstance(held, str) else self._read_index(held)
            if isinstance(reason, str) and reason:
                found.append(f"buffer {slot}: {reason}")
        return found

    def _read_slot(self, slot: int) -> Held | str:
        """What is published there, or why it is nothing ("": it was never used)."""
        if self._problem or self._fd < 0:
            return self._problem or "the arena was closed"
        assert self._copier is not None
        offset = _SLOT_OFFSETS[slot]
        state, is_sealed = (
            self._words[offset // _WORD],
            self._words[(offset + _SLOT.size) // _WORD] != 0,
        )
        if state == _EMPTY and not is_sealed:
            return ""
        if state == _WRITING and not is_sealed:
            return "a snapshot was begun and never completed"
        words = bytes(self._bytes[offset + _WORD : offset + _WORD + _SLOT.size])
        sequence, version, generation, data_bytes, index_bytes, _, checksum = _SLOT.unpack(words)
        if state != _COMPLETE or _sum_of_bytes(self._copier, words[:-_WORD]) != checksum:
            return "its header is damaged"
        if (
            max(sequence, version, generation) > _MAX_WORD
            or data_bytes + index_bytes > self.capacity
        ):
            return "its header makes no sense"
        return self._damaged.get(sequence) or Held(version, generation, data_bytes, sequence, slot)

    def _read_index(self, held: Held) -> tuple[list[Entry], bytes] | str:
        assert self._copier is not None
        words = _SLOT.unpack_from(self._bytes, _SLOT_OFFSETS[held.slot] + _WORD)
        index_bytes, index_sum = words[4:6]
        if held.data_bytes + index_bytes > self.capacity:
            return "its header has changed"
        start = self._buffer_start(held.slot) + held.data_bytes
        index = bytes(self._bytes[start : start + index_bytes])
        if _sum_of_bytes(self._copier, index) != index_sum:
            return f"the index of version {held.version} is damaged"
        try:
            return arena_index.decode(index, held.data_bytes)
        except ValueError as error:
            return f"version {held.version}: {error}"

    def _sum_of(self, offset: int, count: int, target: int | None = None) -> int:
        """Checksum of an area as a Writer makes it, of what arrives at `target` if it is copied there."""
        if self._copier is None or self._fd < 0:
            raise ArenaError("the arena was closed: open a snapshot of another one")
        source = self._address + offset
        sums = []
        for at in range(0, count, PIECE_BYTES):
            piece = min(PIECE_BYTES, count - at)
            sums.append(
                self._copier.checksum(source + at, piece)
                if target is None
                else self._copier.copy(target + at, source + at, piece)
            )
        return self._joined(sums)

    def _joined(self, sums: list[int]) -> int:
        assert self._copier is not None
        if len(sums) == 1:
            return sums[0]
        return _sum_of_bytes(self._copier, struct.pack(f"={len(sums)}Q", *sums))

    # ------------------------------------------------------------ end

    def close(self) -> None:
        """Give memory and descriptor back; twice is once.

        Views that are still held keep the memory, other processes keep theirs.
        """
        if self._fd < 0:
            return
        fd, self._fd = self._fd, -1
        if self._map is not None:
            self._words.release()
            with suppress(BufferError):
                self._bytes.release()
                self._map.close()
            self._map = None
        os.close(fd)

    def __del__(self) -> None:
        # the constructor failed: the descriptor is still the caller's
        with suppress(AttributeError):
            self.close()


def _examine(fd: int) -> tuple[int, Copier]:
    """Capacity and checksums of the arena behind a descriptor.

    ArenaError, with nothing but the reason: it is none. OSError: the descriptor.
    """
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise ArenaError("it is not a file in memory")
    try:
        is_sealed = node_memory.is_sealed(fd)
    except OSError:
        is_sealed = False
    if not is_sealed:
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
    copies = copier_of_kind(kind)
    if copies is None:
        raise ArenaError(
            f"its checksums are of kind {kind}, which this process cannot verify: is "
            "libtaskd switched off here (TASKD_NATIVE)?"
        )
    if _sum_of_bytes(copies, head[:-_WORD]) != checksum:
        raise ArenaError("its header is damaged")
    if capacity % PAGE_BYTES or status.st_size != PAGE_BYTES + 2 * capacity:
        raise ArenaError(
            f"it has {status.st_size} bytes, two buffers of {capacity} bytes were "
            "expected: it was cut"
        )
    return capacity, copies


def _sum_of_bytes(copies: Copier, data: bytes) -> int:
    return copies.checksum(
        ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value or 0, len(data)
    )


def _others(count: int) -> str:
    return f" and {count} others" if count else ""
