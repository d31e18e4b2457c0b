"""Frames: what goes in comes out, and whatever else comes in is refused by one kind of error."""

from __future__ import annotations

import dataclasses

import msgpack
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from taskd.core.commands import Move
from taskd.core.events import WorkerReport
from taskd.core.faults import Fault, FaultKind
from taskd.errors import LocalProtocolError, RemoteProtocolError
from taskd.wire import codec, messages, schema
from tests.unit.wire.strategies import ANY_MESSAGE, ENVELOPES, MESSAGES

ENVELOPE = codec.Envelope("job", "agent", 0, None, "a1", 3, 7, "cause")
KINDS = {"malformed", "version", "size", "unknown type"}


RELEASE = messages.Release(3)


def frame(message: messages.Message = RELEASE, **changes: object) -> dict:
    return {**msgpack.unpackb(codec.encode(ENVELOPE, message)), **changes}


def refusal(data: bytes) -> RemoteProtocolError:
    with pytest.raises(RemoteProtocolError) as caught:
        codec.decode(data)
    assert caught.value.reason in KINDS
    return caught.value


def refusal_of(**changes: object) -> RemoteProtocolError:
    return refusal(msgpack.packb(frame(**changes)))


@pytest.mark.parametrize("cls", MESSAGES, ids=lambda cls: cls.__name__)
@settings(max_examples=30)
@given(data=st.data())
def test_every_message_comes_out_as_it_went_in(cls: type, data: st.DataObject) -> None:
    envelope, message = data.draw(ENVELOPES), data.draw(MESSAGES[cls])
    assert codec.decode(codec.encode(envelope, message)) == (envelope, message)


@settings(max_examples=300)
@given(st.binary(max_size=300))
@example(b"")
@example(b"\xc1")
@example(b"\x91" * 5000)  # deep nesting
@example(b"\xdd\xff\xff\xff\xff")  # an array that claims 2**32 elements
@example(b"\xd6\xff\x00\x00\x00\x00")  # an extension type: a time stamp
@example(b"\xa4\xff\xff\xff\xff")  # a string that is no UTF-8
@example(b"\x81\x01\x02")  # a map with a key that is no string
def test_random_bytes_are_refused_and_raise_nothing_else(data: bytes) -> None:
    refusal(data)


@settings(max_examples=200)
@given(ENVELOPES, ANY_MESSAGE, st.data())
def test_a_truncated_frame_is_refused(
    envelope: codec.Envelope, message: messages.Message, data: st.DataObject
) -> None:
    whole = codec.encode(envelope, message)
    refusal(whole[: data.draw(st.integers(0, len(whole) - 1))])


@settings(max_examples=300)
@given(ENVELOPES, ANY_MESSAGE, st.data())
def test_a_flipped_bit_gives_a_message_or_a_refusal(envelope, message, data) -> None:
    damaged = bytearray(codec.encode(envelope, message))
    position = data.draw(st.integers(0, len(damaged) * 8 - 1))
    damaged[position // 8] ^= 1 << position % 8
    try:
        codec.decode(bytes(damaged))
    except RemoteProtocolError as error:
        assert error.reason in KINDS


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4)
    ),
    max_leaves=12,
)


@settings(max_examples=300)
@given(st.sampled_from(sorted(messages.MESSAGE_BY_CODE)), st.data())
def test_well_formed_bodies_of_the_wrong_shape_are_refused_or_read(
    code: int, data: st.DataObject
) -> None:
    names = [field.name for field in dataclasses.fields(messages.MESSAGE_BY_CODE[code])]
    body = data.draw(PLAIN | st.fixed_dictionaries(dict.fromkeys(names, PLAIN)))
    try:
        codec.decode(msgpack.packb(frame(type=code, body=body)))
    except RemoteProtocolError as error:
        assert error.reason == "malformed"


@pytest.mark.parametrize("version", [0, 2, 999])
def test_old_and_new_versions_are_refused_whatever_the_rest_looks_like(version: int) -> None:
    assert refusal(msgpack.packb({"version": version, "anything": "else"})).reason == "version"


@pytest.mark.parametrize("code", [0, 19, 10**6])
def test_unknown_types_are_refused_with_their_code(code: int) -> None:
    error = refusal_of(type=code, body={"what": "ever"})
    assert (error.reason, error.type_code) == ("unknown type", code)


def test_oversized_frames_are_refused_unread() -> None:
    assert refusal(b"\xc0" * (codec.MAX_MESSAGE_BYTES + 1)).reason == "size"


def test_unknown_fields_are_ignored_everywhere() -> None:
    fault = Fault(FaultKind.RAISED, 1, 2, "ValueError: x")
    message = messages.WorkerLost(1, 2, fault, 0.5, (3,))
    body = frame(message)["body"]
    body |= {"new": 1, "fault": {**body["fault"], "newer": [1, 2]}}
    assert codec.decode(msgpack.packb(frame(message, body=body, other=None)))[1] == message
    resume = messages.Resume(1, 2, (Move(0), Move(1, 0)), 0)
    body = frame(resume)["body"]
    body["moves"] = [[*move, "new"] for move in body["moves"]]
    assert codec.decode(msgpack.packb(frame(resume, body=body)))[1] == resume


def test_fields_that_an_older_peer_does_not_send_take_their_default() -> None:
    message = messages.WorkerPaused(1, 2, 3, 4, clean=True, reason="")
    body = frame(message)["body"]
    del body["reason"]
    assert codec.decode(msgpack.packb(frame(message, body=body)))[1] == message


def test_moves_of_an_older_peer_have_no_snapshot() -> None:
    body = frame(messages.Resume(1, 2, (), 0))["body"]
    body["moves"] = [[0, None], [1, 0]]
    assert codec.decode(msgpack.packb(frame(messages.Resume(1, 2, (), 0), body=body)))[1].moves == (
        Move(0),
        Move(1, 0),
    )


def test_a_move_is_sent_as_an_older_peer_reads_it_with_the_snapshot_behind() -> None:
    assert frame(messages.Resume(1, 2, (Move(0, snapshot=2), Move(1, 0)), 0))["body"]["moves"] == [
        [0, None, 2],
        [1, 0, None],
    ]


def test_fields_that_are_needed_are_named_when_they_are_missing() -> None:
    body = frame(messages.Refused("no"))["body"]
    del body["reason"]
    assert "Refused.reason is missing" in str(refusal_of(message=messages.Refused("no"), body=body))


@pytest.mark.parametrize(
    "changes",
    [
        {"version": "1"},
        {"version": True},
        {"version": None},
        {"job_id": 5},
        {"role": "king"},
        {"role": None},
        {"node_rank": -1},
        {"rank": "0"},
        {"rank": 2**40},
        {"incarnation": 1.5},
        {"incarnation": -1},
        {"generation": -1},
        {"generation": True},
        {"sequence": None},
        {"cause": b"x"},
        {"type": "x"},
        {"body": None},
        {"body": [3]},
        {"body": {"generation": 2**63}},
        {"body": {"generation": "3"}},
    ],
)
def test_wrong_values_are_refused(changes: dict) -> None:
    refusal_of(**changes)


@pytest.mark.parametrize(
    ("message", "name", "value"),
    [
        (messages.WorkerReady(0, 1, guarded=True), "guarded", 1),
        (messages.WorkerLost(0, 1, Fault(FaultKind.LOST, 0, 1, ""), 0.0), "age_s", float("nan")),
        (messages.WorkerLost(0, 1, Fault(FaultKind.LOST, 0, 1, ""), 0.0), "age_s", "soon"),
        (messages.WorkerLost(0, 1, Fault(FaultKind.LOST, 0, 1, ""), 0.0), "box_versions", 5),
        (
            messages.WorkerLost(0, 1, Fault(FaultKind.LOST, 0, 1, ""), 0.0),
            "fault",
            {"kind": "bored", "rank": 0, "incarnation": 0, "detail": ""},
        ),
        (messages.WorkerLost(0, 1, Fault(FaultKind.LOST, 0, 1, ""), 0.0), "age_s", -1.0),
        (messages.WorkerLost(0, 1, Fault(FaultKind.LOST, 0, 1, ""), 0.0), "age_s", 1e300),
        (
            messages.WorkerLost(0, 1, Fault(FaultKind.LOST, 0, 1, ""), 0.0),
            "incarnation",
            schema.MAX_CLAIM + 1,
        ),
        (
            messages.WorkerLost(0, 1, Fault(FaultKind.LOST, 0, 1, ""), 0.0),
            "box_versions",
            [schema.MAX_CLAIM + 1],
        ),
        (messages.WorkerLost(0, 1, Fault(FaultKind.LOST, 0, 1, ""), 0.0), "snapshots", [-1]),
        (messages.WorkerReturned(0, 1, 2, 5), "version", schema.MAX_CLAIM + 1),
        (messages.WorkerReturned(0, 1, 2, 5), "generation", schema.MAX_CLAIM + 1),
        (messages.MirrorsHeld(0, ((1, (2,)),)), "held", [[1, [-2]]]),
        (messages.AgentRegistered(0, "a", 1, 1, 1, 0, 0, ()), "world_size", 1 << 31),
        (
            messages.AgentRegistered(0, "a", 1, 1, 1, 0, 0, ()),
            "workers",
            [{"rank": 0, "incarnation": 0, "state": "zombie"}],
        ),
        (messages.AgentRegistered(0, "a", 1, 1, 1, 0, 0, ()), "restarts_used", -1),
        (messages.Resume(1, 2, (), 0), "moves", [[1]]),
        (messages.Resume(1, 2, (), 0), "moves", [{"rank": 1}]),
        (messages.RestartGroup(1, 2, "", ()), "incarnations", [[1, 2, 3]]),
        (messages.RestartGroup(1, 2, "", ()), "incarnations", [7]),
    ],
)
def test_wrong_values_in_a_body_are_refused(
    message: messages.Message, name: str, value: object
) -> None:
    body = {**frame(message)["body"], name: value}
    assert refusal_of(message=message, body=body).reason == "malformed"


def fault_with_long_texts() -> Fault:
    return Fault(
        FaultKind.RAISED,
        4095,
        7,
        "E: " + "x" * 10**6,
        10**6,
        "optimizer",
        "y" * 10**6,
        "head\n" + "z" * 10**6 + "\ntail",
    )


@pytest.mark.parametrize("ranks", [8, 64, 512, 4096])
def test_the_largest_messages_of_a_job_fit(ranks: int) -> None:
    everybody = range(ranks)
    for message in (
        messages.Resume(
            10**6, 10**9, tuple(Move(rank, ranks - 1 - rank, 10**9) for rank in everybody), 32767
        ),
        messages.RestartGroup(
            10**6, 32767, "r" * 10**6, tuple((rank, 10**6) for rank in everybody)
        ),
        messages.GiveUp(
            10**6, f"ranks {list(everybody)} failed", ranks - 1, fault_with_long_texts()
        ),
    ):
        assert len(codec.encode(ENVELOPE, message)) <= codec.MAX_MESSAGE_BYTES // 2
    workers = tuple(
        WorkerReport(rank, 10**6, "returned", declared=True, version=10**9)
        for rank in range(min(ranks, 1024))
    )
    registration = messages.AgentRegistered(511, "f" * 32, 512, 4096, 32767, 10**6, 32767, workers)
    assert len(codec.encode(ENVELOPE, registration)) <= codec.MAX_MESSAGE_BYTES // 2


def test_a_message_that_is_too_large_is_our_own_fault() -> None:
    moves = tuple(Move(rank, rank) for rank in range(100_000))
    with pytest.raises(LocalProtocolError, match="Resume has"):
        codec.encode(ENVELOPE, messages.Resume(1, 1, moves, 0))


def test_what_a_manager_counts_on_from_the_largest_claim_is_still_a_number_for_its_agents() -> None:
    claimed = codec.decode(
        codec.encode(ENVELOPE, messages.WorkerReturned(0, 1, schema.MAX_CLAIM, schema.MAX_CLAIM))
    )[1]
    order = messages.Resume(
        claimed.generation + 1,
        claimed.version + 1,
        (Move(0, snapshot=schema.MAX_CLAIM + 1),),
        schema.MAX_CLAIM + 1,
    )
    assert codec.decode(codec.encode(ENVELOPE, order))[1] == order


def test_texts_that_a_peer_did_not_cut_are_cut_by_the_receiver() -> None:
    message = messages.WorkerUncaught(
        1, 2, Fault(FaultKind.RAISED, 1, 2, "short", traceback="short")
    )
    body = frame(message)["body"]
    body["fault"] |= {"detail": "x" * 100_000, "traceback": "\n" * 100_000}
    envelope, read = codec.decode(msgpack.packb(frame(message, body=body, cause="y" * 10_000)))
    assert len(read.fault.detail) <= schema.MAX_TEXT_BYTES
    assert len(read.fault.traceback) <= schema.MAX_TRACEBACK_BYTES
    assert len(envelope.cause) <= schema.MAX_TEXT_BYTES


def test_who_said_what_breaks_a_rule_is_known() -> None:
    assert refusal_of(body={"generation": -1}).envelope == ENVELOPE
    assert refusal_of(body={"generation": -1}).message_code == RELEASE.code
    assert refusal_of(role="king").envelope is None


def test_long_texts_are_cut_and_tracebacks_keep_both_ends() -> None:
    sent = messages.WorkerUncaught(1, 2, fault_with_long_texts())
    fault = codec.decode(codec.encode(ENVELOPE, sent))[1].fault
    assert len(fault.detail.encode()) <= schema.MAX_TEXT_BYTES
    assert fault.detail.endswith("(cut)")
    assert len(fault.traceback.encode()) <= schema.MAX_TRACEBACK_BYTES
    assert fault.traceback.startswith("head\n")
    assert fault.traceback.endswith("\ntail")


@given(st.text(max_size=6000).map(lambda text: text * 4), st.integers(20, 5000))
@settings(max_examples=50)
def test_a_cut_text_is_within_its_limit_and_begins_like_the_whole(text: str, limit: int) -> None:
    cut = schema.cut_text(text, limit)
    assert cut == text or (len(cut.encode()) <= limit and cut.endswith(" ... (cut)"))


def test_texts_that_utf8_cannot_express_are_sent_with_marks() -> None:
    message = codec.decode(codec.encode(ENVELOPE, messages.Refused("a\udcffb")))[1]
    assert message == messages.Refused("a?b")
