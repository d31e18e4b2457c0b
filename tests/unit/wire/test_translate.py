"""Messages and the core's vocabulary agree field by field, and translation loses nothing."""

from __future__ import annotations

import dataclasses
import typing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from taskd.core import commands, events
from taskd.core.faults import Fault, FaultKind
from taskd.errors import LocalProtocolError, RemoteProtocolError
from taskd.wire import messages, translate
from taskd.wire.codec import Envelope
from tests.unit.wire.strategies import MESSAGES, of_class

ENVELOPE = Envelope("job", "agent", 0, None, "a1", 3, 7, "why")
EVENTS = list(messages.EVENT_BY_CODE.values())
COMMANDS = list(messages.COMMAND_BY_CODE.values())
LINK_ONLY = {
    messages.Accepted,
    messages.Refused,
    messages.Postponed,
    messages.Heartbeat,
    messages.HeartbeatAck,
    messages.RegisterWorker,
    messages.Unsupported,
    messages.Rejected,
    messages.Batch,
    messages.AskVote,
    messages.Vote,
    messages.Elected,
}


@pytest.mark.parametrize(
    ("cls", "left_out"),
    [*((cls, {"now", "cause"}) for cls in EVENTS), *((cls, {"cause"}) for cls in COMMANDS)],
)
def test_a_message_has_the_fields_of_what_it_stands_for(cls: type, left_out: set[str]) -> None:
    core, wire = typing.get_type_hints(cls), typing.get_type_hints(messages.MESSAGE_BY_RECORD[cls])
    wire.pop("code")
    wire.pop("is_order")
    assert {name: hint for name, hint in core.items() if name not in left_out} == wire
    defaults = {
        field.name: field.default for field in dataclasses.fields(cls) if field.name in wire
    }
    assert defaults == {
        field.name: field.default for field in dataclasses.fields(messages.MESSAGE_BY_RECORD[cls])
    }


def test_every_message_is_an_event_a_command_or_part_of_the_link() -> None:
    assert set(MESSAGES) == LINK_ONLY | set(messages.MESSAGE_BY_RECORD.values())
    assert not LINK_ONLY & set(messages.MESSAGE_BY_RECORD.values())


def test_every_event_that_the_manager_handles_travels() -> None:
    recovery = pytest.importorskip("taskd.core.job.machine")
    of_manager = {events.ManagerBeganAnew, events.ManagerElected, events.OrderDropped}
    local = {events.Tick, events.AgentHeard, *of_manager}
    assert set(recovery.EVENTS) - local <= set(EVENTS)


@pytest.mark.parametrize("cls", EVENTS, ids=lambda cls: cls.__name__)
@settings(max_examples=10)
@given(data=st.data())
def test_an_event_comes_out_as_it_went_in(cls: type, data: st.DataObject) -> None:
    event = dataclasses.replace(data.draw(of_class(cls)), cause="why", now=12.5)
    if isinstance(event, events.WorkerEvent) and hasattr(event, "fault"):
        event = dataclasses.replace(
            event,
            fault=dataclasses.replace(event.fault, rank=event.rank, incarnation=event.incarnation),
        )
    message = translate.event_to_message(event)
    assert translate.message_to_event(ENVELOPE.cause, message, 12.5) == event
    with pytest.raises(RemoteProtocolError, match="is no command"):
        translate.message_to_command(ENVELOPE, message)


@pytest.mark.parametrize("cls", COMMANDS, ids=lambda cls: cls.__name__)
@settings(max_examples=10)
@given(data=st.data())
def test_a_command_comes_out_as_it_went_in(cls: type, data: st.DataObject) -> None:
    command = dataclasses.replace(data.draw(of_class(cls)), cause="why")
    message = translate.command_to_message(command)
    assert translate.message_to_command(ENVELOPE, message) == command
    with pytest.raises(RemoteProtocolError, match="is no event"):
        translate.message_to_event(ENVELOPE.cause, message, 0.0)


def test_what_stays_within_a_process_is_not_translated() -> None:
    with pytest.raises(LocalProtocolError, match="Tick"):
        translate.event_to_message(events.Tick(0.0, ""))
    with pytest.raises(LocalProtocolError, match="EndJob"):
        translate.command_to_message(commands.EndJob("", 0, succeeded=True, reason=""))


@pytest.mark.parametrize(("rank", "incarnation"), [(1, 2), (0, 3)])
def test_a_fault_of_another_life_is_refused(rank: int, incarnation: int) -> None:
    message = messages.WorkerLost(0, 2, Fault(FaultKind.LOST, rank, incarnation, ""), 0.0)
    with pytest.raises(RemoteProtocolError, match="another life"):
        translate.message_to_event(ENVELOPE.cause, message, 0.0)
    with pytest.raises(RemoteProtocolError, match="another life"):
        translate.check(message)


def test_a_message_is_checked_as_its_receiver_would() -> None:
    translate.check(messages.WorkerLost(0, 2, Fault(FaultKind.LOST, 0, 2, "", 5), 0.0))
    with pytest.raises(RemoteProtocolError, match="version"):
        translate.check(messages.WorkerLost(0, 2, Fault(FaultKind.LOST, 0, 2, "", -7), 0.0))
