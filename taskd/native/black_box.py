"""The black box of a worker: shared memory that outlives its process and tells how far it had come.

A box belongs to one incarnation of one rank. The agent creates it and hands the descriptor to the worker; the worker writes,
the agent and the worker's successor read. It is a memfd: nothing has a name, and it is gone with the last holder.

The byte layout is documented in csrc/include/taskd.h; the numbers below must be the same (a test compares them). This module
works without libtaskd, and knows nothing of what the payloads mean.

A process may die between any two instructions, so each value is one aligned word that is written at once, and each payload is
marked as incomplete while it is written. What the dead process had written is what the reader sees: the memory is the same.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import weakref
import zlib
from contextlib import suppress
from enum import IntEnum

from taskd.errors import NativeLibraryError

MAGIC = 0x584F42444B534154  # "TASKDBOX"
LAYOUT_VERSION = 1
BOX_BYTES = 16 * 1024 * 1024
LAYOUT_OFFSET = 4096
LAYOUT_BYTES = 64 * 1024
EXTRAS_OFFSET = LAYOUT_OFFSET + LAYOUT_BYTES
EXTRAS_BYTES = 5 * 1024 * 1024
EXTRAS_SLOTS = 3
COMMON_OFFSET = EXTRAS_OFFSET + EXTRAS_SLOTS * EXTRAS_BYTES
COMMON_BYTES = 64 * 1024
COMMON_SLOTS = EXTRAS_SLOTS + 1
SLOT_HEADER_BYTES = 64

OFFSET_MAGIC = 0
OFFSET_LAYOUT_VERSION = 8
OFFSET_GUARD_STATE = 12
OFFSET_ALIVE_NS = 16
OFFSET_PID = 128
OFFSET_INCARNATION = 136
OFFSET_PHASE = 144
OFFSET_VERSION = 152
OFFSET_COMMITTED = 160

SLOT_OFFSET_COMPLETE = 0
SLOT_OFFSET_VERSION = 8
SLOT_OFFSET_LENGTH = 16
SLOT_OFFSET_CHECKSUM = 24
SLOT_OFFSET_COMMON = 32
SLOT_OFFSET_COMMON_CHECKSUM = 40

MAX_LAYOUT_PAYLOAD_BYTES = LAYOUT_BYTES - SLOT_HEADER_BYTES
MAX_EXTRAS_PAYLOAD_BYTES = EXTRAS_BYTES - SLOT_HEADER_BYTES
MAX_COMMON_PAYLOAD_BYTES = COMMON_BYTES - SLOT_HEADER_BYTES

# The same as word indices: the box is written through a view of signed 64-bit words, one store each.
_WORD = 8
_ALIVE_NS = OFFSET_ALIVE_NS // _WORD
_PID = OFFSET_PID // _WORD
_INCARNATION = OFFSET_INCARNATION // _WORD
_PHASE = OFFSET_PHASE // _WORD
_VERSION = OFFSET_VERSION // _WORD
_COMMITTED = OFFSET_COMMITTED // _WORD
_COMPLETE, _SLOT_VERSION, _LENGTH, _CHECKSUM, _COMMON, _COMMON_CHECKSUM = range(6)

_SLOT_HEADER = struct.Struct("=5q")     # the words behind `complete`

_NONE = -1           # in the box only; Python sees None
_PENDING_SLOT = 2

# MFD_NOEXEC_SEAL: newer kernels may be set to refuse a memfd without it, older ones do not know it. Not in Python's os yet.
_NOEXEC_SEAL = 0x0008
_MEMFD_FLAGS = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING


class Phase(IntEnum):
    """Where in its life a worker is. The values are in the box, the lower-case names in messages."""

    BOOT = 0         # started, has not entered the recoverable function
    ENTERED = 1      # in the function, no step yet
    STEP = 2         # in a training step
    OPTIMIZER = 3    # between optimizer.step() and commit(): the state is torn
    RETURNED = 4     # the function returned, the others are waited for
    EXITING = 5      # on the way out: an end is expected
    PAUSED = 6       # left the function because of a fault, waits for the recovery


def _create_file() -> int:
    try:
        return os.memfd_create("taskd-black-box", _MEMFD_FLAGS | _NOEXEC_SEAL)
    except OSError:
        return os.memfd_create("taskd-black-box", _MEMFD_FLAGS)


def _slot_word(offset: int) -> int:
    return offset // _WORD


def _checksum(payload: bytes, version: int, common: int) -> int:
    """Adler-32, which needs no tables: those of CRC-32 cost more than the payload when a training step has emptied the caches."""
    return zlib.adler32(payload) ^ (version & 0xFFFFFFFF) ^ common


_LAYOUT_WORD = _slot_word(LAYOUT_OFFSET)
_EXTRAS_WORDS = tuple(_slot_word(EXTRAS_OFFSET + slot * EXTRAS_BYTES) for slot in range(EXTRAS_SLOTS))
_COMMON_WORDS = tuple(_slot_word(COMMON_OFFSET + slot * COMMON_BYTES) for slot in range(COMMON_SLOTS))

# Boxes that this process has open, for `_disarm_in_child` alone.
_open_boxes: weakref.WeakSet[BlackBox] = weakref.WeakSet()


class BlackBox:
    """One life's box. `create` and `attach` make one; it owns its descriptor. One writer at a time, no locks.

    After os.fork() the child's copy is private and empty: a process that is to write must attach after it was forked.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._map = mmap.mmap(fd, BOX_BYTES, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        self._bytes = memoryview(self._map)
        self._words = self._bytes.cast("q")
        self._common: tuple[bytes, int, int] = (b"", 0, 0)      # what was written last: itself, where, its checksum
        _open_boxes.add(self)

    @classmethod
    def create(cls) -> BlackBox:
        """A new, empty box: mode 0600, closed on exec, of fixed size (a shorter file would kill its readers by SIGBUS)."""
        fd = _create_file()
        os.fchmod(fd, 0o600)
        os.ftruncate(fd, BOX_BYTES)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        box = cls(fd)
        box._words[_VERSION] = _NONE
        box._words[_COMMITTED] = _NONE
        struct.pack_into("=I", box._map, OFFSET_LAYOUT_VERSION, LAYOUT_VERSION)
        struct.pack_into("=Q", box._map, OFFSET_MAGIC, MAGIC)
        return box

    @classmethod
    def attach(cls, fd: int) -> BlackBox:
        """The box behind an inherited descriptor, which from now on belongs to the result.

        Raises:
            NativeLibraryError: it is no black box, or one of another version of taskd. The descriptor stays the caller's.
        """
        try:
            size = os.fstat(fd).st_size
            head = os.pread(fd, 12, 0)
        except OSError as error:
            raise NativeLibraryError(f"descriptor {fd} is no black box: {error}") from error
        if size != BOX_BYTES or len(head) != 12 or struct.unpack("=QI", head) != (MAGIC, LAYOUT_VERSION):
            raise NativeLibraryError(
                f"descriptor {fd} is no black box of layout {LAYOUT_VERSION} ({size} bytes, starts with {head.hex()}): "
                "use one version of taskd on a node",
            )
        return cls(fd)

    # ------------------------------------------------------------ words

    @property
    def fd(self) -> int:
        """The descriptor, to be passed to the worker. -1 once closed, like that of a socket."""
        return self._fd

    @property
    def pid(self) -> int | None:
        """Process that has begun its life here, if any."""
        return self._words[_PID] or None

    @property
    def incarnation(self) -> int:
        """As told to `begin`."""
        return self._words[_INCARNATION]

    @property
    def phase(self) -> Phase:
        """The last phase that was marked."""
        return Phase(self._words[_PHASE])

    @property
    def version(self) -> int | None:
        """Number of committed steps, None while the worker holds no state."""
        version = self._words[_VERSION]
        return None if version == _NONE else version

    @property
    def alive_at(self) -> float | None:
        """Monotonic seconds at which libtaskd last saw the process run, to a tenth of a second; None: no guard."""
        alive_ns = self._words[_ALIVE_NS]
        return alive_ns / 1e9 if alive_ns else None

    def begin(self, pid: int, incarnation: int) -> None:
        """First thing in a worker's life."""
        words = self._words
        words[_INCARNATION] = incarnation
        words[_VERSION] = _NONE
        words[_PHASE] = Phase.BOOT
        words[_PID] = pid

    def mark_phase(self, phase: Phase) -> None:
        """One store; called several times per step."""
        self._words[_PHASE] = phase

    def mark_version(self, version: int) -> None:
        """One store; the moment at which a commit becomes true for everybody who reads the box."""
        self._words[_VERSION] = version

    # ------------------------------------------------------------ payloads

    def write_extras(self, version: int, payload: bytes, *, common: bytes = b"", pending: bool = False) -> bool:
        """Keep what the rank needs besides its state at `version`. False: it is too large, nothing changed.

        Committed payloads use two slots in turn, so that one is complete at any moment; a pending one (for a version that may
        or may not come about) has a slot of its own. `common` is read in front of the payload. It is written only when it is
        another object than the last time: keep what many versions share in it.
        """
        if len(common) > MAX_COMMON_PAYLOAD_BYTES:
            common, payload = b"", common + payload
        if len(payload) > MAX_EXTRAS_PAYLOAD_BYTES:
            return False
        if common is not self._common[0]:
            self._write_common(common)
        _, place, checksum = self._common
        if pending:
            self._write_slot(_EXTRAS_WORDS[_PENDING_SLOT], version, payload, place, checksum)
            return True
        slot = 1 if self._words[_COMMITTED] == 0 else 0
        self._write_slot(_EXTRAS_WORDS[slot], version, payload, place, checksum)
        self._words[_COMMITTED] = slot
        return True

    def _write_common(self, common: bytes) -> None:
        if not common:
            self._common = (common, 0, 0)
            return
        # One more place than there are extras: one is referred to by none of them.
        used = {self._words[word + _COMMON] for word in _EXTRAS_WORDS}
        place = next(place for place in range(1, COMMON_SLOTS + 1) if place not in used)
        word = _COMMON_WORDS[place - 1]
        self._write_slot(word, 0, common)
        self._common = (common, place, self._words[word + _CHECKSUM])

    def read_extras(self) -> dict[int, bytes]:
        """Complete payloads by version, each with its common part in front: the newest committed one, the one before it, a pending one if not superseded."""
        newest = self._words[_COMMITTED]
        found: dict[int, bytes] = {}
        for slot in (_PENDING_SLOT, 1 - newest, newest) if newest in {0, 1} else (_PENDING_SLOT, 0):
            content = self._read_slot(_EXTRAS_WORDS[slot], MAX_EXTRAS_PAYLOAD_BYTES)
            common = self._read_common(_EXTRAS_WORDS[slot])
            if content is not None and common is not None:
                version, payload = content
                found[version] = common + payload
        return found

    def write_layout(self, payload: bytes) -> bool:
        """Keep something small that rarely changes. False: too large, nothing changed."""
        if len(payload) > MAX_LAYOUT_PAYLOAD_BYTES:
            return False
        self._write_slot(_LAYOUT_WORD, 0, payload)
        return True

    def read_layout(self) -> bytes | None:
        """What `write_layout` kept; None if nothing, or if the process died while writing."""
        content = self._read_slot(_LAYOUT_WORD, MAX_LAYOUT_PAYLOAD_BYTES)
        return None if content is None else content[1]

    def _read_common(self, word: int) -> bytes | None:
        """What the slot at `word` refers to; None: it has been overwritten, or was never complete."""
        place, checksum = self._words[word + _COMMON], self._words[word + _COMMON_CHECKSUM]
        if place == 0:
            return b""
        if not 0 < place <= COMMON_SLOTS:
            return None
        content = self._read_slot(_COMMON_WORDS[place - 1], MAX_COMMON_PAYLOAD_BYTES)
        return content[1] if content is not None and self._words[_COMMON_WORDS[place - 1] + _CHECKSUM] == checksum else None

    def _write_slot(self, word: int, version: int, payload: bytes, common: int = 0, common_checksum: int = 0) -> None:
        self._words[word] = 0
        header = word * _WORD
        start = header + SLOT_HEADER_BYTES
        self._bytes[start : start + len(payload)] = payload
        checksum = _checksum(payload, version, common_checksum)
        _SLOT_HEADER.pack_into(self._bytes, header + SLOT_OFFSET_VERSION, version, len(payload), checksum, common, common_checksum)
        self._words[word] = 1

    def _read_slot(self, word: int, limit: int) -> tuple[int, bytes] | None:
        words = self._words
        version, length = words[word + _SLOT_VERSION], words[word + _LENGTH]
        if words[word + _COMPLETE] != 1 or not 0 <= length <= limit:
            return None
        start = word * _WORD + SLOT_HEADER_BYTES
        payload = bytes(self._bytes[start : start + length])
        # The writer may be alive and at it: then the parts do not fit together.
        checksum = _checksum(payload, version, words[word + _COMMON_CHECKSUM])
        return (version, payload) if checksum == words[word + _CHECKSUM] else None

    # ------------------------------------------------------------ end

    def close(self) -> None:
        """Give the memory and the descriptor back; twice is once. The other side keeps its own."""
        if self._fd < 0:
            return
        _open_boxes.discard(self)
        fd, self._fd = self._fd, -1
        self._words.release()
        self._bytes.release()
        self._map.close()
        os.close(fd)

    def __del__(self) -> None:
        with suppress(AttributeError):  # the constructor failed: the descriptor is still the caller's
            self.close()

    def _disarm(self) -> None:
        """Go on in private memory: what a forked child marks is not about the worker. The copy is not filled."""
        self._bytes = memoryview(mmap.mmap(-1, BOX_BYTES))
        self._words = self._bytes.cast("q")


def _disarm_in_child() -> None:
    for box in list(_open_boxes):
        box._disarm()  # noqa: SLF001 - the other half of this module


# Data loaders fork the worker and may run code that marks steps; so may any library's hook.
os.register_at_fork(after_in_child=_disarm_in_child)
