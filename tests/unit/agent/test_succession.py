"""The elected manager of an agent has died: what the next one of its term is told."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from taskd.agent.link import automatic
from taskd.clock import MonotonicClock
from taskd.core.policy.election import Won
from taskd.core.votes import Roster, Voter
from taskd.wire.succession import decode_won

if TYPE_CHECKING:
    import pathlib

    import pytest

_DEADLINE_S = 20.0
ROSTER = Roster(0, 7, 3, 1, tuple(Voter(rank, name, "") for rank, name in enumerate("abc")))
# stands for a manager that dies as soon as it has been told who has elected it
DIES = """import pathlib, sys
told = pathlib.Path({folder!r})
data = sys.stdin.buffer.read()
(told / str(len(list(told.iterdir())))).write_bytes(data)
sys.exit(1)"""


def test_it_goes_on_from_the_newest_roster_that_its_agent_knows(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(automatic, "_MAIN", DIES.format(folder=str(tmp_path)))
    clock, known = MonotonicClock(), dataclasses.replace(ROSTER, term=2, number=40)
    until = clock.now() + _DEADLINE_S
    with automatic.AutomaticManager(
        clock, place=None, job_id="job", node_rank=1, node_count=3
    ) as manager:
        manager.succeed(Won(2, ROSTER, ("b", "c")), "127.0.0.1:0")
        second = tmp_path / "1"
        while not (second.exists() and second.stat().st_size) and clock.now() < until:
            manager.turn(clock.now(), known)
        manager.retire()
    first, again = (decode_won((tmp_path / name).read_bytes()) for name in "01")
    assert first == Won(2, ROSTER, ("b", "c"))
    assert (again.term, again.roster.names) == (2, known.names)
    assert again.roster.key > known.key
