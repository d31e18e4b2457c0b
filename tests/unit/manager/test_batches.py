"""Several reports in one message: what the manager makes of them, and of odd ones among them."""

from __future__ import annotations

import dataclasses

from taskd.core import events
from taskd.wire import batch, codec, messages, schema, translate
from tests.unit.manager.peer import Peer, lost, types


def reports_of(*said: events.Event) -> list[tuple[str, messages.Message]]:
    return [(event.cause, translate.event_to_message(event)) for event in said]


def paused(rank: int, incarnation: int = 0) -> events.WorkerPaused:
    return events.WorkerPaused(0.0, f"paused:{rank}", rank, incarnation, 1, 5, clean=True)


def stopping(service, agent: Peer) -> None:
    """Rank 0 was killed: the job is being interrupted."""
    for rank in range(2):
        agent.report(events.WorkerDeclared, rank, 0, True)
        agent.report(events.WorkerHolds, rank, 0, "")
    agent.report(events.WorkerLost, *lost(0), (5,))
    service.turn()
    assert types(agent.heard()) == [messages.Interrupt, messages.ReplaceWorker]


NEW = events.WorkerPaused(0.0, "paused:0", 0, 1, 1, None, clean=True)


def test_reports_of_one_message_count_as_if_each_had_come_alone(service, agent) -> None:
    stopping(service, agent)
    agent.say(
        batch.batch_of(
            reports_of(
                paused(1),
                events.WorkerStarted(0.0, "started", 0, 1, 17),
                events.WorkerDeclared(0.0, "declared", 0, 1, entered=True),
                NEW,
            )
        )
    )
    service.turn()
    assert types(agent.heard()) == [messages.Resume]
    assert service._refusals.counts == {}


def test_what_is_refused_of_one_report_is_answered_and_costs_the_others_nothing(
    service, agent
) -> None:
    stopping(service, agent)
    said = batch.batch_of(reports_of(paused(1), NEW))
    (one, other) = said.reports
    registration = messages.AgentRegistered(0, "a0", 1, 2, 3, 0, 0, ())
    body = codec.body_of(registration)
    odd = (
        (registration.code, "alone", body),
        (messages.Batch.code, "nested", b"\x80"),
        (999, "unknown", b"\x80"),
        (one[0], "not msgpack", b"\xc1"),
        (one[0], "no map", b"\x01"),
        (one[0], "somebody else's rank", one[2].replace(b"\xa4rank\x01", b"\xa4rank\x07")),
    )
    agent.say(dataclasses.replace(said, reports=(odd[0], one, *odd[1:], other)))
    number = agent.envelope.sequence
    service.turn()
    heard = agent.heard()
    rejected = [message for message in heard if isinstance(message, messages.Rejected)]
    assert [answer.type for answer in rejected] == [code for code, _, _ in odd]
    assert {answer.sequence for answer in rejected} == {number}
    assert types(heard)[-1] is messages.Resume
    assert sum(service._refusals.counts.values()) == len(odd)


def test_more_reports_than_an_agent_sends_at_once_are_refused_as_a_whole(service, agent) -> None:
    stopping(service, agent)
    (one,) = batch.batch_of(reports_of(paused(1))).reports
    agent.say(messages.Batch((one,) * (batch.MAX_REPORTS + 1)))
    service.turn()
    assert types(agent.heard()) == [messages.HeartbeatAck, messages.Rejected]
    assert service._refusals.counts == {"size": 1}


def test_the_longest_reports_fit_into_one_message() -> None:
    text = "\N{GRINNING FACE}" * schema.MAX_TEXT_BYTES
    longest = events.WorkerPaused(
        0.0, text, schema.MAX_RANK, schema.MAX_CLAIM, schema.MAX_CLAIM, schema.MAX_CLAIM,
        clean=True, reason=text, snapshots=(schema.MAX_CLAIM,) * 64,
    )  # fmt: skip
    envelope = codec.Envelope("job", "agent", 0, None, "a0", 1, 1, "reports")
    said = batch.batch_of(reports_of(*[longest] * batch.MAX_REPORTS))
    assert codec.decode(codec.encode(envelope, said)) == (envelope, said)
