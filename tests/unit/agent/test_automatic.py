"""The manager that an agent starts, where something keeps it from serving."""

from __future__ import annotations

import pytest

from taskd.agent.link import automatic as module
from taskd.agent.link.automatic import AutomaticManager
from taskd.clock import MonotonicClock
from taskd.core.policy.automatic import EXIT_WRONG_SETTINGS, MAX_STARTS_IN_VAIN
from tests.descriptors import none_free

_DEADLINE_S = 60.0


def test_without_a_free_descriptor_there_is_none_and_training_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = MonotonicClock()
    automatic = AutomaticManager(
        clock, place="127.0.0.1:0", job_id="job", node_rank=3, node_count=1
    )
    with automatic:
        with none_free():
            assert automatic.turn(clock.now()) is None
        assert automatic.next_deadline is None
        assert automatic.fds == []
    (record,) = caplog.records
    assert record.getMessage() == ("node 3 cannot start a manager: [Errno 24] Too many open files")


@pytest.mark.parametrize(
    ("status", "where"), [(EXIT_WRONG_SETTINGS, "The line before"), (1, "manager.log")]
)
def test_one_that_cannot_serve_says_where_its_reason_stands(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, status: int, where: str
) -> None:
    """A wrong setting is told before there is a log."""
    monkeypatch.setattr(module, "_MAIN", f"import os\nos._exit({status})")
    clock = MonotonicClock()
    until = clock.now() + _DEADLINE_S
    automatic = AutomaticManager(
        clock, place="127.0.0.1:0", job_id="job", node_rank=3, node_count=1
    )
    with automatic:
        automatic._policy.in_vain = MAX_STARTS_IN_VAIN  # the next one is the last
        automatic.turn(clock.now())
        while automatic.fds:
            assert clock.now() < until
            automatic.turn(clock.now())
    assert caplog.records[-1].getMessage() == (
        f"the manager of node 3 ended with {status} and is not started again: training goes on "
        f"without one. {where} says why it ended"
    )
