"""The arena of a rank: node memory that holds its newest two snapshots and outlives its process.

One file in memory, made by the worker, held by the agent as well, readable by whoever has the
descriptor, also after the writer's death, without a lock. Two buffers take turns, so that a death
in the middle of a copy costs the snapshot that was being made and not the one before it.

    arena_memory     what lies where in it; the checksums
    arena_index      the index of a snapshot
    arena_writer     a snapshot in the making
    arena_snapshot   a whole snapshot, for those who read it
    arena_copy       a snapshot on its way to another node

Nothing that is read is believed before its checksums fit, so any bytes may stand in an arena: what
does not fit does not exist, and `problems()` says why. Knows neither torch nor when a snapshot is
due.
"""

import errno
import os

from taskd.errors import ArenaError
from taskd.native import node_memory
from taskd.native.arena_memory import (
    EMPTY,
    MAX_WORD,
    PIECE_BYTES,
    SLOTS,
    WRITING,
    Held,
    Memory,
    open_memory,
)
from taskd.native.arena_snapshot import Snapshot
from taskd.native.arena_writer import Writer
from taskd.native.copying import copier
from taskd.native.node_memory import PAGE_BYTES

__all__ = ["PAGE_BYTES", "PIECE_BYTES", "Arena", "Held", "Snapshot", "Writer", "capacity_for"]

# For the padding between tensors and for the index of a small state; 1/128 leaves something of the
# promised 1 % for pages and header.
_SPARE_BYTES = 128 << 10
_SPARE_PART = 128


def capacity_for(shard_bytes: int) -> int:
    """Bytes of one buffer for a state of `shard_bytes`: not quite 1 % more, whole pages."""
    wanted = shard_bytes + max(shard_bytes // _SPARE_PART, _SPARE_BYTES)
    return -(-wanted // PAGE_BYTES) * PAGE_BYTES


class Arena:
    """Two buffers of node memory. `create` and `attach` make one; it owns its descriptor.

    One writer at a time, any number of readers.
    """

    # also of one whose constructor was interrupted
    _memory: Memory | None = None
    _fd = -1

    def __init__(self, memory: Memory | None, fd: int = -1, problem: str = "") -> None:
        """`memory`: None, if what is behind the descriptor is no arena; then there is a problem."""
        self._memory, self._fd, self._problem = memory, fd, problem
        self.capacity = memory.capacity if memory else 0  # bytes of one buffer; 0: it is no arena

    # ------------------------------------------------------------ making one

    @classmethod
    def create(cls, shard_bytes: int, file: int | None = None) -> "Arena":
        """A new, empty arena for a state of `shard_bytes`: twice that and 1 %, allocated at once.

        `file`: an empty one (`node_memory.empty_file`) to make it in. Default: a new one. Whoever
        is interrupted in here has it as it was, or without an arena; then it can be made empty.

        Raises:
            ArenaError: the node has not as much memory; the text says what limits it.
            OSError: no descriptor is left.
        """
        capacity = capacity_for(shard_bytes)
        size = PAGE_BYTES + 2 * capacity
        fd = node_memory.empty_file("taskd-arena") if file is None else os.dup(file)
        try:
            node_memory.fill(fd, size)
            memory = Memory.format(fd, capacity, copier())
            arena = cls(memory)
            # Last: what is sealed cannot be made empty again, and so has to be an arena.
            node_memory.fix(fd)
        except BaseException as error:
            os.close(fd)
            if isinstance(error, OSError):
                raise ArenaError(
                    f"no node memory for snapshots: {node_memory.human(size)} could not "
                    f"be mapped: {error.strerror}; raise ulimit -v"
                ) from error
            raise
        memory.take(fd)
        return arena

    @classmethod
    def attach(cls, fd: int) -> "Arena":
        """The arena behind a descriptor, which from now on belongs to the result.

        Never fails: one that is no arena holds no snapshots, and `problems()` says what it is.
        """
        try:
            return cls(open_memory(fd))
        except ArenaError as error:
            return cls(None, fd, f"descriptor {fd} is no arena: {error}")
        except OSError as error:
            is_open = error.errno != errno.EBADF  # else its number is somebody else's soon
            problem = f"descriptor {fd} is no arena that can be used: {error.strerror}"
            return cls(None, fd if is_open else -1, problem)

    @property
    def fd(self) -> int:
        """For handing it to another process. -1 after close()."""
        return self._memory.fd if self._memory else self._fd

    @property
    def memory(self) -> Memory | None:
        """For this folder; None: it is no arena, or was closed."""
        return None if self._memory is None or self._memory.is_closed else self._memory

    def discard(self) -> None:
        """Close it and give its memory back to the node, whoever else holds it.

        Nothing is left in it.
        """
        self.close(is_discarded=True)

    def close(self, *, is_discarded: bool = False) -> None:
        """Give memory and descriptor back; twice is once.

        Views that are still held keep the memory, other processes keep theirs.
        """
        if self._memory is not None:
            if not self._memory.is_closed:
                self._memory.close(is_discarded=is_discarded)
        elif self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)

    def __del__(self) -> None:
        if self._memory is None:  # else it lives as long as its snapshots do
            self.close()

    # ------------------------------------------------------------ writing

    def begin(self, version: int, generation: int) -> Writer:
        """A new snapshot in place of the older one, or of one that is not whole.

        Raises:
            ArenaError: this is no arena, or it was closed.
        """
        memory = self.memory
        if memory is None:
            raise ArenaError(
                f"no snapshot of version {version} can be written: "
                f"{self._problem or 'the arena was closed'}"
            )
        if not (0 <= version <= MAX_WORD and 0 <= generation <= MAX_WORD):
            raise ArenaError(
                f"version {version} and generation {generation} cannot be those of a snapshot"
            )
        found = {held.slot: held.sequence for held in self.versions()}
        slot = min(SLOTS, key=lambda slot: found.get(slot, -1))
        memory.invalidate(slot, WRITING)
        newest = max((*found.values(), *memory.damaged), default=0)
        return Writer(memory, slot, version, generation, newest + 1)

    def forget_after(self, version: int, generation: int | None = None) -> None:
        """Drop the snapshots beyond `version`.

        The job has rolled back, and what comes now is not what they were. `generation`: older ones
        only.

        Else the next snapshot would overwrite the older one, which everybody has rolled back to.
        """
        for held in self.versions():
            is_older = generation is None or held.generation < generation
            if self._memory and held.version > version and is_older:
                self._memory.invalidate(held.slot, EMPTY)

    def drop(self, held: Held) -> None:
        """Nobody is to believe this snapshot."""
        if self._memory is not None:
            self._memory.invalidate(held.slot, EMPTY)

    # ------------------------------------------------------------ reading

    def versions(self) -> list[Held]:
        """Complete snapshots, the newest first.

        Their index has been verified, their tensors have not: `open` does that.
        """
        memory = self.memory
        if memory is None:
            return []
        found = [held for held in self._held() if isinstance(memory.read_index(held), tuple)]
        return sorted(found, key=lambda held: held.sequence, reverse=True)

    def _held(self) -> list[Held]:
        """What the slots say."""
        memory = self.memory
        read = map(memory.read_slot, SLOTS) if memory else ()
        return [held for held in read if isinstance(held, Held)]

    def open(self, version: int) -> Snapshot:
        """The newest snapshot of this version, every tensor verified: about 0.1 s per GB.

        Raises:
            ArenaError: there is none, or it is damaged; from then on it does not exist for this
                reader.
        """
        memory, reasons = self.memory, []
        for held in self.versions():
            if memory is None or held.version != version:
                continue
            index = memory.read_index(held)
            if not isinstance(index, tuple):
                continue
            snapshot = Snapshot(memory, held, *index)
            wrong = memory.wrong_entries(index[0], memory.buffer_start(held.slot))
            if not wrong:
                return snapshot
            others = f" and {len(wrong) - 1} others" if len(wrong) > 1 else ""
            reason = (
                f"the checksum of {wrong[0]!r}{others} does not fit: its memory was overwritten"
            )
            if snapshot.is_intact():  # else a living writer is at it
                memory.damaged[held.sequence] = reason
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
        newest = max(self._held(), key=lambda held: held.sequence, default=None)
        return 0 if newest is None or not self._memory else self._memory.seal_of(newest.slot)

    @property
    def mirror_mark(self) -> int:
        """What the agent has written about the mirror of this arena.

        See `taskd.native.arena_copy`.
        """
        return self.memory.mirror_mark if self.memory else 0

    @mirror_mark.setter
    def mirror_mark(self, mark: int) -> None:
        if self.memory is None:
            raise ArenaError(f"no mirror can be marked: {self._problem or 'the arena was closed'}")
        self.memory.mirror_mark = mark

    def problems(self) -> list[str]:
        """What is in the arena and cannot be used, one line each: for the log."""
        if self._memory is None:
            return [self._problem]
        found = []
        for slot in SLOTS:
            held = self._memory.read_slot(slot)
            reason = held if isinstance(held, str) else self._memory.read_index(held)
            if isinstance(reason, str) and reason:
                found.append(f"buffer {slot}: {reason}")
        return found
