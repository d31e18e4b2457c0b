"""What no machine can digest, and what breaks the rules: it costs a message, and no job."""

from __future__ import annotations

import dataclasses
import json
import logging
import random

import msgpack

from taskd.core import events
from taskd.core.commands import RecoveryRecord
from taskd.core.faults import Fault, FaultKind
from taskd.core.marks import Mark
from taskd.errors import InvalidTransition
from taskd.transport.memory import MemoryDealer
from taskd.wire import codec, messages
from tests.unit import fuzz_manager
from tests.unit.manager.peer import Peer, types


def test_what_cannot_be_read_is_refused_counted_and_logged_once(service, network, lines) -> None:
    stranger = MemoryDealer(network, "manager", "stranger")
    for number in range(25):
        stranger.send(None, bytes([number]) * number)
    stranger.send(None, bytes(codec.MAX_MESSAGE_BYTES + 1))
    service.turn()
    assert service._refusals.counts == {"malformed": 25, "size": 1}
    said = [
        record.message
        for record in lines.records
        if "refused a message of stranger" in record.message
    ]
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
    service, agent, monkeypatch, lines, tmp_path
) -> None:
    agent.report(events.WorkerDeclared, 0, 0, True)
    service.turn()
    machine, before = service._machine, service._guarded.incarnation
    monkeypatch.setattr(machine, "handle", stumble)
    agent.report(events.WorkerDeclared, 1, 0)
    service.turn()
    (rejected,) = agent.heard()
    assert (type(rejected), rejected.type, rejected.sequence) == (
        messages.Rejected,
        21,
        agent.envelope.sequence,
    )
    text = "\n".join(record.message for record in lines.records if record.levelno == logging.ERROR)
    assert "a bug in taskd" in text
    assert "WorkerDeclared cause=test rank=0" in text  # the story, up to there
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


def test_a_deadline_that_the_machine_cannot_meet_does_not_end_the_manager(
    service, agent, clock, monkeypatch, lines
) -> None:
    """The machine raised in `Tick`, outside of what was guarded.

    That was the end of the manager.
    """
    machine, real = service._machine, service._machine.handle
    monkeypatch.setattr(
        machine,
        "handle",
        lambda event: stumble(event) if isinstance(event, events.Tick) else real(event),
    )
    clock.advance(31.0)
    service.turn()
    assert ("what a deadline asks for was dropped") in "\n".join(
        record.message for record in lines.records
    )
    assert service._machine is not machine
    agent.register()
    service.turn()
    assert types(agent.heard()) == [messages.Accepted]
    assert service.result is None


def test_a_node_that_is_gone_when_the_manager_begins_anew_is_lost_after_a_lease(
    service, agent, clock, monkeypatch, lines
) -> None:
    monkeypatch.setattr(service._machine, "handle", stumble)
    agent.say(messages.Heartbeat())
    service.turn()
    for _ in range(40):
        clock.advance(1.0)
        service.turn()
    assert service.result is False
    assert "node 0 has been silent" in "\n".join(record.message for record in lines.records)


def test_a_node_whose_messages_make_the_manager_fail_again_and_again_is_refused(
    service, network, agent, monkeypatch
) -> None:
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


def test_an_event_without_a_rule_changes_nothing_and_costs_one_message(
    service, agent, monkeypatch, lines
) -> None:
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


def test_a_registration_with_an_unknown_state_changes_nothing_nor_does_the_silence_after_it(
    service, network, clock
) -> None:
    """The state was looked up in the middle of the registration.

    The node without members then raised when its lease ran out.
    """
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


def test_a_report_that_breaks_a_rule_is_a_sign_of_life_and_is_answered(
    service, agent, clock
) -> None:
    """It was silence.

    The agent, which heard nothing, took the manager for gone, and the manager the node.
    """
    for _ in range(100):
        clock.advance(1.0)
        malformed(
            agent,
            messages.Heartbeat((Mark(0, 0, 0, 5, "step", 0.0),)),
            marks=[[0, 0, -7, 5, "step", 0.0, 0, 0, "", False, 0, 0, 0, [], []]],
        )
        service.turn()
        ack, rejected = agent.heard()
        assert ack.known
        assert (type(rejected), rejected.type, rejected.sequence) == (
            messages.Rejected,
            4,
            agent.envelope.sequence,
        )
    assert service.result is None
    assert service._refusals.counts == {"malformed": 100}


def test_what_breaks_a_rule_renews_nobodys_lease_from_elsewhere(
    service, network, agent, clock
) -> None:
    impostor = Peer(network, name="impostor")
    for _ in range(40):
        clock.advance(1.0)
        malformed(impostor, messages.Heartbeat(), marks=5)
        service.turn()
    assert impostor.heard() == []
    assert service.result is False


def test_records_hold_whatever_a_text_may_be(service, agent, tmp_path) -> None:
    odd = "a\udcff\0\x1b[2J\u2028" + "x" * 1_000_000
    service._guarded._records.story(3, [odd])
    fault = Fault(FaultKind.RAISED, 0, 0, odd, 5, odd, odd, odd)
    values = {field.name: 0 for field in dataclasses.fields(RecoveryRecord)}
    record = RecoveryRecord(
        **{
            **values,
            "strategy": "retry",
            "faults": (fault,),
            "version": 5,
            "sources": ((0, odd),),
            "reason": odd,
            "not_completed": odd,
            "skipped": ((odd, odd),),
            "total_s": float("nan"),
        }
    )
    service._records.take(record)
    (line,) = (tmp_path / "log" / "recoveries.jsonl").read_text().splitlines()
    assert json.loads(line)["faults"][0]["detail"] == odd
    assert (tmp_path / "log" / "story-3.jsonl").exists()
    assert not service._guarded._records._is_failed


def test_odd_values_in_messages_of_every_type_end_no_manager_and_a_stranger_s_hurt_no_job() -> None:
    assert fuzz_manager.main(3000, seed=20240607) == 0


def test_what_says_odd_things_leaves_out_what_no_message_has_room_for(
    tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(fuzz_manager, "mutate", lambda _, thing: {**thing, "text": "x" * 200_000})
    dice, job = random.Random(1), fuzz_manager.Job(tmp_path)
    for _ in range(20):
        batch = fuzz_manager.odd_batch(dice, job.agents[0], job)
        job.agents[0].say(batch)
        assert batch.reports
    assert job.left_out > 10
