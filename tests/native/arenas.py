"""What goes into an arena in tests. Imports next to nothing: a hundred processes start with it."""

from __future__ import annotations

import ctypes

SIZES = (4_000_000, 100, 300_000, 3_000_000)  # of tensors: the large ones take about a millisecond
SHARD_BYTES = sum(SIZES)


def patterned(version: int) -> dict[str, bytes]:
    """Every eight bytes tell version and tensor; quickly made."""
    return {
        f"tensor.{i}": (version * 1000 + i).to_bytes(8, "little") * (size // 8) + b"x" * (size % 8)
        for i, size in enumerate(SIZES)
    }


def put(writer, data: bytes) -> None:
    writer.put(ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value, len(data))
