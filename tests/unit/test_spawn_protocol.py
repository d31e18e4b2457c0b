"""What agent and forkserver say to each other comes out as it went in."""

import pytest

from taskd.agent.spawning.protocol import (
    Exited,
    Forked,
    Note,
    PreloadedLost,
    Ready,
    SpawnRequest,
    Started,
    StartFailed,
    packed,
    reply_from,
    reply_message,
    request_from,
    request_message,
    unpacked,
)
from taskd.errors import ForkserverError

REQUEST = SpawnRequest(
    1,
    ("-u", "train.py", "--x"),
    {"A": "b"},
    stdout="/out",
    fds={"channel": 5, "box": 6},
    worker={"rank": 3},
    ignored=(1,),
    blocked=(2, 3),
)


def over_the_wire(message: dict) -> dict:
    return unpacked(packed(message))


@pytest.mark.parametrize(
    "request_", [REQUEST, SpawnRequest(2, ("-m", "x\udcff"), {"\udcfe": "\udcff"}, cwd="/\udcff")]
)
def test_a_request_arrives_with_the_receivers_descriptors(request_: SpawnRequest) -> None:
    message, descriptors = request_message(request_)
    assert descriptors == tuple(request_.fds.values())
    assert request_from(over_the_wire(message), list(descriptors)) == request_


def test_a_request_whose_descriptors_are_missing_is_refused() -> None:
    message, _ = request_message(REQUEST)
    with pytest.raises(ForkserverError, match="too many open files"):
        request_from(over_the_wire(message), [])


@pytest.mark.parametrize(
    "reply",
    [
        Ready(),
        Note("x"),
        PreloadedLost("x"),
        Forked(1, 2),
        Started(1, 2, 7, "cold"),
        Started(1, 2, 7),
        StartFailed(3, "no"),
        Exited(1, 2, -9),
    ],
)
def test_a_reply_arrives_as_it_was_said(reply) -> None:
    message, descriptors = reply_message(reply)
    assert reply_from(over_the_wire(message), list(descriptors)) == reply


def test_a_start_without_room_for_the_pidfd_is_told_all_the_same() -> None:
    message, descriptors = reply_message(Started(1, 2, 7))
    assert descriptors == (7,)
    assert reply_from(over_the_wire(message), []) == Started(1, 2, -1)


def test_the_bootstrap_names_each_descriptor() -> None:
    assert REQUEST.bootstrap() == {"rank": 3, "previous_fd": None, "channel_fd": 5, "box_fd": 6}
    assert SpawnRequest(1, ("x",), {}, fds={"box": 1}).bootstrap() is None
