"""A position is spoken for by the one agent that has it, whatever a stranger knows of it."""

from __future__ import annotations

import dataclasses
import threading
import time

import pytest

from taskd.agent.link.connection import ManagerConnection
from taskd.clock import MonotonicClock
from taskd.config import LogConfig, ManagerConfig
from taskd.core import events
from taskd.core.timeouts import Timeouts
from taskd.errors import TaskdError
from taskd.manager.service import Service
from taskd.manager.sessions import Session, Sessions, show_peer
from taskd.transport import zeromq
from taskd.transport.memory import MemoryRouter
from taskd.wire import codec, messages, translate
from tests.unit.manager.peer import Peer, lost, types


@pytest.fixture
def impostor(network, agent) -> Peer:
    """Knows all of the agent but the name under which that is connected."""
    made = Peer(network, name="impostor")
    made.envelope = dataclasses.replace(agent.envelope, sequence=10)
    return made


def test_a_refusal_tells_nothing_that_helps_to_take_the_position(service, network, agent) -> None:
    rival = Peer(network, incarnation="a1")
    rival.register()
    foreigner = Peer(network, node_rank=1, job_id="other")
    foreigner.say(messages.Heartbeat())
    frame = codec.encode(rival.envelope, messages.Heartbeat())
    rival.dealer.send(None, frame.replace(b"\xa4type\x04", b"\xa4type\x7f"))
    foreigner.dealer.send(
        None, frame.replace(b"\xa4type\x04", b"\xa4type\x7f").replace(b"\xa3job", b"\xa3jib")
    )
    service.turn()
    (taken, _) = rival.heard()
    assert "node 0 is taken" in taken.reason
    assert "a0" not in taken.reason
    for _, data in foreigner.dealer.receive():
        assert b"\xa3job" not in data


def test_an_incarnation_is_taken_from_the_one_that_has_it_only(service, agent, impostor) -> None:
    impostor.register()
    impostor.report(events.AgentLeft, 0, "failed", "I say so")
    impostor.report(events.WorkerLost, *lost(0))
    service.turn()
    assert types(impostor.heard()) == [
        messages.Refused,
        messages.HeartbeatAck,
        messages.HeartbeatAck,
    ]
    assert (service.result, service._machine.restarts_used) == (None, 0)
    agent.say(messages.Heartbeat())
    service.turn()
    assert [message.known for message in agent.heard()] == [True]


def test_nor_when_the_agent_has_gone_or_the_machine_has_begun_anew(
    service, agent, impostor
) -> None:
    service._guarded._is_in_doubt = True
    with service._guarded.surviving("a test"):
        raise TaskdError("a test")
    impostor.register()
    agent.say(messages.Heartbeat())
    service.turn()
    assert types(impostor.heard()) == [messages.Refused]
    (answer,) = agent.heard()
    assert not answer.known
    agent.register()
    service.turn()
    assert types(agent.heard()) == [messages.Accepted]


def test_a_manager_that_is_restarted_learns_again_who_is_who(
    service, network, clock, agent, tmp_path
) -> None:
    service._link.close()
    config = ManagerConfig("job", "unused", 30.0, None, LogConfig(tmp_path / "log"))
    later = Service(config, MemoryRouter(network, "manager"), clock)
    agent.say(messages.Heartbeat())
    later.turn()
    assert [message.known for message in agent.heard()] == [False]
    agent.register()
    impostor = Peer(network, name="impostor")
    impostor.register(sequence=99)
    later.turn()
    assert types(agent.heard()) == [messages.Accepted]
    assert types(impostor.heard()) == [messages.Refused]


def test_a_number_far_ahead_is_refused_and_costs_nobody_the_job(service, agent) -> None:
    agent.say(messages.Heartbeat(), sequence=2**62)
    service.turn()
    answers = agent.heard()
    assert types(answers) == [messages.HeartbeatAck, messages.Rejected]
    assert not answers[0].known  # it may register, as after anything else that went wrong
    assert service._refusals.counts == {"malformed": 1}
    agent.envelope = dataclasses.replace(agent.envelope, sequence=100)
    agent.register()
    agent.say(messages.Heartbeat())
    service.turn()
    assert [message.known for message in agent.heard()[1:]] == [True]


def test_an_agent_s_name_on_the_wire_is_its_own_and_stands_in_no_log(clock) -> None:
    names = set()
    for _ in range(2):
        connection = ManagerConnection(
            "127.0.0.1:1", None, clock, Timeouts.derive(30.0),
            job_id="job", role="agent", node_rank=0, incarnation="a0", register=lambda: None,
        )  # fmt: skip
        before = connection._identity
        connection.redirect("127.0.0.1:2")
        assert connection._identity == before
        names.add(before)
        assert show_peer(before.encode()) == "agent-0-a0"
        assert len(before) >= len("agent-0-a0") + 32
        connection.close()
    assert len(names) == 2


@pytest.mark.parametrize("secret", [None, b"0123456789abcdef"])
def test_nobody_takes_over_a_connection_by_what_others_are_told(
    tmp_path, secret: bytes | None
) -> None:
    """Node, incarnation, job and secret are known to every agent of the job, and more."""
    config = ManagerConfig("job", "unused", 30.0, secret, LogConfig(tmp_path / "log"))
    service = Service(config, zeromq.Router("127.0.0.1:0", secret=secret))
    address = service._link.address
    manager = threading.Thread(target=service.run)
    manager.start()
    workers = (events.WorkerReport(0, 0, "running"),)
    event = events.AgentRegistered(0.0, "test", 0, "a0", 1, 1, 0, 0, 0, workers)
    agent = ManagerConnection(
        address, secret, MonotonicClock(), Timeouts.derive(30.0), job_id="job", role="agent",
        node_rank=0, incarnation="a0",
        register=lambda: agent.send(translate.event_to_message(event), "test"),
    )  # fmt: skip
    deadline = time.monotonic() + 20

    def wait_until(fact) -> None:
        while not fact():
            assert time.monotonic() < deadline, "it has not happened"
            agent.poll(0.02)
            list(agent.turn())

    wait_until(lambda: agent.session.is_registered)
    impostor = zeromq.Dealer(address, "agent-0-a0", secret=secret)
    answers: list[messages.Message] = []
    forged = (translate.event_to_message(event), messages.AgentLeft(0, "failed", ""))
    for sequence, message in enumerate(forged, 50):
        envelope = codec.Envelope("job", "agent", 0, None, "a0", 0, sequence, "test")
        impostor.send(None, codec.encode(envelope, message))

    def has_answers() -> bool:
        answers.extend(codec.decode(data)[1] for _, data in impostor.receive())
        return len(answers) == 2

    wait_until(has_answers)
    assert types(answers) == [messages.Refused, messages.HeartbeatAck]
    known: list[bool] = []
    acknowledged = agent.session.acknowledged
    agent.session.acknowledged = lambda **said: (
        known.append(said["is_known"])
        or acknowledged(  # type: ignore[method-assign]
            **said
        )
    )
    list(agent.beat())
    wait_until(lambda: known)
    assert known == [True]
    assert service.result is None
    agent.send(messages.AgentLeft(0, "succeeded", ""), "test")
    manager.join(20)
    assert service.result is True
    agent.close()
    impostor.close()


def test_who_asks_for_a_held_place_again_and_again_is_told_of_once_for_each_holder() -> None:
    """Anybody may ask, under a new name each time: the log stays readable."""
    sessions = Sessions()
    sessions.accept(1, Session(b"first", "one", 0, frozenset({2, 3})))
    assert [sessions.notes_waiting(1) for _ in range(3)] == [True, False, False]
    sessions.accept(1, Session(b"second", "two", 0, frozenset({2, 3})))
    assert sessions.notes_waiting(1)
