"""Collective calls out of the black box's ring (struct taskd_call in csrc/include/taskd.h), each once as it begins and once as it ends.

Reads what other threads are writing, without locks: an entry counts only if its mark was the same before and after it was copied.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

from taskd.native import box_layout as layout

if TYPE_CHECKING:
    from taskd.native.black_box import BlackBox

_CALL = struct.Struct("=QQqqqqqq")
_NEXT = struct.Struct("=Q")
_RING_OFFSET = layout.COLLECTIVES_OFFSET + layout.CALLS_OFFSET
_RING_BYTES = layout.CALLS * layout.CALL_BYTES


@dataclass(frozen=True, slots=True)
class Call:
    """One collective. `leave_ns` 0: it has not come back yet. Times are monotonic."""

    index: int
    name: str
    communicator: int
    number: int
    size: int
    dtype: int
    enter_ns: int
    leave_ns: int
    peer: int


class CallReader:
    """New entries of one box's ring, from the time of its making on."""

    def __init__(self, box: BlackBox) -> None:
        self._box = box
        self._next = self._begun()
        self._open: dict[int, Call] = {}
        self._late: int | None = None        # an entry that was half written the last time, too
        self.lost = 0                        # overwritten before they were seen

    def read(self) -> tuple[list[Call], list[Call]]:
        """Calls that have begun since the last time, and calls that have ended. A quick one is in both."""
        end = self._begun()
        if end < self._next:                 # the box is damaged, or begun anew
            self._next, self._open = end, {}
        if end == self._next and not self._open:
            return [], []
        before = self._box.read(_RING_OFFSET, _RING_BYTES)
        after = self._box.read(_RING_OFFSET, _RING_BYTES)
        first = max(self._next, self._oldest())
        self.lost += first - self._next
        begun, ended = [], []
        index = first
        while index < end:
            call = _decode(before, after, index)
            if call is not None:
                begun.append(call)
                self._open[index] = call
            elif _mark(after, index) < 2 * index + 2 and self._late != index:
                self._late = index           # its thread is just writing it: once more
                break
            else:
                self.lost += 1
            index += 1
        self._next = index
        for place in list(self._open):
            call = _decode(before, after, place)
            if call is None:
                del self._open[place]        # overwritten: how it ended is not known
            elif call.leave_ns:
                del self._open[place]
                ended.append(call)
        return begun, ended

    def _begun(self) -> int:
        return int(_NEXT.unpack(self._box.read(layout.COLLECTIVES_OFFSET, _NEXT.size))[0])

    def _oldest(self) -> int:
        """Entries before this one may be overwritten by now."""
        return max(0, self._begun() - layout.CALLS)

    def communicators(self) -> dict[int, str]:
        """Names by id, as far as known."""
        area = self._box.read(layout.COLLECTIVES_OFFSET + layout.COMMUNICATORS_OFFSET,
                              layout.COMMUNICATORS * layout.COMMUNICATOR_BYTES)
        found = {}
        for place in range(0, len(area), layout.COMMUNICATOR_BYTES):
            (known,) = _NEXT.unpack_from(area, place)
            name = _text(area, place + layout.COMMUNICATOR_OFFSET_NAME)
            if known and name:
                found[known] = name
        return found


def _place(index: int) -> int:
    return index % layout.CALLS * layout.CALL_BYTES


def _mark(ring: bytes, index: int) -> int:
    return int(_NEXT.unpack_from(ring, _place(index))[0])


def _decode(before: bytes, after: bytes, index: int) -> Call | None:
    """The entry of this index; None: it is not complete, or another one by now."""
    place = _place(index)
    mark, communicator, number, size, dtype, enter_ns, leave_ns, peer = _CALL.unpack_from(before, place)
    if mark != 2 * index + 2 or _mark(after, index) != mark or enter_ns <= 0:
        return None
    name = _text(before, place + layout.CALL_OFFSET_NAME) or "?"
    return Call(index, name, communicator, number, size, dtype, enter_ns, max(leave_ns, enter_ns) if leave_ns else 0, peer)


def _text(area: bytes, offset: int) -> str:
    return area[offset : offset + layout.NAME_BYTES].split(b"\0", 1)[0].decode("utf-8", "replace")
