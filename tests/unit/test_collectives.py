"""Reading the record of collectives from a black box that says anything at all."""

import struct
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from taskd.native import box_layout as layout
from taskd.native.collectives import Call, Collectives, Communicator

_AREA = layout.CALLS_OFFSET + layout.CALLS * layout.CALL_BYTES


class Box:
    """Bytes where a box would be; each copy may differ from the one before."""

    def __init__(self, *copies: bytes) -> None:
        self._copies, self._reads = copies, 0

    def read(self, offset: int, length: int) -> bytes:
        assert offset == layout.COLLECTIVES_OFFSET
        self._reads += 1
        return self._copies[(self._reads - 1) % len(self._copies)][:length]


def area(calls=(), communicators=()) -> bytes:
    content = bytearray(_AREA)
    for mark, *words, name in calls:
        place = ((mark - 1) // 2 if mark % 2 else mark // 2 - 1) % layout.CALLS
        struct.pack_into(
            "=Q7q32s", content, layout.CALLS_OFFSET + place * layout.CALL_BYTES, mark, *words, name
        )
    for place, words in enumerate(communicators):
        struct.pack_into(
            "=Qqqq32s",
            content,
            layout.COMMUNICATORS_OFFSET + place * layout.COMMUNICATOR_BYTES,
            *words,
        )
    return bytes(content)


def call(index: int, *, odd: bool = False) -> tuple:
    return (2 * index + 2 - odd, 7, index + 1, 40, -1, 1_000_000_000, 0, -1, b"ncclAllReduce")


def test_what_was_written_is_read() -> None:
    box = Box(
        area([call(0)], [(7, 3, 2, 2_000_000_000, b"nccl, 8 ranks"), ((1 << 63) | 5, 1, 1, 0, b"")])
    )
    assert Collectives(box).calls() == [
        Call(0, 7, 1, 40, None, None, 1_000_000_000, 0, "ncclAllReduce")
    ]
    known, unknown = Collectives(box).communicators()
    assert known == Communicator(7, "nccl, 8 ranks", 3, 2, 2.0)
    assert (known.is_comparable, unknown.is_comparable, unknown.entered_at) == (True, False, None)


def test_calls_that_are_being_written_or_are_older_than_the_ring_are_left_out() -> None:
    box = Box(area([call(5), call(45), call(60), call(300), call(301, odd=True), call(302)]))
    assert [found.index for found in Collectives(box).calls()] == [60, 300, 302]


def test_an_entry_that_changed_while_it_was_copied_is_left_out() -> None:
    before, after = area([call(1), call(2)]), area([call(257), call(2)])
    for copies in ((before, before, after), (before, after, after)):
        assert [found.index for found in Collectives(Box(*copies)).calls()] == [2]
    gone = area((), [(9, 1, 0, 0, b"")])
    assert Collectives(Box(gone, gone, area())).communicators() == []


@settings(max_examples=200)
@given(st.integers(0, 2**64), st.integers(0, 4096), st.booleans())
def test_garbage_is_read_without_a_word(seed: int, damage: int, whole: bool) -> None:
    random = Random(seed)
    content = bytearray(
        random.randbytes(_AREA)
        if whole
        else area([call(n) for n in range(300)], [(7, 3, 2, 1, b"x")] * 64)
    )
    for _ in range(damage):
        content[random.randrange(_AREA)] = random.randrange(256)
    found = Collectives(Box(bytes(content)))
    calls, communicators = found.calls(), found.communicators()
    assert len(calls) <= layout.CALLS
    assert len(communicators) <= layout.COMMUNICATORS
    assert [one.index for one in calls] == sorted({one.index for one in calls})
    assert all(
        text.name.isprintable() and len(text.name) <= layout.NAME_BYTES
        for text in (*calls, *communicators)
    )
