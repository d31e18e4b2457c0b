"""Snapshots of one run of bytes, again and again: what does not change is encoded once.

For a writer that makes one after each training step, which has emptied the caches: then each call
of Python costs as much as the copy of a page.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from taskd.errors import ArenaError
from taskd.native import arena_index
from taskd.native.arena_index import Entry, aligned
from taskd.native.arena_memory import SLOTS, WRITING, Memory, SlotWords

if TYPE_CHECKING:
    from collections.abc import Callable

    from taskd.native.arena_memory import Held

_MARK = 0xFEDC_BA98_7654_3210  # stands for the checksum in the encoded index: nine bytes of msgpack
_MARK_BYTES = _MARK.to_bytes(8, "big")


class Repeated:
    """The only writer of its arena.

    `last`: the newest whole snapshot there; None: there is none. The one that is overwritten next
    is the other one.
    """

    def __init__(
        self, memory: Memory, name: str, length: int, rest: bytes, last: Held | None
    ) -> None:
        """Raises ArenaError: the bytes and what belongs to them do not fit."""
        entry = Entry(name, "uint8", (length,), 0, length, _MARK)
        index = arena_index.encode([entry], rest)
        self._index = bytearray(index)
        self._at = index.index(_MARK_BYTES)
        self._memory, self._length, self._data_bytes = memory, length, aligned(length)
        if self._data_bytes + len(index) > memory.capacity:
            raise ArenaError(
                f"a snapshot of {length} bytes, and {len(index)} of index, does not fit its arena: "
                f"a buffer has {memory.capacity}"
            )
        starts = [memory.buffer_start(slot) for slot in SLOTS]
        self._starts = starts
        self._rooms = [memory.room(start, length) for start in starts]
        self._slot = SLOTS[0] if last is None else next(one for one in SLOTS if one != last.slot)
        self._sequence = 0 if last is None else last.sequence

    def write(self, version: int, generation: int, fill: Callable[[memoryview], None]) -> None:
        """`fill` writes all bytes into the room that it is given. Whole when this returns."""
        memory, slot = self._memory, self._slot
        start = self._starts[slot]
        memory.invalidate(slot, WRITING)
        fill(self._rooms[slot])
        checksum = memory.sum_of(start, self._length)
        self._index[self._at : self._at + 8] = checksum.to_bytes(8, "big")
        index = bytes(self._index)
        index_sum = memory.write(start + self._data_bytes, index)
        words = SlotWords(
            self._sequence + 1, version, generation, self._data_bytes, len(index), index_sum
        )
        memory.publish(slot, words)
        self._sequence += 1
        self._slot = SLOTS[1 - SLOTS.index(slot)]
