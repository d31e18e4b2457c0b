"""What an agent does with a report that cannot be sent, or that the manager refuses.

A death is told all the same.
"""

from __future__ import annotations

import logging

import pytest

from taskd.agent.link.reports import Reports
from taskd.core import events
from taskd.core.faults import Fault, FaultKind
from taskd.core.worker_state import WorkerState
from taskd.errors import LocalProtocolError
from taskd.wire import messages, translate

FAULT = Fault(FaultKind.CRASHED, 3, 1, "SIGSEGV", 5, "step", "SIGSEGV", "Traceback", -11)
LEAST = Fault(FaultKind.CRASHED, 3, 1, "SIGSEGV", signature="SIGSEGV")
LOST = events.WorkerLost(1.0, "c", 3, 1, FAULT, 0.5, (5,), (4,))
LEAST_LOST = messages.WorkerLost(3, 1, LEAST, 0.0)


class Link:
    """Takes messages, except those that are too large for it."""

    def __init__(self, most: int = 100) -> None:
        self.sent: list[messages.Message] = []
        self.gathered: list[tuple[messages.Message, str]] = []
        self._most = most

    def send(self, message: messages.Message, cause: str) -> int:
        if (
            isinstance(message, messages.AgentRegistered)
            and sum(len(report.snapshots) for report in message.workers) > self._most
        ):
            raise LocalProtocolError("too large")
        self.sent.append(message)
        return len(self.sent)

    def gather(self, message: messages.Message, cause: str) -> None:
        self.gathered.append((message, cause))


@pytest.fixture
def link() -> Link:
    return Link()


@pytest.fixture
def reports(link: Link) -> Reports:
    return Reports(0, link.send, link.gather)


@pytest.fixture
def lines(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(logging.getLogger("taskd"), "propagate", True)
    return caplog


def test_what_all_ranks_of_a_node_say_at_once_goes_out_together(reports, link) -> None:
    stop = events.WorkerPaused(1.0, "c", 3, 1, 1, 5, clean=True)
    reports.say(stop)
    assert link.gathered == [(translate.event_to_message(stop), "c")]
    assert link.sent == []


def test_what_can_be_told_is_told_as_it_is(reports, link, lines) -> None:
    reports.say(LOST)
    assert link.sent == [translate.event_to_message(LOST)]
    assert not lines.records


@pytest.mark.parametrize(
    "event",
    [
        events.WorkerLost(
            1.0,
            "c",
            3,
            1,
            Fault(FaultKind.CRASHED, 3, 1, "SIGSEGV", -7, "step", "SIGSEGV"),
            0.5,
            (5,),
            (4,),
        ),
        events.WorkerLost(1.0, "c", 3, 1, FAULT, -0.5, (5,), (4,)),
        events.WorkerLost(1.0, "c", 3, 1, FAULT, float("nan"), (5,), (4,)),
        events.WorkerLost(1.0, "c", 3, 1, FAULT, 0.5, (-1,), (4,)),
        events.WorkerLost(1.0, "c", 3, 1, FAULT, 0.5, (5,), (1 << 60,)),
        events.WorkerLost(
            1.0, "c", 3, 1, Fault(FaultKind.CRASHED, 4, 1, "SIGSEGV", signature="SIGSEGV"), 0.5
        ),
    ],
)
def test_a_death_that_breaks_a_rule_is_told_without_its_details(
    reports, link, lines, event
) -> None:
    reports.say(event)
    reports.say(event)
    assert link.sent == [LEAST_LOST, LEAST_LOST]
    (line,) = [record.message for record in lines.records]
    assert "node 0 tells a WorkerLost without its details: it cannot be sent as it is" in line


def test_a_death_that_the_manager_refuses_is_told_once_more_without_details(
    reports, link, lines
) -> None:
    reports.say(events.WorkerFinished(1.0, "c", 4, 1))
    reports.say(LOST)
    refused = messages.Rejected(messages.WorkerLost.code, 2, "malformed: it is too new for me")
    reports.rejected(refused)
    assert link.sent[2:] == [LEAST_LOST]
    reports.rejected(
        messages.Rejected(messages.WorkerLost.code, 3, "malformed: it is too new for me")
    )
    assert len(link.sent) == 3  # there is nothing smaller
    told, gave_up = [record.message for record in lines.records]
    assert "the manager refused it (malformed: it is too new for me)" in told
    assert "node 0: the manager goes on without a WorkerLost" in gave_up


def test_what_has_no_smaller_form_is_said_to_be_missing(reports, link, lines) -> None:
    reports.say(events.WorkerFinished(1.0, "c", 3, 1))
    reports.rejected(messages.Rejected(messages.WorkerFinished.code, 1, "malformed"))
    reports.rejected(messages.Rejected(messages.Heartbeat.code, 77, "malformed"))
    reports.rejected(messages.Rejected(1234, 78, "malformed"))
    assert len(link.sent) == 1
    assert [record.message.split(":")[1] for record in lines.records] == [
        f" the manager goes on without a {name}"
        for name in ("WorkerFinished", "Heartbeat", "message")
    ]


def test_a_registration_that_is_too_large_is_told_without_details(link, reports, lines) -> None:
    workers = tuple(
        events.WorkerReport(rank, 0, WorkerState.PAUSED, True, 5, snapshots=tuple(range(20)))
        for rank in range(10)
    )
    reports.say(events.AgentRegistered(1.0, "c", 0, "a", 1, 10, 3, 0, 0, workers))
    (sent,) = link.sent
    assert [(report.rank, report.state, report.snapshots) for report in sent.workers] == [
        (rank, WorkerState.PAUSED, ()) for rank in range(10)
    ]


def test_reports_are_remembered_for_a_while_only(reports, link) -> None:
    for _ in range(1000):
        reports.say(LOST)
    assert len(reports._said) == 256
    reports.rejected(messages.Rejected(messages.WorkerLost.code, 1, "malformed"))
    assert len(link.sent) == 1000
    reports.rejected(messages.Rejected(messages.WorkerLost.code, 1000, "malformed"))
    assert link.sent[-1] == LEAST_LOST
