"""The link between agent and worker."""

from __future__ import annotations

import os
import socket

import pytest

from taskd.errors import TransportError
from taskd.transport import channel as channel_module
from taskd.transport.base import MAX_FRAME_BYTES
from taskd.transport.channel import Channel


@pytest.fixture
def pair():
    ends = tuple(
        Channel(end.detach()) for end in socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    )
    yield ends
    for end in ends:
        end.close()


def test_messages_keep_their_bounds_and_order(pair) -> None:
    a, b = pair
    sent = [bytes([number]) * (number + 1) for number in range(100)]
    assert all(a.send(data) for data in sent)
    assert b.receive() == sent
    assert b.receive() == []
    assert not b.closed


def test_the_largest_frame_fits_and_a_longer_one_arrives_too_long_or_not_at_all(pair) -> None:
    a, b = pair
    data = os.urandom(MAX_FRAME_BYTES)
    assert a.send(data)
    assert b.receive() == [data]
    if a.send(bytes(MAX_FRAME_BYTES + 1000)):
        assert [len(received) for received in b.receive()] == [MAX_FRAME_BYTES + 1]


def test_what_was_said_before_the_end_is_read_before_the_end(pair) -> None:
    a, b = pair
    a.send(b"last words")
    a.close()
    assert a.closed
    assert a.fd == -1
    assert b.receive() == [b"last words"]
    assert b.closed


def test_last_words_are_read_even_if_the_dead_left_something_unread(pair) -> None:
    a, b = pair
    b.send(b"never read")
    a.send(b"last words")
    a.close()
    assert b.receive() == [b"last words"]
    assert b.closed
    assert b.receive() == []


def test_sending_to_nobody_says_so(pair) -> None:
    a, b = pair
    b.close()
    assert a.send(b"x") is False
    a.close()
    assert a.send(b"x") is False


def test_a_peer_that_does_not_read_costs_a_bounded_wait(pair, monkeypatch) -> None:
    a, b = pair
    monkeypatch.setattr(channel_module, "_SEND_TIMEOUT_S", 0.01)
    sent = 0
    while a.send(bytes(1000)):
        sent += 1
    assert sent > 100
    assert len(b.receive()) == sent
    assert a.send(b"room again")


def test_an_empty_message_is_refused(pair) -> None:
    with pytest.raises(ValueError, match="empty"):
        pair[0].send(b"")


def test_another_kind_of_socket_is_refused() -> None:
    left, right = socket.socketpair()
    with pytest.raises(TransportError, match="SEQPACKET"):
        Channel(left.detach())
    right.close()
