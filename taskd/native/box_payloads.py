"""The payloads of a black box: what a rank needs besides its state, and a small layout.

Knows nothing of what they mean. Each is marked as incomplete while it is written, and has a
checksum: what is damaged, or was being written when the process died, does not exist.
"""

import struct
import zlib

from taskd.native import box_layout as layout

MAX_LAYOUT_PAYLOAD_BYTES = layout.LAYOUT_BYTES - layout.SLOT_HEADER_BYTES
MAX_EXTRAS_PAYLOAD_BYTES = layout.EXTRAS_BYTES - layout.SLOT_HEADER_BYTES
MAX_COMMON_PAYLOAD_BYTES = layout.COMMON_BYTES - layout.SLOT_HEADER_BYTES
# of versions, generations, incarnations: what others believe (`taskd.wire.schema.MAX_CLAIM`; a test
# compares)
MAX_COUNT = (1 << 53) - 1
TAKEN_OVER = 2  # versions that a life takes over from the one before it, the newest

# Places as indices of the box's words: slots are written through a view of signed 64-bit words.
_WORD = 8
COMMITTED = layout.OFFSET_COMMITTED // _WORD
_COMPLETE, _SLOT_VERSION, _LENGTH, _CHECKSUM, _COMMON, _COMMON_CHECKSUM = range(6)

_SLOT_HEADER = struct.Struct("=5q")  # the words behind `complete`

_PENDING_SLOT = 2


def _slot_word(offset: int) -> int:
    return offset // _WORD


def _checksum(payload: bytes, version: int, common: int) -> int:
    """Adler-32, which needs no tables.

    Those of CRC-32 cost more than the payload when a training step has emptied the caches.
    """
    return zlib.adler32(payload) ^ (version & 0xFFFFFFFF) ^ common


_LAYOUT_WORD = _slot_word(layout.LAYOUT_OFFSET)
_EXTRAS_WORDS = tuple(
    _slot_word(layout.EXTRAS_OFFSET + slot * layout.EXTRAS_BYTES)
    for slot in range(layout.EXTRAS_SLOTS)
)
_COMMON_WORDS = tuple(
    _slot_word(layout.COMMON_OFFSET + slot * layout.COMMON_BYTES)
    for slot in range(layout.COMMON_SLOTS)
)


class Payloads:
    """The part of a black box that keeps them."""

    _words: memoryview
    _bytes: memoryview
    # what was written last: itself, where, its checksum
    _common: tuple[bytes, int, int] = (b"", 0, 0)

    def write_extras(
        self, version: int, payload: bytes, *, common: bytes = b"", pending: bool = False
    ) -> bool:
        """Keep what the rank needs besides its state at `version`.

        False: it is too large, nothing changed.

        Committed payloads use two slots in turn, so that one is complete at any moment; a pending
        one (for a version that may or may not come about) has a slot of its own. `common` is read
        in front of the payload. It is written only when it is another object than the last time:
        keep what many versions share in it.
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
        slot = 1 if self._words[COMMITTED] == 0 else 0
        self._write_slot(_EXTRAS_WORDS[slot], version, payload, place, checksum)
        self._words[COMMITTED] = slot
        return True

    def _write_common(self, common: bytes) -> None:
        if not common:
            self._common = (common, 0, 0)
            return
        # One more place than there are extras: one is referred to by none of them.
        used = {self._words[word + _COMMON] for word in _EXTRAS_WORDS}
        place = next(place for place in range(1, layout.COMMON_SLOTS + 1) if place not in used)
        word = _COMMON_WORDS[place - 1]
        self._write_slot(word, 0, common)
        self._common = (common, place, self._words[word + _CHECKSUM])

    def read_extras(self) -> dict[int, bytes]:
        """Complete payloads by version, each with its common part in front.

        The newest committed one, the one before it, a pending one if not superseded.
        """
        return self.read_pending() | self.read_committed()

    def read_committed(self) -> dict[int, bytes]:
        """Of these the newest committed one, and the one before it.

        What was committed before the job went back to an older version is none of them.
        """
        newest = self._words[COMMITTED]
        found = self._read_all((1 - newest, newest) if newest in {0, 1} else (0,))
        last = next(reversed(found), MAX_COUNT)
        return {version: payload for version, payload in found.items() if version <= last}

    def read_pending(self) -> dict[int, bytes]:
        """Of these the pending one, also if it is superseded."""
        return self._read_all((_PENDING_SLOT,))

    def _read_all(self, slots: tuple[int, ...]) -> dict[int, bytes]:
        found: dict[int, bytes] = {}
        for slot in slots:
            content = self._read_slot(_EXTRAS_WORDS[slot], MAX_EXTRAS_PAYLOAD_BYTES)
            common = self._read_common(_EXTRAS_WORDS[slot])
            if content is not None and common is not None:
                version, payload = content
                if 0 <= version <= MAX_COUNT:
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
        """What the slot at `word` refers to.

        None: it has been overwritten, or was never complete.
        """
        place, checksum = self._words[word + _COMMON], self._words[word + _COMMON_CHECKSUM]
        if place == 0:
            return b""
        if not 0 < place <= layout.COMMON_SLOTS:
            return None
        content = self._read_slot(_COMMON_WORDS[place - 1], MAX_COMMON_PAYLOAD_BYTES)
        return (
            content[1]
            if content is not None and self._words[_COMMON_WORDS[place - 1] + _CHECKSUM] == checksum
            else None
        )

    def _write_slot(
        self, word: int, version: int, payload: bytes, common: int = 0, common_checksum: int = 0
    ) -> None:
        self._words[word] = 0
        header = word * _WORD
        start = header + layout.SLOT_HEADER_BYTES
        self._bytes[start : start + len(payload)] = payload
        checksum = _checksum(payload, version, common_checksum)
        _SLOT_HEADER.pack_into(
            self._bytes,
            header + layout.SLOT_OFFSET_VERSION,
            version,
            len(payload),
            checksum,
            common,
            common_checksum,
        )
        self._words[word] = 1

    def _read_slot(self, word: int, limit: int) -> tuple[int, bytes] | None:
        words = self._words
        version, length = words[word + _SLOT_VERSION], words[word + _LENGTH]
        if words[word + _COMPLETE] != 1 or not 0 <= length <= limit:
            return None
        start = word * _WORD + layout.SLOT_HEADER_BYTES
        payload = bytes(self._bytes[start : start + length])
        # The writer may be alive and at it: then the parts do not fit together.
        checksum = _checksum(payload, version, words[word + _COMMON_CHECKSUM])
        return (version, payload) if checksum == words[word + _CHECKSUM] else None
