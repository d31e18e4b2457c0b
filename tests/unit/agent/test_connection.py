"""The connection to a manager, which is another one all at once."""

from __future__ import annotations

import dataclasses
import logging
import socket
import time
from typing import TYPE_CHECKING

import pytest

from taskd.agent.link.connection import ManagerConnection
from taskd.clock import MonotonicClock
from taskd.core import events
from taskd.core.timeouts import Timeouts
from taskd.errors import TransportError
from taskd.testing.clock import FakeClock
from taskd.transport import zeromq
from taskd.wire import batch, codec, messages, translate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_DEADLINE_S = 20.0


class Spare:
    """One that registers at `address`, and is answered by whoever listens there."""

    def __init__(self, address: str) -> None:
        self.connection = ManagerConnection(
            address,
            None,
            MonotonicClock(),
            Timeouts.derive(6.0),
            job_id="job",
            role="spare",
            node_rank=None,
            incarnation="one",
            register=self.register,
        )

        self.said: list[int] = []  # the numbers of its registrations

    def register(self) -> None:
        number = self.connection.send(messages.SpareRegistered("host", "name"), "spare")
        self.said.append(number)

    def is_up(self) -> bool:
        return self.connection._dealer.connection > 0

    def is_answered(self, manager: zeromq.Router) -> bool:
        """Within a heartbeat or two."""
        until = time.monotonic() + _DEADLINE_S / 4
        envelope = codec.Envelope("job", "manager", None, None, "manager", 0, 1, "accepted")
        while time.monotonic() < until:
            zeromq.poll([manager], 0.02)
            for peer, _ in manager.receive():
                manager.send(peer, codec.encode(envelope, messages.Accepted(0, 0, "manager")))
            self.connection.poll(0.02)
            if list(self.connection.turn()):
                return True
        return False


def wait_until(fact: Callable[[], object], spare: Spare) -> None:
    until = time.monotonic() + _DEADLINE_S
    while not fact():
        assert time.monotonic() < until
        spare.connection.poll(0.02)


@pytest.mark.slow
def test_the_next_manager_at_the_same_address_is_heard() -> None:
    """What was left to be said to the one before must not take over the new connection."""
    first = zeromq.Router("127.0.0.1:0")
    address = first.address
    spare = Spare(address)
    assert spare.is_answered(first)
    first.close()
    for _ in range(3):
        spare.register()  # to nobody
    second = zeromq.Router(address)
    spare.connection.redirect(address)
    assert spare.is_answered(second)
    spare.connection.close()
    second.close()


def test_who_ends_before_it_is_accepted_has_registered_when_it_says_so() -> None:
    """Of somebody whom it does not know the manager takes no last words."""
    manager = zeromq.Router("127.0.0.1:0")
    spare = Spare(manager.address)
    spare.connection.introduce()
    spare.connection.send(messages.Heartbeat(), "last words")
    spare.connection.close()
    said: list[messages.Message] = []
    until = time.monotonic() + _DEADLINE_S
    while len(said) < 2 and time.monotonic() < until:
        zeromq.poll([manager], 0.02)
        said += [codec.decode(data)[1] for _, data in manager.receive()]
    manager.close()
    assert said == [messages.SpareRegistered("host", "name"), messages.Heartbeat()]


def test_who_ends_does_not_wait_for_a_manager_where_nobody_listens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("taskd.agent.link.connection._INTRODUCTION_S", 1e6)
    with socket.socket() as bound:  # it does not listen, and the port is given to nobody else
        bound.bind(("127.0.0.1", 0))
        spare = Spare(f"127.0.0.1:{bound.getsockname()[1]}")
        spare.connection.introduce()
        assert spare.said == []
        spare.connection.close()


def test_who_was_accepted_is_introduced_already() -> None:
    manager = zeromq.Router("127.0.0.1:0")
    spare = Spare(manager.address)
    assert spare.is_answered(manager)
    spare.said.clear()
    spare.connection.introduce()
    assert spare.said == []
    spare.connection.close()
    manager.close()


def test_without_a_manager_nothing_waits_for_the_next_one_but_what_is_new() -> None:
    """What was said to nobody for minutes, the next manager would read before anything else."""
    first = zeromq.Router("127.0.0.1:0")
    address = first.address
    spare = Spare(address)
    assert spare.is_answered(first)
    first.close()
    wait_until(lambda: not spare.is_up(), spare)
    list(spare.connection.receive())  # who was late was accepted twice
    spare.connection.session.is_registered = False  # it is lost
    spare.said.clear()
    for _ in range(300):  # minutes
        list(spare.connection.beat())
    assert spare.said == []
    second = zeromq.Router(address)
    spare.connection.beat_at = float("inf")  # nothing but the connection ends the wait
    wait_until(lambda: spare.said or list(spare.connection.turn()), spare)
    assert spare.is_up()
    assert spare.is_answered(second)
    assert len(spare.said) == 1
    spare.connection.close()
    second.close()


def test_a_manager_that_says_nothing_is_asked_ever_more_seldom() -> None:
    manager = zeromq.Router("127.0.0.1:0")
    spare = Spare(manager.address)
    wait_until(lambda: list(spare.connection.turn()) or spare.said, spare)
    said = [0]
    for beat in range(1, 100):
        list(spare.connection.beat())
        said += [beat] * (len(spare.said) - len(said))
    assert said == [0, 1, 3, 7, 15, 31, 47, 63, 79, 95]
    spare.connection.close()
    manager.close()


class Agent:
    """One that says things to a manager that only listens."""

    def __init__(self, gather_s: float) -> None:
        self.clock = FakeClock()
        self._manager = zeromq.Router("127.0.0.1:0")
        self.connection = ManagerConnection(
            self._manager.address,
            None,
            self.clock,
            dataclasses.replace(Timeouts.derive(6.0), gather_s=gather_s),
            job_id="job",
            role="agent",
            node_rank=0,
            incarnation="one",
            register=lambda: self.connection.send(messages.SpareRegistered("h", "n"), "register"),
        )

    def hears(self, message: messages.Message) -> None:
        """The manager says this to it."""
        envelope = codec.Envelope("job", "manager", None, None, "manager", 0, 1, "test")
        until = time.monotonic() + _DEADLINE_S
        while not self.connection._dealer.connection:  # that it is there ends a wait, too
            assert time.monotonic() < until
            self.connection.poll(0.1)
        assert self._manager.send(self._peer, codec.encode(envelope, message))
        self.connection.beat_at = float("inf")  # nothing but this ends the wait
        self.connection.poll(_DEADLINE_S)
        assert list(self.connection.receive()) == []

    def pause(self, rank: int, reason: str = "", snapshots: tuple[int, ...] = ()) -> None:
        event = events.WorkerPaused(0.0, "stop", rank, 0, 1, 5, True, reason, snapshots)
        self.connection.gather(translate.event_to_message(event), "stop")

    def arrived(self) -> list[messages.Message]:
        """All that was said, behind which this says a last thing."""
        number = self.connection.send(messages.Heartbeat(), "last")
        found: list[tuple[codec.Envelope, messages.Message]] = []
        until = time.monotonic() + _DEADLINE_S
        while not found or found[-1][0].sequence != number:
            assert time.monotonic() < until
            zeromq.poll([self._manager], 0.1)
            received = self._manager.receive()
            self._peer = received[0][0] if received else b""
            found += [codec.decode(data) for _, data in received]
        return [message for _, message in found[:-1]]

    def close(self) -> None:
        self.connection.close()
        self._manager.close()


@pytest.fixture
def agent(request: pytest.FixtureRequest) -> Iterator[Agent]:
    found = Agent(getattr(request, "param", 0.0))
    yield found
    found.close()


def ranks_of(message: messages.Message) -> list[int]:
    assert isinstance(message, messages.Batch)
    return [rank for told in message.reports for rank in told.ranks]


def test_what_is_gathered_goes_out_before_the_next_wait_and_before_anything_else(agent) -> None:
    agent.pause(0)
    agent.pause(1)
    agent.connection.poll(0.0)
    agent.pause(2)
    agent.connection.send(messages.Heartbeat(), "in between")
    agent.pause(3)
    agent.pause(4)
    first, alone, beat, last = agent.arrived()
    assert ranks_of(first) == [0, 1]
    assert isinstance(alone, messages.WorkerPaused)  # one report needs no batch
    assert alone.rank == 2
    assert isinstance(beat, messages.Heartbeat)
    assert ranks_of(last) == [3, 4]


@pytest.mark.parametrize("agent", [0.5], indirect=True)
def test_in_a_large_job_it_is_kept_for_a_moment_and_for_no_longer(agent) -> None:
    agent.pause(0)
    agent.connection.poll(0.0)
    agent.clock.advance(0.4)
    agent.pause(1)
    agent.connection.poll(0.0)
    assert agent.connection._gathered
    agent.clock.advance(0.2)
    agent.connection.poll(0.0)
    assert not agent.connection._gathered
    (first,) = agent.arrived()
    assert ranks_of(first) == [0, 1]


def test_many_reports_go_out_in_messages_of_a_bounded_size(agent) -> None:
    for rank in range(batch.MAX_REPORTS + 2):
        agent.pause(rank)
    first, second = agent.arrived()
    assert ranks_of(first) == list(range(batch.MAX_REPORTS))
    assert ranks_of(second) == [batch.MAX_REPORTS, batch.MAX_REPORTS + 1]


def test_a_report_that_is_too_large_costs_the_others_nothing(agent, caplog, monkeypatch) -> None:
    monkeypatch.setattr(logging.getLogger("taskd"), "propagate", True)
    agent.pause(0)
    agent.pause(1, snapshots=tuple(range(codec.MAX_MESSAGE_BYTES)))
    agent.pause(2)
    assert [(type(message), message.rank) for message in agent.arrived()] == [
        (messages.WorkerPaused, 0),
        (messages.WorkerPaused, 2),
    ]
    assert "node 0: the manager goes on without a WorkerPaused" in caplog.text


def test_a_manager_that_knows_no_batches_hears_all_again_and_each_report_alone(agent) -> None:
    agent.pause(0)
    agent.pause(1)
    agent.connection.poll(0.0)
    (both,) = agent.arrived()
    assert ranks_of(both) == [0, 1]
    agent.hears(messages.Unsupported(messages.Batch.code))
    agent.pause(0)
    agent.pause(1)
    registration, first, second = agent.arrived()
    assert isinstance(registration, messages.SpareRegistered)
    assert [type(first), type(second)] == [messages.WorkerPaused] * 2


def test_what_is_gathered_is_kept_if_there_is_no_other_address_to_go_to(agent) -> None:
    agent.pause(0)
    with pytest.raises(TransportError):
        agent.connection.redirect("no address")
    (alone,) = agent.arrived()
    assert alone.rank == 0


def test_why_it_is_not_taken_yet_is_said_once_for_each_reason(agent, caplog) -> None:
    logging.getLogger("taskd").propagate = True
    agent.arrived()  # the manager knows whom it speaks to
    for reason in ("it is taken", "it is taken", "another reason"):
        agent.hears(messages.Postponed(reason))
    said = [text for text in caplog.messages if "does not take node 0 yet" in text]
    assert [text.rpartition(": ")[2] for text in said] == ["it is taken", "another reason"]
    assert not agent.connection.session.is_refused
