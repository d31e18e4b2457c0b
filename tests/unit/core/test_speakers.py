"""What an agent may say, and when nothing more of a node is taken."""

from __future__ import annotations

import pytest

from taskd.core import events
from taskd.core.job.speakers import HARM_LIMIT, Quarantine, Strangers, objection
from taskd.core.marks import Mark

STARTED = events.WorkerStarted(0.0, "", 2, 0, 1)
MARKS = tuple(Mark(rank, 0, 0, 5, "step", 0.0) for rank in (2, 4))


@pytest.mark.parametrize(
    ("event", "refused"),
    [
        (events.WorkerStarted(0.0, "", 2, 0, 1), None),
        (events.WorkerProfiling(0.0, "", 2, 0, 1), None),
        (events.AgentLeft(0.0, "", 1, "failed", ""), None),
        (events.AgentHeard(0.0, "", 1, MARKS[:1]), None),
        (events.WorkerStarted(0.0, "", 4, 0, 1), ("foreign", "rank 4")),
        (events.WorkerProfiling(0.0, "", 4, 0, 1), ("foreign", "rank 4")),
        (events.AgentHeard(0.0, "", 1, MARKS), ("foreign", "not its own")),
        (events.AgentLeft(0.0, "", 0, "failed", ""), ("foreign", "node 0")),
        (events.MirrorsHeld(0.0, "", 0, ()), ("foreign", "node 0")),
        (events.MirrorsReturned(0.0, "", 0, 1, 2, 9, (0,)), ("foreign", "node 0")),
        (events.MirrorsReturned(0.0, "", 1, 1, 2, 9, (2,)), None),
        (events.SharedReport(0.0, "", ((2, 0), (3, 0)), STARTED), None),
        (events.SharedReport(0.0, "", ((2, 0), (4, 0)), STARTED), ("foreign", "not its own")),
        (events.WorkerReady(0.0, "", 2, 0, guarded=True), ("malformed", "WorkerReady")),
    ],
)
def test_an_agent_speaks_of_its_own_node_and_ranks(
    event: events.Event, refused: tuple[str, str] | None
) -> None:
    found = objection(event, 1, frozenset({2, 3}))
    assert (found is None) == (refused is None)
    if found and refused:
        assert found[0] == refused[0]
        assert refused[1] in found[1]


def test_a_node_that_made_the_manager_fail_too_often_is_refused() -> None:
    quarantine = Quarantine()
    for _ in range(HARM_LIMIT):
        assert quarantine.refusal(3) is None
        quarantine.blame(3)
    assert quarantine.refusal(3) == f"{HARM_LIMIT} messages of node 3 made the manager fail"
    assert quarantine.refusal(2) is None


class TestStrangers:
    def test_what_nobody_can_read_is_soon_too_much(self) -> None:
        strangers = Strangers()
        count = next(n for n in range(1, 100) if strangers.refused(b"a", is_readable=False))
        assert 10 <= count <= 50
        assert not strangers.refused(b"a", is_readable=False), "it is counted anew"
        assert not strangers.refused(b"b", is_readable=False)

    def test_one_of_ours_may_be_refused_more_often(self) -> None:
        strangers = Strangers()
        count = next(n for n in range(1, 10_000) if strangers.refused(b"a", is_readable=True))
        assert count >= 1000

    def test_as_many_as_there_are_they_take_little_memory(self) -> None:
        strangers = Strangers()
        for number in range(20_000):
            assert not strangers.refused(str(number).encode(), is_readable=True)
        assert len(strangers._weights) <= 4096
