"""What an agent puts into one message, and what a manager reads there."""

from __future__ import annotations

import dataclasses

import pytest

from taskd.core import events
from taskd.errors import RemoteProtocolError
from taskd.wire import batch, codec, translate


def paused(rank: int, incarnation: int = 0, version: int = 5) -> events.WorkerPaused:
    return events.WorkerPaused(0.0, "paused", rank, incarnation, 1, version, clean=True)


def started(rank: int, incarnation: int = 1) -> events.WorkerStarted:
    return events.WorkerStarted(0.0, "started", rank, incarnation, 17)


def through(*said: events.WorkerEvent) -> list[events.Event]:
    """What comes out at the other end."""
    told = batch.batch_of([(event.cause, translate.event_to_message(event)) for event in said])
    envelope = codec.Envelope("job", "agent", 0, None, "a0", 1, 1, "reports")
    assert codec.decode(codec.encode(envelope, told)) == (envelope, told)
    return [batch.read(one, 0.0) for one in told.reports]


def each_of(event: events.Event) -> list[events.Event]:
    if not isinstance(event, events.SharedReport):
        return [event]
    return [event.of(*life) for life in event.lives]


def test_what_ranks_report_alike_is_one_report() -> None:
    (together,) = through(paused(0), paused(1, 3), paused(2))
    assert together == events.SharedReport(0.0, "paused", ((0, 0), (1, 3), (2, 0)), paused(0))
    assert each_of(together) == [paused(0), paused(1, 3), paused(2)]


def test_what_is_not_alike_is_a_report_of_its_own() -> None:
    other_cause = dataclasses.replace(paused(3), cause="another")
    said = [paused(0), paused(1, version=4), started(2), other_cause]
    assert through(*said) == said


def test_each_rank_is_heard_in_the_order_in_which_it_spoke() -> None:
    said = [paused(0), started(1), paused(1), paused(2), started(2), paused(2), started(0)]
    found = [one for event in through(*said) for one in each_of(event)]
    assert len(found) == len(said)
    for rank in range(3):
        assert [event for event in found if event.rank == rank] == [
            event for event in said if event.rank == rank
        ]


def test_of_first_steps_the_slowest_is_told() -> None:
    seconds = {0: (0.1, 0.1, 0.1), 1: (0.1, 0.4, 0.1), 2: (0.3, 0.1, 0.1)}
    steps = [
        events.WorkerRecovered(0.0, "recovered", rank, 0, 1, 6, *took)
        for rank, took in seconds.items()
    ]
    (together,) = through(*steps)
    assert isinstance(together, events.SharedReport)
    assert together.lives == ((0, 0), (1, 0), (2, 0))
    assert dataclasses.replace(together.report, rank=1) == steps[1]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"type": 22}, "do not come in a batch"),
        ({"type": 37}, "do not come in a batch"),
        ({"ranks": ()}, "names no life of each rank"),
        ({"ranks": (1,)}, "names no life of each rank"),
        ({"ranks": (1, 1)}, "names no life of each rank"),
        ({"body": b"\xc1"}, "no msgpack"),
        ({"body": b"\x01"}, "must be a map"),
        ({"body": b"\x80"}, "is missing"),
    ],
)
def test_what_is_wrong_is_said(changes: dict[str, object], reason: str) -> None:
    said = [(event.cause, translate.event_to_message(event)) for event in (paused(0), paused(1))]
    (told,) = batch.batch_of(said).reports
    with pytest.raises(RemoteProtocolError, match=reason):
        batch.read(dataclasses.replace(told, **changes), 0.0)
