"""Several reports in one message: what the manager makes of them, and of odd ones among them."""

from __future__ import annotations

import dataclasses

from taskd.core import events
from taskd.core.phase import JobPhase
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
    odd = (
        dataclasses.replace(
            one, type=registration.code, cause="alone", body=codec.body_of(registration)
        ),
        dataclasses.replace(one, type=messages.Batch.code, cause="nested"),
        dataclasses.replace(one, type=999, cause="unknown"),
        dataclasses.replace(one, body=b"\xc1", cause="not msgpack"),
        dataclasses.replace(one, body=b"\x01", cause="no map"),
        dataclasses.replace(one, ranks=(7,), cause="somebody else's rank"),
        dataclasses.replace(one, ranks=(1, 7), incarnations=(0, 0), cause="and that of another"),
        dataclasses.replace(one, ranks=(), incarnations=(), cause="nobody's"),
        dataclasses.replace(one, ranks=(0, 1), cause="a life is missing"),
        dataclasses.replace(one, ranks=(1, 1), incarnations=(0, 1), cause="two lives of one"),
    )
    agent.say(dataclasses.replace(said, reports=(odd[0], one, *odd[1:], other)))
    number = agent.envelope.sequence
    service.turn()
    heard = agent.heard()
    rejected = [message for message in heard if isinstance(message, messages.Rejected)]
    assert [answer.type for answer in rejected] == [told.type for told in odd]
    assert {answer.sequence for answer in rejected} == {number}
    assert types(heard)[-1] is messages.Resume
    assert sum(service._refusals.counts.values()) == len(odd)


def test_what_ranks_report_alike_counts_of_each(service, agent) -> None:
    for rank in range(2):
        agent.report(events.WorkerDeclared, rank, 0, True)
        agent.report(events.WorkerHolds, rank, 0, "")
    agent.report(events.WorkerLost, *lost(0), (5,))
    agent.say(batch.batch_of(reports_of(NEW)))
    agent.say(batch.batch_of(reports_of(paused(1))))
    service.turn()
    assert types(agent.heard())[-1] is messages.Resume
    steps = [events.WorkerRecovered(0.0, "recovered", rank, 1 - rank, 1, 6, 0.1, 0.1, 0.1)
             for rank in range(2)]  # fmt: skip
    both = batch.batch_of(reports_of(*steps))
    assert [told.ranks for told in both.reports] == [(0, 1)]
    agent.say(both)
    service.turn()
    assert service._machine.phase is JobPhase.RUNNING
    assert service._refusals.counts == {}


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
