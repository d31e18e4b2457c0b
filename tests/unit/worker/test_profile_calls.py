"""The calls of collectives as the profiler reads them.

Each once at each end, whatever the ring holds.
"""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING

import pytest

from taskd.native import box_layout as layout
from taskd.native.black_box import BlackBox
from taskd.worker.profiling.calls import CallReader
from taskd.worker.profiling.encoder import Encoder
from tests.unit.worker.rings import Ring

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def box() -> Iterator[BlackBox]:
    made = BlackBox.create()
    yield made
    made.close()


def test_each_call_is_seen_once_at_each_end(box: BlackBox) -> None:
    ring, reader = Ring(box), CallReader(box)
    assert reader.read() == ([], [])
    ring.call(enter=10, leave=20)
    waiting = ring.call(enter=30)
    begun, ended = reader.read()
    assert [(call.name, call.enter_ns, call.leave_ns) for call in begun] == [
        ("ncclAllReduce", 10, 20),
        ("ncclAllReduce", 30, 0),
    ]
    assert [call.index for call in ended] == [0]
    assert reader.read() == ([], [])
    ring.leave(waiting, 30, 90)
    begun, ended = reader.read()
    assert (begun, [call.leave_ns for call in ended]) == ([], [90])


def test_what_was_overwritten_before_it_was_seen_is_counted(box: BlackBox) -> None:
    ring, reader = Ring(box), CallReader(box)
    for _ in range(layout.CALLS + 44):
        ring.call(enter=1, leave=2)
    begun, ended = reader.read()
    assert len(begun) == len(ended) == layout.CALLS
    assert reader.lost == 44


def test_calls_before_the_switch_are_not_told(box: BlackBox) -> None:
    ring = Ring(box)
    ring.call(enter=1, leave=2)
    assert CallReader(box).read() == ([], [])


def test_an_entry_that_stays_half_written_is_passed_over(box: BlackBox) -> None:
    ring, reader = Ring(box), CallReader(box)
    half = ring.call(enter=1, leave=2)
    ring.write(half, b"x", 1, 1, 2, mark=2 * half + 1)
    ring.call(enter=3, leave=4)
    assert reader.read() == ([], [])
    begun, _ = reader.read()
    assert [call.enter_ns for call in begun] == [3]
    assert reader.lost == 1


def test_any_bytes_in_the_ring_are_survived(box: BlackBox) -> None:
    reader = CallReader(box)
    start = layout.COLLECTIVES_OFFSET
    for seed in range(200):
        noise = b"".join(
            struct.pack("=Q", (seed * 2654435761 * (word + 1)) & (2**64 - 1))
            for word in range(layout.COLLECTIVES_BYTES // 8)
        )
        box._bytes[start : start + len(noise)] = noise
        encoder = Encoder(0)
        begun, ended = reader.read()
        for call in begun:
            for line in encoder.begin(call, reader.communicators()).splitlines():
                json.loads(line)
        for call in ended:
            for line in encoder.end(call).splitlines():
                json.loads(line)
