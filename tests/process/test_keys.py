"""What a holder of the secret can do to others: he has all that they have but their own keys.

A manager in a thread, agents and impostors on real sockets.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from typing import TYPE_CHECKING

import pytest

from taskd.agent.clients.relay import Relay
from taskd.agent.link.connection import ManagerConnection
from taskd.clock import MonotonicClock
from taskd.config import LogConfig, ManagerConfig, RelayConfig
from taskd.core import events
from taskd.core.timeouts import Timeouts
from taskd.manager.service import Service
from taskd.transport import zeromq
from taskd.wire import codec, messages, translate

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Callable, Iterator

SECRET = b"0123456789abcdef"
LIMIT_S = 60.0


def registration(incarnation: str = "a0") -> messages.Message:
    workers = (events.WorkerReport(0, 0, "running"),)
    event = events.AgentRegistered(0.0, "test", 0, incarnation, 1, 1, 0, 0, 0, workers)
    return translate.event_to_message(event)


class Agent:
    """Of node 0, with what `taskd.agent` has for its connection."""

    def __init__(self, address: str, secret: bytes | None = SECRET, incarnation: str = "a0"):
        self.known: list[bool] = []  # what its heartbeats were answered
        self.accepted = 0
        self.connection = ManagerConnection(
            # however long the test stands still, the manager is not taken for lost
            address, secret, MonotonicClock(), Timeouts.derive(3600.0), job_id="job", role="agent",
            node_rank=0, incarnation=incarnation,
            register=lambda: self.connection.send(registration(incarnation), "test"),
        )  # fmt: skip
        acknowledged = self.connection.session.acknowledged

        def note(**said: object) -> bool:
            self.known.append(bool(said["is_known"]))
            return acknowledged(**said)  # type: ignore[arg-type]

        self.connection.session.acknowledged = note  # type: ignore[method-assign]

    def until(self, fact: Callable[[], object]) -> None:
        """Go on as an agent does until it is so."""
        deadline = time.monotonic() + LIMIT_S
        while not fact():
            assert time.monotonic() < deadline, "it has not happened"
            self.connection.poll(0.02)
            self.accepted += sum(
                isinstance(event, events.ManagerJoined) for event in self.connection.turn()
            )

    def join(self) -> None:
        """Until all is answered that it has asked: once a second, while it is not accepted."""
        self.until(lambda: self.accepted)
        self.beats()
        self.accepted = 1

    def beats(self) -> list[bool]:
        """What the manager answers to three heartbeats from now on."""
        self.known.clear()
        for count in (1, 2, 3):
            list(self.connection.beat())
            self.until(lambda: len(self.known) >= count)  # noqa: B023
        return self.known[:3]


class Impostor:
    """Another holder of the secret, with the agent's name on the wire and all that it says."""

    def __init__(self, address: str, name: str, secret: bytes | None = SECRET) -> None:
        self.dealer = zeromq.Dealer(address, name, secret=secret)
        self.sequence = 50
        self.heard: list[messages.Message] = []

    def say(self, message: messages.Message, incarnation: str = "a0") -> None:
        self.sequence += 1
        envelope = codec.Envelope("job", "agent", 0, None, incarnation, 0, self.sequence, "test")
        self.dealer.send(None, codec.encode(envelope, message))

    def listen(self) -> list[messages.Message]:
        self.dealer.poll(0.0)
        self.heard += [codec.decode(data)[1] for _, data in self.dealer.receive()]
        return self.heard


@pytest.fixture
def manager(tmp_path: pathlib.Path) -> Iterator[Callable[..., Service]]:
    """Starts managers, one after the other."""
    with contextlib.ExitStack() as stack:

        def start(address: str = "127.0.0.1:0", secret: bytes | None = SECRET) -> Service:
            config = ManagerConfig("job", "unused", 30.0, secret, LogConfig(tmp_path / "log"))
            service = Service(config, zeromq.Router(address, secret=secret))
            thread = threading.Thread(target=service.run, name=service._link.address)
            thread.start()
            stack.callback(stop, service, thread)
            return service

        yield start


def stop(service: Service, thread: threading.Thread) -> None:
    service._executor.result = True
    thread.join(LIMIT_S)
    assert not thread.is_alive()


@pytest.fixture
def closing() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.fixture
def attacked(manager, closing):
    """A manager, the agent that has joined it, and who connects under the name of that."""
    service = manager()
    agent = Agent(service._link.address)
    closing.callback(agent.connection.close)
    agent.join()
    impostor = Impostor(service._link.address, agent.connection._identity)
    closing.callback(impostor.dealer.close)
    return service, agent, impostor


def test_another_holder_of_the_secret_does_not_speak_for_a_position_whatever_name_he_presents(
    attacked,
) -> None:
    """He knows node, incarnation, job, secret, and the whole name under which the agent speaks."""
    service, agent, impostor = attacked
    for message in (registration(), messages.AgentLeft(0, "failed", ""), messages.Heartbeat()):
        impostor.say(message)
    agent.until(lambda: len(impostor.listen()) >= 3)
    assert [type(answer) for answer in impostor.heard[:3]] == [
        messages.Refused,
        messages.HeartbeatAck,
        messages.HeartbeatAck,
    ]
    assert [answer.known for answer in impostor.heard[1:3]] == [False, False]
    # nor does he take the agent's connection from it, or what is said to it
    assert agent.beats() == [True, True, True]
    assert service.result is None
    assert len(impostor.listen()) == 3
    agent.connection.send(messages.AgentLeft(0, "succeeded", ""), "test")
    agent.until(lambda: service.result is not None)
    assert service.result is True


def test_a_new_incarnation_under_the_same_name_waits_until_the_position_is_free(
    attacked,
) -> None:
    _, agent, impostor = attacked
    impostor.say(registration("a1"), incarnation="a1")
    agent.until(impostor.listen)
    (answer,) = impostor.heard
    assert isinstance(answer, messages.Refused)
    assert "taken" in answer.reason
    assert agent.beats() == [True, True, True]


def test_an_agent_keeps_its_key_when_the_manager_is_restarted_and_the_first_one_binds(
    manager, closing
) -> None:
    first = manager()
    address = first._link.address
    agent = Agent(address)
    closing.callback(agent.connection.close)
    agent.join()
    key = first._sessions.holders[0].peer
    first._executor.result = True
    agent.until(lambda: address not in {thread.name for thread in threading.enumerate()})
    second = manager(address)
    agent.until(lambda: agent.accepted >= 2)
    assert second._sessions.holders[0].peer == key
    impostor = Impostor(address, agent.connection._identity)
    closing.callback(impostor.dealer.close)
    impostor.say(registration())
    agent.until(impostor.listen)
    assert isinstance(impostor.heard[0], messages.Refused)
    assert agent.beats() == [True, True, True]


def test_an_agent_that_is_started_again_has_another_key(manager, closing) -> None:
    service = manager()
    keys = []
    for incarnation in ("a0", "a1"):
        agent = Agent(service._link.address, incarnation=incarnation)
        agent.join()
        keys.append(service._sessions.holders[0].peer)
        if incarnation == "a0":  # its node is lost, as far as the manager can tell
            agent.connection.close()
            service._guarded.machine.membership.nodes.clear()
        else:
            closing.callback(agent.connection.close)
    assert keys[0].rpartition(b".")[2] != keys[1].rpartition(b".")[2]


def test_a_client_of_a_relay_keeps_its_position_when_the_relay_is_started_again(
    manager, closing
) -> None:
    """The manager knows it by the relay's key for it, which has to be the same then."""
    service = manager()
    config = RelayConfig("127.0.0.1:0", service._link.address, 0, SECRET)
    relay = Relay(config, MonotonicClock())
    relay.start()
    address = relay.address
    agent = Agent(address)
    closing.callback(agent.connection.close)
    agent.join()
    known = service._sessions.holders[0].peer
    relay.close()
    later = Relay(dataclasses.replace(config, listen_address=address), MonotonicClock())
    later.start()
    closing.callback(later.close)
    agent.until(lambda: agent.accepted >= 2)  # what was on its way may have been lost
    assert agent.beats() == [True, True, True]
    assert service._sessions.holders[0].peer == known
    direct = Impostor(service._link.address, agent.connection._identity)
    closing.callback(direct.dealer.close)
    direct.say(registration())
    agent.until(direct.listen)
    assert isinstance(direct.heard[0], messages.Refused)
