"""The arenas of one rank, across its lives.

Files without a byte that the agent makes and hands to every life of the rank. They have no name, or
are in a folder that outlives the agent, too (`taskd.agent.workers.memory_folder`).

    agent                             worker
      Arenas.create()                   Arenas(descriptors)
        | descriptors, at its start ----> | make(shard_bytes): an arena in the first empty file
        | versions() when it is dead      | find(version), versions()

A file takes no memory until a worker makes an arena in it, so a job without snapshots pays a few
descriptors. An arena cannot grow: for a state that has, the next file is taken, and the memory of
the one before is given back when the new one holds two snapshots.
"""

import contextlib
import os
from collections.abc import Sequence

from taskd.errors import ArenaError
from taskd.native import node_memory
from taskd.native.arena import PAGE_BYTES, Arena
from taskd.native.arena_memory import open_memory

FILES = 3  # optimizer memory that is made in the first step, and one more change of the model


class Arenas:
    """Owns the descriptors that it is given."""

    def __init__(self, descriptors: Sequence[int]) -> None:
        self.descriptors = tuple(descriptors)
        self._open: dict[int, Arena] = {}  # by descriptor

    @classmethod
    def create(cls) -> "Arenas":
        """Empty files for a rank. Raises OSError: no descriptor is left."""
        found: list[int] = []
        try:
            for _ in range(FILES):
                found.append(node_memory.empty_file("taskd-arena"))  # noqa: PERF401
        except OSError:
            for descriptor in found:
                os.close(descriptor)
            raise
        return cls(found)

    def make(self, shard_bytes: int) -> Arena:
        """An arena in the next empty file.

        Raises:
            ArenaError: the node has not as much memory, or the state has grown too often.
        """
        self.all()
        for descriptor in self.descriptors:
            # a life ended while it was making it
            if os.fstat(descriptor).st_size and descriptor not in self._open:
                node_memory.empty(descriptor)
            if os.fstat(descriptor).st_size == 0:
                try:
                    self._open[descriptor] = Arena.create(shard_bytes, descriptor)
                except BaseException:  # interrupted, too
                    self._withdraw(descriptor)
                    raise
                return self._open[descriptor]
        raise ArenaError(
            "the state has outgrown its memory for snapshots "
            f"{len(self.descriptors) - 1} times, and there is no further one: "
            "build all parameter groups before the first snapshot, or start the job "
            "again"
        )

    def _withdraw(self, descriptor: int) -> None:
        """Whoever made an arena there did not come to the end: the file is empty again.

        Nobody has mapped it, unless the arena is whole: then it stays, and is used.
        """
        if not os.fstat(descriptor).st_size:
            return
        fd = os.dup(descriptor)
        try:
            open_memory(fd).close()
        except ArenaError:
            os.close(fd)
            os.ftruncate(descriptor, 0)
        except OSError:
            os.close(fd)  # nobody can tell now

    def require(self, wanted: int) -> None:
        """Raises ArenaError: there is not as much memory for an arena."""
        node_memory.require(wanted, fd=next(iter(self.descriptors), -1))

    def verify(self) -> list[str]:
        """Read every byte, and drop each snapshot that is damaged: why, one line each."""
        found = []
        known = self.all()
        for descriptor in self.descriptors:
            if descriptor not in self._open and any(os.pread(descriptor, PAGE_BYTES, 0)):
                with contextlib.closing(Arena.attach(os.dup(descriptor))) as arena:
                    found += arena.problems()
        for arena in known:
            found += arena.problems()
            for held in arena.versions():
                try:
                    arena.open(held.version)
                except ArenaError as error:
                    found.append(str(error))
                    arena.drop(held)
        return found

    def fitting(self, shard_bytes: int) -> Arena:
        """The newest arena if a snapshot of that size fits, else a new one. Raises ArenaError."""
        known = self.all()
        return known[-1] if known and known[-1].capacity >= shard_bytes else self.make(shard_bytes)

    def versions(self) -> tuple[int, ...]:
        """Those of all complete snapshots, ascending."""
        return tuple(sorted({held.version for arena in self.all() for held in arena.versions()}))

    def find(self, version: int) -> Arena | None:
        """The arena with the newest snapshot of that version."""
        found = [
            (held.sequence, number, arena)
            for number, arena in enumerate(self.all())
            for held in arena.versions()
            if held.version == version
        ]
        return max(found, key=lambda item: item[1::-1])[2] if found else None

    def all(self) -> list[Arena]:
        """Those that have been made, the newest last."""
        for descriptor in self.descriptors:
            if descriptor not in self._open and os.fstat(descriptor).st_size:
                arena = Arena.attach(os.dup(descriptor))
                if arena.capacity:
                    self._open[descriptor] = arena
                else:  # it is being made just now, or never was complete
                    arena.close()
        return [
            self._open[descriptor] for descriptor in self.descriptors if descriptor in self._open
        ]

    def discard(self, arena: Arena) -> None:
        """Nobody needs it any more: its memory goes back to the node."""
        (descriptor,) = (descriptor for descriptor, other in self._open.items() if other is arena)
        del self._open[descriptor]
        self.descriptors = tuple(other for other in self.descriptors if other != descriptor)
        arena.discard()
        os.close(descriptor)

    def forget_after(self, version: int, generation: int | None = None) -> None:
        """Drop the snapshots beyond `version`; -1: all of them. `generation`: older ones only."""
        for arena in self.all():
            arena.forget_after(version, generation)

    def close(self) -> None:
        """Give everything back; twice is once."""
        for arena in self._open.values():
            arena.close()
        for descriptor in self.descriptors:
            os.close(descriptor)
        self._open, self.descriptors = {}, ()
