"""The manager that an agent starts, where the system refuses what that takes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from taskd.agent.link.automatic import AutomaticManager
from taskd.clock import MonotonicClock
from tests.descriptors import none_free

if TYPE_CHECKING:
    import pytest


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
