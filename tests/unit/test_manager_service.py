"""The manager's loop over a network in memory: who may speak, what is answered, what is written."""

from __future__ import annotations

import dataclasses
import json
import logging
from typing import TYPE_CHECKING

import msgpack
import pytest

from taskd import replay
from taskd.config import LogConfig, ManagerConfig
from taskd.core import commands, events
from taskd.core.commands import RecoveryRecord
from taskd.core.faults import Fault, FaultKind
from taskd.core.marks import Mark
from taskd.errors import InvalidTransition
from taskd.manager.records import Records
from taskd.manager.service import Service
from taskd.testing.clock import FakeClock
from taskd.transport.memory import MemoryDealer, MemoryNetwork, MemoryRouter
from taskd.wire import codec, messages, translate
from tests.unit import fuzz_manager

if TYPE_CHECKING:
    import pathlib


class Peer:
    """Something that connects and says what it is told to say."""

    def __init__(self, network: MemoryNetwork, *, role: str = "agent", node_rank: int | None = 0, rank: int | None = None,
                 job_id: str = "job", incarnation: str = "a0", name: str | None = None) -> None:
        self.dealer = MemoryDealer(network, "manager", name or f"{role}-{node_rank}-{rank}-{incarnation}")
        self.envelope = codec.Envelope(job_id, role, node_rank, rank, incarnation, 0, 0, "test")

    def say(self, message: messages.Message, **changes: object) -> None:
        self.envelope = dataclasses.replace(self.envelope, **{"sequence": self.envelope.sequence + 1, **changes})
        self.dealer.send(None, codec.encode(self.envelope, message))

    def report(self, event_class: type, *values: object, **changes: object) -> None:
        self.say(translate.event_to_message(event_class(0.0, "test", *values)), **changes)

    def register(self, ranks: range = range(2), *, nodes: int = 1, world: int = 2, **changes: object) -> None:
        workers = tuple(events.WorkerReport(rank, 0, "running") for rank in ranks)
        node_rank, incarnation = self.envelope.node_rank, self.envelope.incarnation
        self.report(events.AgentRegistered, node_rank, incarnation, nodes, world, 3, 0, 0, workers, **changes)

    def heard(self) -> list[messages.Message]:
        return [codec.decode(data)[1] for _, data in self.dealer.receive()]


@pytest.fixture
def network() -> MemoryNetwork:
    return MemoryNetwork()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def service(network: MemoryNetwork, clock: FakeClock, tmp_path: pathlib.Path) -> Service:
    config = ManagerConfig("job", "unused", 30.0, None, LogConfig(tmp_path / "log"))
    return Service(config, MemoryRouter(network, "manager"), clock)


@pytest.fixture
def agent(network: MemoryNetwork, service: Service) -> Peer:
    peer = Peer(network)
    peer.register()
    service.turn()
    assert [type(message) for message in peer.heard()] == [messages.Accepted]
    return peer


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    logger = logging.getLogger("taskd")
    logger.propagate = True
    caplog.set_level(logging.INFO, "taskd")
    return caplog


def lost(rank: int, incarnation: int = 0) -> tuple:
    return rank, incarnation, Fault(FaultKind.KILLED, rank, incarnation, "SIGKILL", signature="SIGKILL", exit_code=-9), 0.25


def types(heard: list[messages.Message]) -> list[type]:
    return [type(message) for message in heard]


def test_a_heartbeat_is_answered_and_a_stranger_is_asked_to_register(service, network, agent) -> None:
    agent.say(messages.Heartbeat())
    stranger = Peer(network, incarnation="a1", node_rank=1)
    stranger.say(messages.Heartbeat())
    service.turn()
    (known,), (unknown,) = agent.heard(), stranger.heard()
    assert known.known
    assert not unknown.known
    assert known.manager_incarnation == unknown.manager_incarnation


def test_an_agent_keeps_its_lease_by_heartbeats_and_loses_the_job_by_silence(service, agent, clock) -> None:
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
    agent.say(messages.Heartbeat())
    service.turn()
    assert agent.heard()[0].known


@pytest.mark.parametrize("role", ["agent", "worker"])
def test_another_jobs_processes_are_refused(service, network, role) -> None:
    stranger = Peer(network, role=role, rank=0, job_id="other")
    stranger.say(messages.RegisterWorker(0, 1, "pt"))
    service.turn()
    (refused,) = stranger.heard()
    assert "job" in refused.reason
    assert "other" in refused.reason


def test_a_sender_speaks_for_its_own_position_only(service, network, agent, lines) -> None:
    node1 = Peer(network, node_rank=1, incarnation="b0")
    node1.report(events.WorkerLost, *lost(0))                          # never registered
    agent.report(events.WorkerLost, *lost(7))                          # not its rank
    agent.report(events.AgentLeft, 1, "failed", "")                    # not its node
    agent.report(events.AgentRegistered, 1, "a0", 1, 2, 3, 0, 0, ())   # registers somebody else
    agent.report(events.WorkerReady, 0, 0, True)                       # not for a manager
    impostor = Peer(network, name="impostor")                          # says it is the agent, from elsewhere
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
    assert [answer.type for answer in answered if isinstance(answer, messages.Rejected)] == [22, 6, 29]
    assert types([answer for answer in answered if not isinstance(answer, messages.HeartbeatAck | messages.Rejected)]) == [messages.Refused]
    assert types(impostor.heard()) == [messages.HeartbeatAck]          # register first; it is not told what was wrong
    assert types(node1.heard()) == [messages.HeartbeatAck]             # register first


def test_a_message_that_comes_twice_counts_once(service, agent) -> None:
    agent.report(events.WorkerLost, *lost(0))
    agent.report(events.WorkerLost, *lost(0), sequence=agent.envelope.sequence)
    agent.register(sequence=1)
    service.turn()
    assert service._machine.restarts_used == 1
    assert types(agent.heard()) == [messages.RestartGroup]


def test_what_cannot_be_read_is_refused_counted_and_logged_once(service, network, lines) -> None:
    stranger = MemoryDealer(network, "manager", "stranger")
    for number in range(25):
        stranger.send(None, bytes([number]) * number)
    stranger.send(None, bytes(codec.MAX_MESSAGE_BYTES + 1))
    service.turn()
    assert service._refusals.counts == {"malformed": 25, "size": 1}
    said = [record.message for record in lines.records if "refused a message of stranger" in record.message]
    assert len(said) == 2
    assert any("refused so far: malformed 10" in record.message for record in lines.records)
    assert service._refusals.summary() == "malformed 25, size 1"


def test_an_unknown_type_is_answered(service, agent, monkeypatch) -> None:
    monkeypatch.setattr(messages.Release, "code", 999)
    agent.say(messages.Release(0))
    service.turn()
    assert agent.heard() == [messages.Unsupported(999)]


def stumble(event):
    raise RuntimeError("a bug")


def test_what_the_machine_cannot_digest_costs_one_message_and_the_manager_begins_anew(
        service, agent, monkeypatch, lines, tmp_path) -> None:
    agent.report(events.WorkerDeclared, 0, 0, True)
    service.turn()
    machine, before = service._machine, service._incarnation
    monkeypatch.setattr(machine, "handle", stumble)
    agent.report(events.WorkerDeclared, 1, 0)
    service.turn()
    (rejected,) = agent.heard()
    assert (type(rejected), rejected.type, rejected.sequence) == (messages.Rejected, 21, agent.envelope.sequence)
    text = "\n".join(record.message for record in lines.records if record.levelno == logging.ERROR)
    assert "a bug in taskd" in text
    assert "WorkerDeclared cause=test rank=0" in text          # the story, up to there
    assert "the manager begins anew: nodes [0]" in text
    assert (tmp_path / "log" / "story-0.jsonl").exists()
    agent.say(messages.Heartbeat())
    service.turn()
    assert not agent.heard()[0].known
    workers = tuple(events.WorkerReport(rank, 2, "running", True, 10) for rank in range(2))
    agent.report(events.AgentRegistered, 0, "a0", 1, 2, 5, 6, 3, workers)
    service.turn()
    (accepted,) = agent.heard()
    assert (accepted.generation, accepted.restarts_used) == (6, 3)
    assert accepted.manager_incarnation != before
    assert service._machine is not machine
    service._machine.check()


def test_a_deadline_that_the_machine_cannot_meet_does_not_end_the_manager(service, agent, clock, monkeypatch, lines) -> None:
    """The machine raised in `Tick`, outside of what was guarded: that was the end of the manager."""
    machine, real = service._machine, service._machine.handle
    monkeypatch.setattr(machine, "handle", lambda event: stumble(event) if isinstance(event, events.Tick) else real(event))
    clock.advance(31.0)
    service.turn()
    assert "what a deadline asks for was dropped" in "\n".join(record.message for record in lines.records)
    assert service._machine is not machine
    agent.register()
    service.turn()
    assert types(agent.heard()) == [messages.Accepted]
    assert service.result is None


def test_a_node_that_is_gone_when_the_manager_begins_anew_is_lost_after_a_lease(service, agent, clock, monkeypatch, lines) -> None:
    monkeypatch.setattr(service._machine, "handle", stumble)
    agent.say(messages.Heartbeat())
    service.turn()
    for _ in range(40):
        clock.advance(1.0)
        service.turn()
    assert service.result is False
    assert "node 0 has been silent" in "\n".join(record.message for record in lines.records)


def test_a_node_whose_messages_make_the_manager_fail_again_and_again_is_refused(service, network, agent, monkeypatch) -> None:
    for _ in range(3):
        monkeypatch.setattr(service._machine, "handle", stumble)
        agent.register()
        service.turn()
    agent.heard()
    agent.register()
    service.turn()
    (refused,) = agent.heard()
    assert "made the manager fail" in refused.reason
    other = Peer(network, node_rank=1, incarnation="b0")
    other.register(range(2, 4), nodes=2, world=4)
    service.turn()
    assert types(other.heard()) == [messages.Accepted]


def test_an_event_without_a_rule_changes_nothing_and_costs_one_message(service, agent, monkeypatch, lines) -> None:
    def lacking(event):
        raise InvalidTransition("no rule")

    machine = service._machine
    monkeypatch.setattr(machine, "handle", lacking)
    agent.report(events.WorkerDeclared, 0, 0)
    service.turn()
    monkeypatch.undo()
    assert types(agent.heard()) == [messages.Rejected]
    assert service._machine is machine
    agent.say(messages.Heartbeat())
    service.turn()
    assert agent.heard()[0].known


def malformed(peer: Peer, message: messages.Message, **changes: object) -> None:
    """The message with a body that breaks a rule."""
    peer.envelope = dataclasses.replace(peer.envelope, sequence=peer.envelope.sequence + 1)
    frame = msgpack.unpackb(codec.encode(peer.envelope, message))
    peer.dealer.send(None, msgpack.packb({**frame, "body": {**frame["body"], **changes}}))


def test_a_registration_with_an_unknown_state_changes_nothing_and_silence_after_it_does_not_end_the_manager(service, network, clock) -> None:
    """The state was looked up in the middle of the registration; the node without members then raised when its lease ran out."""
    peer = Peer(network)
    workers = (events.WorkerReport(0, 0, "running"), events.WorkerReport(1, 0, "running"))
    message = messages.AgentRegistered(0, "a0", 1, 2, 3, 0, 0, workers)
    zombies = [{"rank": rank, "incarnation": 0, "state": "zombie"} for rank in range(2)]
    malformed(peer, message, workers=zombies)
    service.turn()
    (refused,) = peer.heard()
    assert type(refused) is messages.Refused
    assert "WorkerState" in refused.reason
    assert (service._machine.membership.nodes, service._sessions.agents) == ({}, {})
    for _ in range(5):
        clock.advance(30.0)
        service.turn()
    assert service.result is None
    peer.register()
    service.turn()
    assert types(peer.heard()) == [messages.Accepted]


def test_a_report_that_breaks_a_rule_is_a_sign_of_life_and_is_answered(service, agent, clock) -> None:
    """It was silence: the agent, which heard nothing, took the manager for gone, and the manager the node."""
    for _ in range(100):
        clock.advance(1.0)
        malformed(agent, messages.Heartbeat((Mark(0, 0, 0, 5, "step", 0.0),)), marks=[[0, 0, -7, 5, "step", 0.0, 0, 0, "", False, 0, 0, 0, [], []]])
        service.turn()
        ack, rejected = agent.heard()
        assert ack.known
        assert (type(rejected), rejected.type, rejected.sequence) == (messages.Rejected, 4, agent.envelope.sequence)
    assert service.result is None
    assert service._refusals.counts == {"malformed": 100}


def test_what_breaks_a_rule_renews_nobodys_lease_from_elsewhere(service, network, agent, clock) -> None:
    impostor = Peer(network, name="impostor")
    for _ in range(40):
        clock.advance(1.0)
        malformed(impostor, messages.Heartbeat(), marks=5)
        service.turn()
    assert impostor.heard() == []
    assert service.result is False


def test_records_hold_whatever_a_text_may_be(service, agent, tmp_path) -> None:
    odd = "a\udcff\0\x1b[2J\u2028" + "x" * 1_000_000
    service._records.story(3, [odd])
    fault = Fault(FaultKind.RAISED, 0, 0, odd, 5, odd, odd, odd)
    values = {field.name: 0 for field in dataclasses.fields(RecoveryRecord)}
    record = RecoveryRecord(**{**values, "strategy": "retry", "faults": (fault,), "version": 5, "sources": ((0, odd),), "total_s": float("nan")})
    service._records.recovery(record)
    (line,) = (tmp_path / "log" / "recoveries.jsonl").read_text().splitlines()
    assert json.loads(line)["faults"][0]["detail"] == odd
    assert (tmp_path / "log" / "story-3.jsonl").exists()
    assert not service._records._is_failed


def test_the_time_of_a_record_is_that_of_the_clock_it_was_given(tmp_path) -> None:
    values = {field.name: 0 for field in dataclasses.fields(RecoveryRecord)}
    record = RecoveryRecord(**{**values, "strategy": "retry", "faults": (), "sources": ()})
    Records(tmp_path, "job", wall_time=lambda: 1234.5).recovery(record)
    assert json.loads((tmp_path / "recoveries.jsonl").read_text())["time"] == 1234.5


def recover(service: Service, agent: Peer, clock: FakeClock) -> None:
    """Rank 1 of two declared ones dies and comes back."""
    for rank in range(2):
        agent.report(events.WorkerDeclared, rank, 0)
    agent.report(events.WorkerLost, *lost(1))
    service.turn()
    assert set(types(agent.heard())) == {messages.Interrupt, messages.ReplaceWorker}
    clock.advance(0.1)
    agent.report(events.WorkerPaused, 0, 0, 1, 7, True, "")
    agent.report(events.WorkerStarted, 1, 1, 4711)
    agent.report(events.WorkerPaused, 1, 1, 1, None, True, "")
    service.turn()
    (resume,) = agent.heard()
    assert (resume.version, resume.generation) == (7, 1)
    clock.advance(0.2)
    for rank, incarnation in ((0, 0), (1, 1)):
        agent.report(events.WorkerRecovered, rank, incarnation, 1, 8, 0.05, 0.04, 0.03, "")
    service.turn()


def test_a_recovery_leaves_a_line_a_record_and_a_story(service, agent, clock, lines, tmp_path) -> None:
    recover(service, agent, clock)
    (line,) = [record.message for record in lines.records if record.message.startswith("recovered")]
    for part in ("recover-in-place", "rank 1", "SIGKILL", "generation 1", "version 7", "rank 0 kept", "rank 1 from rank 0",
                 "0 steps redone", "quiesce 0.100", "restarts 1 of 3", "0.550 s"):
        assert part in line, (part, line)
    (record,) = [json.loads(text) for text in (tmp_path / "log" / "recoveries.jsonl").read_text().splitlines()]
    assert (record["job_id"], record["generation"], record["steps_redone"], record["faults"][0]["detail"]) == ("job", 1, 0, "SIGKILL")
    story = tmp_path / "log" / "story-1.jsonl"
    machine, entries = replay.load_lines(story.read_text().splitlines())
    assert replay.replay(machine, entries) == []


class TestTheLevelOfTheLine:
    """INFO: nothing is lost. WARNING: nobody knows. ERROR: committed steps are."""

    def level(self, service, lines, **fields) -> tuple[str, str]:
        fault = Fault(FaultKind.KILLED, 1, 0, "SIGKILL", version=fields.pop("fault_version", 40))
        record = commands.RecoveryRecord(
            **{"generation": 3, "strategy": "recover-in-place", "faults": (fault,), "followers": 0, "version": 40, "sources": (), "steps_redone": 0,
               **dict.fromkeys((f"{name}_s" for name in ("detect", "decide", "quiesce", "respawn", "groups", "state", "first_step", "total")), 0.1),
               "restarts_used": 1, "max_restarts": 3} | fields)
        service._records.recovery(record)
        line = next(line for line in lines.records if "recovered" in line.message)
        return line.levelname, line.message

    def test_nothing_was_lost(self, service, lines) -> None:
        assert self.level(service, lines)[0] == "INFO"

    def test_a_step_that_only_the_dead_had(self, service, lines) -> None:
        level, text = self.level(service, lines, steps_redone=1)
        assert (level, text.rpartition(". ")[2]) == ("ERROR", "Committed steps were lost and are done again")

    def test_a_restart_that_goes_back(self, service, lines) -> None:
        level, text = self.level(service, lines, strategy="restart", version=None, steps_redone=128)
        assert level == "ERROR"
        assert "at most 128 steps redone, from the newest checkpoint on" in text

    def test_a_restart_of_a_script_whose_steps_are_not_known(self, service, lines) -> None:
        assert self.level(service, lines, strategy="restart", version=None, fault_version=None)[0] == "WARNING"

    def test_a_restart_before_the_first_step(self, service, lines) -> None:
        assert self.level(service, lines, strategy="restart", version=None, fault_version=0)[0] == "INFO"

    def test_one_that_was_not_completed_says_what_came_before(self, service, lines) -> None:
        why = "before every rank had made a new step, rank 1 raised ValueError: x at step 40"
        _, text = self.level(service, lines, strategy="retry", reason="every process is alive", not_completed=why)
        assert text.startswith(f"not recovered ({why}) by retry (every process is alive): rank 1 killed (SIGKILL) in step 40; generation 3;")


def test_agents_that_went_on_alone_end_the_manager_and_not_the_job(service, agent, lines) -> None:
    agent.say(messages.AgentLeft(0, "fallback", "rank 1 ended, and no manager answers"))
    service.turn()
    assert service.result is True
    (line,) = [record for record in lines.records if record.levelname == "WARNING"]
    assert line.message.startswith("this manager ends: the agent of node 0 left (fallback: rank 1 ended, and no manager answers)")


def test_a_job_that_gets_no_further_is_told_of(service, lines) -> None:
    service._execute(commands.ReportNoProgress("cause", 3, "no new step in 3 recoveries"))
    (line,) = [record for record in lines.records if record.levelname == "WARNING"]
    assert line.message.startswith("the job gets no further: no new step in 3 recoveries.")


def test_a_log_directory_that_cannot_be_written_costs_one_warning(service, agent, clock, lines, tmp_path) -> None:
    (tmp_path / "log").write_text("a file is in the way")
    recover(service, agent, clock)
    assert len([record for record in lines.records if "cannot be written" in record.message]) == 1
    agent.say(messages.Heartbeat())
    service.turn()
    assert agent.heard()[0].known


def test_old_stories_are_removed(service, tmp_path) -> None:
    for generation in range(25):
        service._records.story(generation, ["x"])
    assert len(list((tmp_path / "log").glob("story-*"))) == 20
    assert (tmp_path / "log" / "story-24.jsonl").exists()


def test_a_restarted_manager_takes_over_from_the_registrations(service, network, tmp_path) -> None:
    peer = Peer(network)
    workers = tuple(events.WorkerReport(rank, 4, "running", True, 10) for rank in range(2))
    peer.report(events.AgentRegistered, 0, "a0", 1, 2, 5, 6, 3, workers)
    service.turn()
    (accepted,) = peer.heard()
    assert (accepted.generation, accepted.restarts_used) == (6, 3)


def test_an_order_that_does_not_get_through_makes_the_agent_register_again(service, network, agent) -> None:
    agent.dealer.close()                                               # the connection breaks
    service._feed(events.WorkerLost(0.0, "test", *lost(0)))
    agent.say(messages.Heartbeat())                                    # and comes back
    service.turn()
    (answer,) = agent.heard()
    assert not answer.known
    agent.register()
    service.turn()
    assert messages.RestartGroup in types(agent.heard())
    agent.say(messages.Heartbeat())
    service.turn()
    assert agent.heard()[0].known


def test_a_broken_connection_makes_every_agent_register_again(service, agent, monkeypatch) -> None:
    monkeypatch.setattr(service._link, "take_disconnects", lambda: 1)
    service.turn()
    agent.say(messages.Heartbeat())
    monkeypatch.undo()
    service.turn()
    assert not agent.heard()[0].known


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


def test_giving_up_shows_the_cause_with_its_traceback(service, agent, lines) -> None:
    for attempt, incarnation in enumerate((0, 0, 1)):
        fault = Fault(FaultKind.RAISED, 0, incarnation, "ValueError: bad", 5, "step", "ValueError: bad", "Traceback\n  line 7\nValueError: bad")
        agent.report(events.WorkerRaised, 0, incarnation, attempt, fault, True, 0.0)
        service.turn()
        if attempt == 1:                       # its cause may be on the way
            service._clock.advance(2.0)
            service.turn()
        agent.report(events.WorkerPaused, 1, 0, attempt + 1, 5, True, "")
        agent.report(events.WorkerPaused, 0, 1, attempt + 1, None, True, "")
        service.turn()
        for _ in range(5):
            service._clock.advance(1.0)
            agent.say(messages.Heartbeat())
            service.turn()
    assert messages.GiveUp in types(agent.heard())
    text = "\n".join(record.message for record in lines.records if record.levelno == logging.ERROR)
    assert "the job is given up" in text
    assert "  line 7" in text


def test_odd_values_in_messages_of_every_type_end_no_manager_and_a_stranger_s_hurt_no_job() -> None:
    assert fuzz_manager.main(3000, seed=20240607) == 0
