"""Snapshots of this rank: its newest two steps, in memory that outlives the process.

That memory is the agent's; without one it is this process's own. Owns the lock that keeps a
snapshot from being overwritten while it is written to the disk.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from taskd.checkpoint import flat_memory
from taskd.checkpoint.flat import Flat
from taskd.errors import ArenaError
from taskd.native.arena_repeated import Repeated

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from taskd.checkpoint.flat_memory import Origin
    from taskd.mindspore.content import Content
    from taskd.native.arenas import Arenas

log = logging.getLogger(__name__)

_SPARE_BYTES = 64 << 10  # for what the arena adds, and longer notes


class Memory:
    """See the module."""

    def __init__(self, arenas: Arenas, content: Content) -> None:
        self.arenas = arenas
        self.lock = threading.Lock()  # held while a snapshot is made, or read
        self._content = content
        self._layout = flat_memory.encode_layout(content.layout)
        self._is_off = False
        self._writer: Repeated | None = None
        self._said: tuple[Origin | None, Mapping[str, str] | None] = (None, None)  # with it

    def take(self, step: int, origin: Origin, notes: Mapping[str, str]) -> bool:
        """Keep what is in the parameters now as the state after this step.

        `notes`: the same object while they say the same.

        False: there is no memory for it, now and later. It is said once, and training goes on.
        """
        if self._is_off:
            return False
        try:
            with self.lock:
                self._take(step, origin, notes)
        except ArenaError as error:
            self._is_off = True
            log.warning(
                "no snapshots from step %d on: the job can only go on from checkpoints that it "
                "writes while it trains (checkpoint_every), and nothing is saved when it ends: %s",
                step,
                error,
            )
            return False
        return True

    def flat(self, notes: Mapping[str, str]) -> tuple[Flat, Iterator[memoryview]]:
        """What is in the parameters now, without a copy: piece by piece, until the next step."""
        content = self._content
        return Flat(content.layout, dict(notes), memoryview(b"")), content.pieces()

    def _take(self, step: int, origin: Origin, notes: Mapping[str, str]) -> None:
        if self._writer is None or self._said[0] is not origin or self._said[1] is not notes:
            rest = flat_memory.describe(origin, notes, self._layout)
            self._said, self._writer = (origin, notes), self._made(rest)
        self._writer.write(step, origin.generation, self._content.copy_into)

    def _made(self, rest: bytes) -> Repeated:
        size, known = self._content.size_bytes, self.arenas.all()
        needed = size + len(rest) + _SPARE_BYTES
        fits = bool(known) and known[-1].capacity >= needed
        arena = known[-1] if fits else self.arenas.make(needed)
        assert arena.memory is not None
        last = next(iter(arena.versions()), None)
        return Repeated(arena.memory, flat_memory.STATE, size, rest, last)
