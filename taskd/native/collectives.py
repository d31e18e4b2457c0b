"""Collectives in the black box.

Which communicators a worker has, how far each has come, and its last calls.

The worker's side only arms libtaskd, which then records the calls of NCCL and HCCL by itself
(csrc/collectives/collectives.c), and passes on what the runtime sees of backends that have no C
functions to hook. Without libtaskd it does nothing.

The reader copies the area three times. An entry counts if its mark is the same and complete in the
first copy and in the last: then nobody has written to it while the one in between was made. What a
damaged box says is wrong, but reading it raises nothing.
"""

from __future__ import annotations

import logging
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

from taskd.errors import NativeLibraryError
from taskd.native import box_layout as layout
from taskd.native import library

if TYPE_CHECKING:
    from taskd.native.black_box import BlackBox

log = logging.getLogger(__name__)

_COMMUNICATOR = struct.Struct(f"=Qqqq{layout.NAME_BYTES}s")
_CALL = struct.Struct(f"=QQqqqqqq{layout.NAME_BYTES}s")
_WORD = struct.Struct("=Q")
_USED_BYTES = layout.CALLS_OFFSET + layout.CALLS * layout.CALL_BYTES

_NOT_COMPARABLE = 1 << 63


@dataclass(frozen=True, slots=True)
class Communicator:
    """One process group, as far as this worker has come in it."""

    id: int
    name: str
    entered: int  # collectives begun: the number of the last one
    left: int  # those that came back
    entered_at: float | None  # monotonic seconds of the last beginning

    @property
    def is_comparable(self) -> bool:
        """Whether the same id on another rank means the same communicator."""
        return not self.id & _NOT_COMPARABLE


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a communication library."""

    index: int  # in the sequence of all calls of the worker
    communicator: int  # its id; 0: of none
    # in its communicator; 0: not counted (point to point, groups, making and ending communicators)
    number: int
    bytes: int | None  # of the input
    dtype: int | None  # as the library numbers it
    peer: int | None  # the other rank, or the root
    enter_ns: int  # monotonic
    leave_ns: int  # 0: has not come back
    name: str


class Collectives:
    """Agent side: reads the record of one life from its box."""

    def __init__(self, box: BlackBox) -> None:
        self._box = box

    def communicators(self) -> list[Communicator]:
        """Those that exist, in no order that means anything."""
        copies = self._copies()
        found = []
        for place in range(layout.COMMUNICATORS):
            offset = layout.COMMUNICATORS_OFFSET + place * layout.COMMUNICATOR_BYTES
            if not _is_stable(copies, offset):
                continue
            identity, entered, left, entered_ns, name = _COMMUNICATOR.unpack_from(copies[1], offset)
            if identity:
                entered_at = entered_ns / 1e9 if entered_ns else None
                found.append(Communicator(identity, _text(name), entered, left, entered_at))
        return found

    def calls(self) -> list[Call]:
        """The last calls, oldest first; without those that are being written at this moment."""
        copies = self._copies()
        found = []
        for place in range(layout.CALLS):
            offset = layout.CALLS_OFFSET + place * layout.CALL_BYTES
            mark, communicator, number, size, dtype, enter_ns, leave_ns, peer, name = (
                _CALL.unpack_from(copies[1], offset)
            )
            index = mark // 2 - 1
            is_whole = mark and mark % 2 == 0 and _is_stable(copies, offset)
            if not is_whole or index % layout.CALLS != place:  # not the place of this number
                continue
            what = (_known(size), _known(dtype), _known(peer))
            call = Call(index, communicator, number, *what, enter_ns, leave_ns, _text(name))
            found.append(call)
        found.sort(key=lambda call: call.index)
        # A place that was left out when its turn came still holds the call of the turn before.
        return [call for call in found if call.index > found[-1].index - layout.CALLS]

    def _copies(self) -> tuple[bytes, bytes, bytes]:
        read, area = self._box.read, (layout.COLLECTIVES_OFFSET, _USED_BYTES)
        return read(*area), read(*area), read(*area)


def _is_stable(copies: tuple[bytes, bytes, bytes], offset: int) -> bool:
    first, middle, last = (_WORD.unpack_from(copy, offset)[0] for copy in copies)
    return bool(first == middle == last)


def _known(value: int) -> int | None:
    return None if value < 0 else value


def _text(name: bytes) -> str:
    """Up to the first zero; whatever cannot be printed becomes a question mark."""
    text = name.split(b"\0", 1)[0].decode("ascii", "replace")
    return "".join(
        character if character.isascii() and character.isprintable() else "?" for character in text
    )


# ------------------------------------------------------------ the worker's side


def start(box: BlackBox) -> bool:
    """Record the calls of this process in its box from now on.

    False: without libtaskd, or it refused (logged).
    """
    binding = library.load()
    if binding is None:
        return False
    try:
        binding.collectives_start(box.fd)
    except NativeLibraryError as error:
        log.info("collectives are not recorded: %s", error)
        return False
    return True


def is_preloaded() -> bool:
    """Whether libtaskd was preloaded: only then are calls of NCCL and HCCL seen."""
    binding = library.load()
    return binding is not None and binding.is_preloaded()


def reset() -> None:
    """Forget all communicators: those of an earlier generation never complete."""
    _record("collectives_reset")


def see(communicator: int, name: str, entered: int, left: int) -> None:
    """What the runtime saw of a communicator that libtaskd cannot see itself.

    `communicator`: an id that all its ranks have.
    """
    _record("collectives_see", communicator, name, entered, left)


def add(
    communicator: int, name: str, number: int, size: int | None, enter_ns: int, leave_ns: int
) -> None:
    """... and of one call. `leave_ns` 0: it has not come back."""
    size = -1 if size is None else size
    _record("collectives_add", communicator, name, number, size, enter_ns, leave_ns)


def forget(communicator: int) -> None:
    """One that the runtime saw is destroyed: its place in the record is free for another."""
    _record("collectives_forget", communicator)


def _record(what: str, *arguments: int | str) -> None:
    """Not started, or no room: the record is the poorer for it, the training is not."""
    binding = library.load()
    if binding is None:
        return
    try:
        getattr(binding, what)(*arguments)
    except NativeLibraryError as error:
        log.debug("not recorded: %s", error)
