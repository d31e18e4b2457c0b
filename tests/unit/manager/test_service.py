"""Who may speak to the manager, and what is answered."""

from __future__ import annotations

import gc

import pytest

from taskd.config import LogConfig, ManagerConfig
from taskd.core import events
from taskd.manager.service import Service
from taskd.manager.sessions import Session
from taskd.testing.clock import FakeClock
from taskd.transport import base
from taskd.transport.memory import MemoryRouter
from taskd.wire import messages
from tests.unit.manager.peer import Peer, lost, recover, types


def test_a_heartbeat_is_answered_and_a_stranger_is_asked_to_register(
    service, network, agent
) -> None:
    agent.say(messages.Heartbeat())
    stranger = Peer(network, incarnation="a1", node_rank=1)
    stranger.say(messages.Heartbeat())
    service.turn()
    (known,), (unknown,) = agent.heard(), stranger.heard()
    assert known.known
    assert not unknown.known
    assert known.manager_incarnation == unknown.manager_incarnation


def test_an_agent_keeps_its_lease_by_heartbeats_and_loses_the_job_by_silence(
    service, agent, clock
) -> None:
    for _ in range(100):
        clock.advance(1.0)
        agent.say(messages.Heartbeat())
        service.turn()
    assert service.result is None
    for _ in range(100):
        clock.advance(1.0)
        service.turn()
    assert service.result is False


def test_the_job_ends_with_its_agents(service, agent) -> None:
    for rank in range(2):
        agent.report(events.WorkerFinished, rank, 0)
    agent.report(events.AgentLeft, 0, "succeeded", "")
    service.turn()
    assert service.result is True


def test_a_job_that_fails_says_so(service, agent) -> None:
    agent.report(events.AgentLeft, 0, "failed", "exit 1")
    service.turn()
    assert service.result is False


def test_a_second_agent_for_a_taken_position_is_refused(service, network, agent) -> None:
    second = Peer(network, incarnation="a1")
    second.register()
    service.turn()
    (refused,) = second.heard()
    assert "taken" in refused.reason
    assert refused.is_taken
    agent.say(messages.Heartbeat())
    service.turn()
    assert agent.heard()[0].known


@pytest.mark.parametrize("is_late", [True, False])
def test_what_an_agent_said_before_it_connected_anew_does_not_have_its_place(
    service, network, is_late
) -> None:
    """Its name had been handed over before the words of the former connection were read."""
    former = Peer(network, name=base.NAMELESS + b"1234")
    present = Peer(network)
    for peer in (present, former) if is_late else (former, present):
        peer.register(sequence=2 if peer is present else 1)
    service.turn()
    assert types(present.heard()) == [messages.Accepted]
    present.say(messages.Heartbeat())
    service.turn()
    assert present.heard()[0].known


def test_nor_do_the_last_words_of_a_spare_on_its_former_connection(tmp_path, network) -> None:
    log = LogConfig(tmp_path / "log")
    config = ManagerConfig("job", "", 30.0, None, log, strategies=("recover",), reschedule_s=9.0)
    service = Service(config, MemoryRouter(network, "manager"), FakeClock())
    for name in (base.NAMELESS + b"1234", None):
        spare = Peer(network, role="spare", node_rank=None, incarnation="s0", name=name)
        spare.report(events.SpareRegistered, "host", "name")
    service.turn()
    assert types(spare.heard()) == [messages.Accepted]


@pytest.mark.parametrize("role", ["agent", "worker"])
def test_another_jobs_processes_are_refused(service, network, role) -> None:
    stranger = Peer(network, role=role, rank=0, job_id="other")
    stranger.say(messages.RegisterWorker(0, 1, "pt"))
    service.turn()
    (refused,) = stranger.heard()
    assert "job" in refused.reason
    assert "other" in refused.reason
    assert not refused.is_taken


def test_a_sender_speaks_for_its_own_position_only(service, network, agent, lines) -> None:
    node1 = Peer(network, node_rank=1, incarnation="b0")
    node1.report(events.WorkerLost, *lost(0))  # never registered
    agent.report(events.WorkerLost, *lost(7))  # not its rank
    agent.report(events.AgentLeft, 1, "failed", "")  # not its node
    agent.report(events.AgentRegistered, 1, "a0", 1, 2, 3, 0, 0, ())  # registers somebody else
    agent.report(events.WorkerReady, 0, 0, True)  # not for a manager
    impostor = Peer(network, name="impostor")  # says it is the agent, from elsewhere
    impostor.report(events.WorkerLost, *lost(0), sequence=99)
    worker = Peer(network, role="worker", node_rank=0, rank=1)
    worker.report(events.WorkerLost, *lost(1))
    worker.say(messages.RegisterWorker(0, 1, "pt"))
    relay = Peer(network, role="relay", node_rank=None)
    relay.say(messages.Heartbeat())
    service.turn()
    assert service._machine.restarts_used == 0
    assert service._refusals.counts == {"foreign": 7, "malformed": 2}
    answered = agent.heard()
    assert [answer.type for answer in answered if isinstance(answer, messages.Rejected)] == [
        22,
        6,
        29,
    ]
    assert types(
        [
            answer
            for answer in answered
            if not isinstance(answer, messages.HeartbeatAck | messages.Rejected)
        ]
    ) == [messages.Refused]
    # register first; it is not told what was wrong
    assert types(impostor.heard()) == [messages.HeartbeatAck]
    assert types(node1.heard()) == [messages.HeartbeatAck]  # register first


def test_a_message_that_comes_twice_counts_once(service, agent) -> None:
    agent.report(events.WorkerLost, *lost(0))
    agent.report(events.WorkerLost, *lost(0), sequence=agent.envelope.sequence)
    agent.register(sequence=1)
    service.turn()
    assert service._machine.restarts_used == 1
    assert types(agent.heard()) == [messages.RestartGroup]


def test_a_restarted_manager_takes_over_from_the_registrations(service, network, tmp_path) -> None:
    peer = Peer(network)
    workers = tuple(events.WorkerReport(rank, 4, "running", True, 10) for rank in range(2))
    peer.report(events.AgentRegistered, 0, "a0", 1, 2, 5, 6, 3, workers)
    service.turn()
    (accepted,) = peer.heard()
    assert (accepted.generation, accepted.restarts_used) == (6, 3)


def test_an_order_that_does_not_get_through_makes_the_agent_register_again(
    service, network, agent
) -> None:
    agent.dealer.close()  # the connection breaks
    service._executor.feed(events.WorkerLost(0.0, "test", *lost(0)))
    agent.say(messages.Heartbeat())  # and comes back
    service.turn()
    (answer,) = agent.heard()
    assert not answer.known
    agent.register()
    service.turn()
    assert messages.RestartGroup in types(agent.heard())
    agent.say(messages.Heartbeat())
    service.turn()
    assert agent.heard()[0].known


@pytest.mark.parametrize("is_own", [True, False])
def test_a_broken_connection_makes_its_agent_register_again(
    service, agent, monkeypatch, is_own
) -> None:
    broken = {agent.dealer._identity if is_own else b"another"}
    monkeypatch.setattr(service._link, "take_disconnected", lambda: broken)
    service.turn()
    agent.say(messages.Heartbeat())
    monkeypatch.undo()
    service.turn()
    assert agent.heard()[0].known is not is_own


def test_a_worker_without_agent_is_known_and_the_newest_one_counts(service, network) -> None:
    first = Peer(network, role="worker", node_rank=0, rank=3)
    first.say(messages.RegisterWorker(3, 10, "pt"))
    first.say(messages.Heartbeat())
    service.turn()
    accepted, beat = first.heard()
    assert isinstance(accepted, messages.Accepted)
    assert beat.known
    second = Peer(network, role="worker", node_rank=0, rank=3, incarnation="a1")
    second.say(messages.RegisterWorker(3, 11, "pt"))
    first.say(messages.Heartbeat())
    second.say(messages.Heartbeat())
    service.turn()
    assert [message.known for message in first.heard()] == [False]
    assert second.heard()[1].known


def test_a_manager_that_nobody_joins_ends_with_a_reason(service, network, clock, lines) -> None:
    Peer(network).say(messages.Heartbeat())  # of somebody who is not registered
    service.turn()
    assert service.result is None
    clock.advance(1800.0)
    service.turn()
    assert service.result is False
    assert "the manager ends: nobody has joined it within" in lines.text


def test_a_manager_whose_starter_is_gone_ends_sooner(service, clock, lines) -> None:
    service._parent_pid = -1
    service.turn()
    clock.advance(299.0)
    service.turn()
    assert service.result is None
    clock.advance(1.0)
    service.turn()
    assert service.result is False
    assert "within 300 s of the end of the process that started it" in lines.text


def test_a_manager_that_was_joined_waits_for_ever(service, network, clock) -> None:
    worker = Peer(network, role="worker", rank=0)
    worker.say(messages.RegisterWorker(0, 1, "pt"))
    service.turn()
    service._parent_pid = -1
    for _ in range(3):
        clock.advance(3600.0)
        service.turn()
    assert service.result is None


def test_what_all_are_told_is_encoded_once(service, network, agent, monkeypatch) -> None:
    sent = []
    monkeypatch.setattr(service._link, "send", lambda peer, data: not sent.append((peer, data)))
    for name in (b"a", b"b"):
        service._sessions.agents[len(service._sessions.agents)] = Session(name, "a", 1, frozenset())
    service._executor.feed(events.WorkerLost(0.0, "test", *lost(0)))
    assert [peer for peer, _ in sent] == [agent.dealer._identity, b"a", b"b"]
    assert len({id(data) for _, data in sent}) == 1


def test_that_a_node_is_out_of_reach_is_said_once_until_it_is_back(
    service, agent, lines, monkeypatch
) -> None:
    monkeypatch.setattr(service._link, "send", lambda _peer, _data: False)
    service._executor.feed(events.WorkerLost(0.0, "test", *lost(0)))
    service._executor.set_profiling(1)
    service._executor.set_profiling(0)
    said = [text for text in lines.messages if "cannot be reached now" in text]
    assert len(said) == 1
    assert said[0].endswith(", and what follows, waits for it")


def join_others(service) -> None:
    """Agents of a large job."""
    for node_rank in range(1, 300):
        session = Session(b"%d" % node_rank, "a", 1, frozenset())
        service._sessions.agents[node_rank] = session


def test_no_search_for_garbage_falls_into_a_recovery_of_a_large_job(service, agent, clock) -> None:
    join_others(service)
    service.turn()
    frozen, searches = gc.get_freeze_count(), []

    def note(phase: str, _: dict[str, int]) -> None:
        searches.append(phase)

    gc.callbacks.append(note)
    try:
        recover(service, agent, clock)
        kept = [[number] for number in range(20_000)]  # what a larger one would have made
    finally:
        gc.callbacks.remove(note)
    assert searches == []
    service.turn()
    assert gc.get_freeze_count() >= frozen + len(kept), "nor will any search look at that again"


def test_of_thousands_not_each_heartbeat_is_answered(service, agent, clock) -> None:
    sessions = service._sessions.agents
    join_others(service)
    answers = []
    for _ in range(10):
        agent.say(messages.Heartbeat())
        service.turn()
        answers.append(len(agent.heard()))
        clock.advance(1.0)
    assert answers == [1, 0, 0, 1, 0, 0, 1, 0, 0, 1]  # the agent waits for 10 s
    sessions[0].is_doubtful = True
    agent.say(messages.Heartbeat())
    service.turn()
    assert not agent.heard()[0].known
