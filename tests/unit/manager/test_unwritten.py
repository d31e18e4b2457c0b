"""What a manager that is killed has still to write, the next one in the same directory writes."""

from __future__ import annotations

import dataclasses
import json
import os
from typing import TYPE_CHECKING

import pytest

from taskd.config import LogConfig, ManagerConfig
from taskd.core import events
from taskd.core.faults import Fault, FaultKind
from taskd.manager.held_records import HeldRecords
from taskd.manager.records import Records
from taskd.manager.service import Service
from taskd.transport.memory import MemoryNetwork, MemoryRouter
from tests.unit.manager.peer import lost, recover
from tests.unit.manager.test_records import RECORD

if TYPE_CHECKING:
    import pathlib

NAME = "recoveries.unwritten.jsonl"
LOST = Fault(FaultKind.LOST, 1, 0, "")


def written(log: pathlib.Path) -> list[tuple[int, str, str]]:
    path = log / "recoveries.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    found = map(json.loads, lines)
    return [(each["generation"], each["strategy"], each["not_completed"]) for each in found]


def next_manager(log: pathlib.Path, clock, job_id: str = "job") -> None:
    """It comes, is asked to end by a job that has ended, and has looked at the directory."""
    config = ManagerConfig(job_id, "unused", 30.0, None, LogConfig(log))
    service = Service(config, MemoryRouter(MemoryNetwork(), "manager"), clock)
    service._executor.result = True
    assert service.run()


@pytest.fixture
def resumed(service, agent, clock, tmp_path) -> pathlib.Path:
    """The log directory while rank 1, which has died, has still to make its first step."""
    for rank in range(2):
        agent.report(events.WorkerDeclared, rank, 0)
    agent.report(events.WorkerLost, *lost(1))
    service.turn()
    agent.report(events.WorkerPaused, 0, 0, 1, 7, True, "")
    agent.report(events.WorkerStarted, 1, 1, 4711)
    agent.report(events.WorkerPaused, 1, 1, 1, None, True, "")
    service.turn()
    return tmp_path / "log"


def test_the_recovery_under_way(resumed, clock, lines) -> None:
    assert written(resumed) == []
    next_manager(resumed, clock)
    why = "the manager ended before every rank was known to have made a new step"
    assert written(resumed) == [(1, "recover-in-place", why)]
    (record,) = map(json.loads, (resumed / "recoveries.jsonl").read_text().splitlines())
    assert (record["code"], record["version"], record["restarts_used"]) == (405, 7, 1)
    assert record["faults"][0]["detail"] == "SIGKILL"
    assert not (resumed / NAME).exists()
    (line,) = [each.message for each in lines.records if "before this one" in each.message]
    assert "generation 1 (recover-in-place)" in line
    next_manager(resumed, clock)
    assert len(written(resumed)) == 1, "once"


def test_a_restart_of_all_that_has_no_first_step_yet(service, agent, clock, tmp_path) -> None:
    agent.report(events.WorkerLost, *lost(1))  # nobody has declared anything: all start anew
    service.turn()
    assert service._machine.phase.value == "restarting"
    for incarnation, rank in ((1, 0), (1, 1)):
        agent.report(events.WorkerStarted, rank, incarnation, 4711)
    service.turn()
    next_manager(tmp_path / "log", clock)
    ((generation, strategy, why),) = written(tmp_path / "log")
    assert (generation, strategy) == (1, "restart")
    assert why.startswith("the manager ended")


def test_of_one_that_ends_by_itself_nothing_is_left(resumed, service) -> None:
    service._records.end()
    assert [strategy for _, strategy, _ in written(resumed)] == ["recover-in-place"]
    assert not (resumed / NAME).exists()


def test_when_all_have_made_a_step_nothing_is_left(service, agent, clock, tmp_path) -> None:
    recover(service, agent, clock)
    assert [why for _, _, why in written(tmp_path / "log")] == [""]
    assert not (tmp_path / "log" / NAME).exists()


def test_one_that_waits_to_learn_how_a_process_died(clock, tmp_path) -> None:
    held = HeldRecords(Records(tmp_path, "job", lambda: 7.0), clock, 5.0)
    held.begin(dataclasses.replace(RECORD, generation=4, not_completed="under way"))
    held.take(dataclasses.replace(RECORD, generation=4, faults=(LOST,), not_completed=""))
    held.begin(dataclasses.replace(RECORD, generation=5, not_completed="under way"))
    next_manager(tmp_path, clock)
    assert written(tmp_path) == [(4, "retry", ""), (5, "retry", "under way")]


def test_that_of_another_job_is_left_to_it(resumed, clock) -> None:
    next_manager(resumed, clock, "another")
    assert written(resumed) == []
    next_manager(resumed, clock)
    assert len(written(resumed)) == 1


@pytest.mark.parametrize("content", ["", "{", "[]", "null", '{"job_id": "job"}', "\x00" * 99])
def test_what_makes_no_sense_is_left_alone(clock, tmp_path, content: str) -> None:
    (tmp_path / NAME).write_text(content)
    next_manager(tmp_path, clock)
    assert written(tmp_path) == []
    assert (tmp_path / NAME).read_text() == content


@pytest.mark.parametrize("kind", ["link", "pipe", "folder", "too large"])
def test_what_is_no_such_file_is_said_and_not_read(clock, tmp_path, lines, kind: str) -> None:
    path = tmp_path / NAME
    if kind == "link":
        path.symlink_to("/dev/zero")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.touch()
        os.truncate(path, 1 << 40)
    next_manager(tmp_path, clock)
    assert written(tmp_path) == []
    assert any(
        "what an earlier manager has left is not read" in each.message for each in lines.records
    )
