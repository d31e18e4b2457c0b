"""A snapshot in the making, in one of the two buffers of an arena."""

from dataclasses import replace

from taskd.errors import ArenaError
from taskd.native import arena_index
from taskd.native.arena_index import Entry, aligned
from taskd.native.arena_memory import PIECE_BYTES, Held, Memory, SlotWords


class Writer:
    """A snapshot in the making: `add` a tensor, `put` its bytes, and so on, then `complete`.

    Dropped without it, the snapshot never was.
    """

    def __init__(
        self, memory: Memory, slot: int, version: int, generation: int, sequence: int
    ) -> None:
        self.slot, self.sequence = slot, sequence
        self.start = memory.buffer_start(slot)
        self._memory, self._version, self._generation = memory, version, generation
        self._end = 0  # of what has been put, from the start of the buffer
        self._entries: list[Entry] = []
        self._tensor: Entry | None = None  # the one that is being put
        self._sums: list[int] = []

    def add(self, name: str, dtype: str, shape: tuple[int, ...], length: int) -> None:
        """Begin the next tensor, of `length` bytes.

        Raises:
            ArenaError: it does not fit into the buffer.
        """
        self._finish_tensor()
        self._end = aligned(self._end)
        if self._end + length > self._memory.capacity:
            raise self._too_large(f"tensor {name!r} ends at {self._end + length} bytes")
        self._tensor, self._sums = Entry(name, dtype, shape, self._end, length, checksum=0), []

    def put(self, address: int, count: int) -> None:
        """Copy the next `count` bytes of the tensor from an address.

        All that is left of it, or a multiple of `PIECE_BYTES`.
        """
        tensor = self._tensor
        assert tensor is not None
        done = self._end - tensor.offset
        if done + count > tensor.length or (done % PIECE_BYTES and count):
            raise ArenaError(
                f"tensor {tensor.name!r} of {tensor.length} bytes was given {count} "
                f"bytes behind {done}"
            )
        self._sums += self._memory.copy_in(self.start + self._end, address, count)
        self._end += count

    def complete(self, rest: bytes = b"") -> Held:
        """Write the index, with whatever else belongs to the snapshot, and publish.

        Raises:
            ArenaError: the index does not fit behind the tensors, or the last tensor is not
                complete. Nothing is published.
        """
        self._finish_tensor()
        index, data_bytes = arena_index.encode(self._entries, rest), aligned(self._end)
        if data_bytes + len(index) > self._memory.capacity:
            raise self._too_large(f"{data_bytes} bytes of tensors and {len(index)} of index")
        return self._memory.publish(
            self.slot,
            SlotWords(
                sequence=self.sequence,
                version=self._version,
                generation=self._generation,
                data_bytes=data_bytes,
                index_bytes=len(index),
                index_sum=self._memory.write(self.start + data_bytes, index),
            ),
        )

    def _too_large(self, what: str) -> ArenaError:
        return ArenaError(
            f"the snapshot of version {self._version} does not fit its arena: {what}, a buffer has "
            f"{self._memory.capacity}; make a larger arena"
        )

    def _finish_tensor(self) -> None:
        tensor, self._tensor = self._tensor, None
        if tensor is None:
            return
        done = self._end - tensor.offset
        if done != tensor.length:
            raise ArenaError(
                f"tensor {tensor.name!r} is not complete: {done} of {tensor.length} bytes"
            )
        self._entries.append(replace(tensor, checksum=self._memory.joined(self._sums)))
