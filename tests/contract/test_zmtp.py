"""The imitated agents' half of a connection against a router of ZeroMQ."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from taskd.clock import MonotonicClock
from taskd.core import events
from taskd.testing.fleet import Fleet, ImitatedAgent
from taskd.testing.zmtp import ZmtpConnection
from taskd.transport import zeromq
from taskd.wire import batch, codec, messages, translate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_DEADLINE_S = 20.0
_SIZES = (0, 1, 255, 256, 100_000)


@pytest.fixture
def router() -> Iterator[zeromq.Router]:
    found = zeromq.Router("127.0.0.1:0")
    yield found
    found.close()


def until(found: Callable[[], bool]) -> None:
    end = time.monotonic() + _DEADLINE_S
    while not found():
        assert time.monotonic() < end


def test_messages_of_all_sizes_arrive_in_both_directions(router) -> None:
    connection = ZmtpConnection(router.address, b"agent-7")
    sent = [bytes([size % 251]) * size for size in _SIZES]
    for data in sent:
        connection.send(data)
    arrived: list[tuple[bytes, bytes]] = []

    def all_arrived() -> bool:
        router.poll(0.1)
        arrived.extend(router.receive())
        return len(arrived) == len(sent)

    until(all_arrived)
    assert arrived == [(b"agent-7", data) for data in sent]
    for data in sent:
        assert router.send(b"agent-7", data)
    answers: list[bytes] = []

    def all_answered() -> bool:
        answers.extend(connection.receive())
        return len(answers) == len(sent)

    until(all_answered)
    assert answers == sent
    connection.close()


def test_the_end_of_the_connection_is_an_error() -> None:
    router = zeromq.Router("127.0.0.1:0")
    connection = ZmtpConnection(router.address, b"agent-7")
    router.close()

    def has_ended() -> bool:
        try:
            connection.receive()
        except OSError:
            return True
        return False

    until(has_ended)
    connection.close()


def test_all_imitated_agents_obey_though_only_a_few_do_at_once(router) -> None:
    clock, count = MonotonicClock(), 40
    fleet = Fleet(
        [ImitatedAgent("job", i, count, 8, clock) for i in range(count)], router.address, clock
    )
    registered, stopped = set(), set()

    def hears() -> None:
        fleet.turn(0.02)
        router.poll(0.02)
        for peer, data in router.receive():
            message = codec.decode(data)[1]
            if isinstance(message, messages.Batch):
                stopped.add(peer)
            elif isinstance(message, messages.MESSAGE_BY_RECORD[events.AgentRegistered]):
                registered.add(peer)

    def all_have(done: set[bytes]) -> bool:
        hears()
        return len(done) == count

    until(lambda: all_have(registered))
    envelope = codec.Envelope("job", "manager", None, None, "manager", 0, 1, "test")
    for message in messages.Accepted(0, 0, "manager"), messages.Interrupt(1, "a rank has died"):
        for peer in registered:
            assert router.send(peer, codec.encode(envelope, message))
    until(lambda: all_have(stopped))
    for node_rank in range(count):
        fleet.hang_up(node_rank)


def test_an_imitated_agent_reports_the_stop_of_all_its_ranks_in_one_message(router) -> None:
    clock = MonotonicClock()
    fleet = Fleet([ImitatedAgent("job", 0, 1, 8, clock)], router.address, clock)
    said: list[messages.Message] = []

    def tell(message: messages.Message) -> None:
        envelope = codec.Envelope("job", "manager", None, None, "manager", 0, 1, "test")
        assert router.send(b"agent-0", codec.encode(envelope, message))

    def hears(kind: type[messages.Message]) -> bool:
        fleet.turn(0.02)
        router.poll(0.02)
        said.extend(codec.decode(data)[1] for _, data in router.receive())
        return any(isinstance(message, kind) for message in said)

    until(lambda: hears(messages.MESSAGE_BY_RECORD[events.AgentRegistered]))
    tell(messages.Accepted(0, 0, "manager"))
    tell(messages.Interrupt(1, "a rank has died"))
    until(lambda: hears(messages.Batch))
    (stop,) = [message for message in said if isinstance(message, messages.Batch)]
    paused = [events.WorkerPaused(0.0, "fleet", rank, 0, 1, 5, clean=True) for rank in range(8)]
    reports = [("fleet", translate.event_to_message(one)) for one in paused]
    assert stop == batch.batch_of(reports), "what a real agent would have sent"
    assert ("Interrupt", 1) in fleet.agents[0].told_at
    fleet.hang_up(0)
