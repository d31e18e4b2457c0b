"""A ring of collective calls in a black box, written as libtaskd writes it."""

from __future__ import annotations

import struct
import time
from typing import TYPE_CHECKING

from taskd.native import box_layout as layout

if TYPE_CHECKING:
    from taskd.native.black_box import BlackBox


class Ring:
    """Writes the ring as libtaskd does."""

    def __init__(self, box: BlackBox) -> None:
        self.bytes = box._bytes
        self.next = 0

    def call(
        self, name: bytes = b"ncclAllReduce", *, number: int = 1, enter: int = 0, leave: int = 0
    ) -> int:
        index, self.next = self.next, self.next + 1
        self.write(index, name, number, enter or time.monotonic_ns(), leave)
        struct.pack_into("=Q", self.bytes, layout.COLLECTIVES_OFFSET, self.next)
        return index

    def write(
        self,
        index: int,
        name: bytes,
        number: int,
        enter: int,
        leave: int,
        *,
        mark: int | None = None,
    ) -> None:
        place = (
            layout.COLLECTIVES_OFFSET
            + layout.CALLS_OFFSET
            + index % layout.CALLS * layout.CALL_BYTES
        )
        struct.pack_into(
            "=QQqqqqqq32s",
            self.bytes,
            place,
            2 * index + 2 if mark is None else mark,
            0xAB,
            number,
            4096,
            7,
            enter,
            leave,
            -1,
            name,
        )

    def leave(self, index: int, enter: int, leave: int) -> None:
        self.write(index, b"ncclAllReduce", 1, enter, leave)
