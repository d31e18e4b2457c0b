"""Frames between buddies: round trip.

And whatever bytes come, a value of the right types or a RemoteProtocolError.
"""

from __future__ import annotations

import contextlib
import dataclasses

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from taskd.errors import RemoteProtocolError
from taskd.wire import mirroring
from taskd.wire.mirroring import MAX_SNAPSHOT_BYTES, PIECE_BYTES, STAGES, Answer, Ask, Offer, Piece

OFFER = Offer(1, "job", 0, "mine", "yours", 3, 1, 7, 20, 1, 4096, 100, 2**64 - 1, 5)
NUMBER, TEXT, RANK = (
    st.integers(0, 2**63 - 1),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=40),
    st.integers(0, 2**20),
)
FRAMES = st.one_of(
    st.builds(Offer, NUMBER, TEXT, RANK, TEXT, TEXT, RANK, *[NUMBER] * 4, st.integers(0, 2**45),
    st.integers(1, 2**45), *[st.integers(0, 2**64 - 1)] * 2),
    st.builds(Piece, NUMBER, NUMBER, st.binary(min_size=1, max_size=200)),
    st.builds(Ask, NUMBER, TEXT, RANK, TEXT, TEXT, RANK, NUMBER),
    st.builds(Answer, NUMBER, st.sampled_from(STAGES), NUMBER, TEXT),
)  # fmt: skip


@given(FRAMES)
def test_what_goes_out_comes_in(frame) -> None:
    assert mirroring.decode(mirroring.encode(frame)) == frame


def test_the_largest_piece_passes_and_nothing_larger() -> None:
    data = mirroring.encode(Piece(2**63 - 1, 2**63 - 1, b"x" * PIECE_BYTES))
    assert len(mirroring.decode(data).data) == PIECE_BYTES
    with pytest.raises(RemoteProtocolError):
        mirroring.decode(mirroring.encode(Piece(1, 0, b"x" * (PIECE_BYTES + 1))))
    with pytest.raises(RemoteProtocolError) as caught:
        mirroring.decode(b"\0" * (mirroring.MAX_FRAME_BYTES + 1))
    assert caught.value.reason == "size"


@given(st.binary(max_size=300))
def test_any_bytes_are_survived(data: bytes) -> None:
    with contextlib.suppress(RemoteProtocolError):
        mirroring.decode(data)


@given(FRAMES, st.data())
def test_changed_and_cut_frames_are_survived(frame, data) -> None:
    encoded = bytearray(mirroring.encode(frame))
    encoded[data.draw(st.integers(0, len(encoded) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    for bad in (bytes(encoded), bytes(encoded[: data.draw(st.integers(0, len(encoded)))])):
        with contextlib.suppress(RemoteProtocolError):
            mirroring.decode(bad)


@pytest.mark.parametrize(
    "change",
    [
        {"rank": -1},
        {"rank": 2**20 + 1},
        {"version": 2**63},
        {"index_sum": 2**64},
        {"transfer": True},
        {"job_id": 5},
        {"kind": "x"},
        {"data_bytes": MAX_SNAPSHOT_BYTES},
        {"data_bytes": 0, "index_bytes": 0},
    ],
)
def test_an_offer_with_impossible_values_is_refused(change: dict[str, object]) -> None:
    try:
        data = mirroring.encode(dataclasses.replace(OFFER, **change))
    except OverflowError:
        return  # msgpack cannot say it at all
    with pytest.raises(RemoteProtocolError):
        mirroring.decode(data)


@pytest.mark.parametrize(
    "fields",
    [
        [],
        [1],
        [2, 1],
        [1, 9, 0],
        [1, 3, 0, "perhaps", 0, ""],
        [1, 3, 0, "kept", 0],
        [1, 2, 0, 0, b""],
        [1, 2, 0, 0, "text"],
    ],
)
def test_other_lists_are_refused(fields: list[object]) -> None:
    with pytest.raises(RemoteProtocolError):
        mirroring.decode(msgpack.packb(fields))
