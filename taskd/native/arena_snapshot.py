"""A whole snapshot in an arena, verified, for those who read it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from taskd.errors import ArenaError

if TYPE_CHECKING:
    from taskd.native.arena_index import Entry
    from taskd.native.arena_memory import Held, Memory


class Snapshot:
    """One snapshot, verified when it was opened.

    Its views are of the arena's own memory: nothing is copied. The writer, if it lives, may
    overwrite it: who has copied out of the views asks `is_intact()` afterwards.
    """

    def __init__(self, memory: Memory, held: Held, entries: list[Entry], rest: bytes) -> None:
        self.held = held
        self.entries = {entry.name: entry for entry in entries}
        self.rest = rest
        self._memory = memory
        self._start = memory.buffer_start(held.slot)

    def view(self, name: str) -> memoryview:
        """The bytes of a tensor, read-only. KeyError: there is none of this name."""
        entry = self.entries[name]
        return self._memory.view(self._start + entry.offset, entry.length)

    def address(self, name: str) -> int:
        """Where a tensor's bytes are. KeyError: there is none of this name."""
        return self._memory.address + self._start + self.entries[name].offset

    def copy_out(self, name: str, address: int) -> None:
        """Copy a tensor's bytes to an address, which has room for its length.

        Raises:
            ArenaError: what was copied has not the checksum any more: it was overwritten. The text
                names the tensor.
        """
        entry = self.entries[name]
        copied = self._memory.sum_of(self._start + entry.offset, entry.length, address)
        if copied != entry.checksum:
            raise ArenaError(
                f"snapshot of version {self.held.version}: tensor {name!r} was "
                "overwritten while it was copied; open it again"
            )

    def is_intact(self) -> bool:
        """Whether the writer has not begun to overwrite it."""
        return self._memory.read_slot(self.held.slot) == self.held
