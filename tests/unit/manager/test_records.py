"""What the manager writes: lines, records, stories."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from typing import TYPE_CHECKING

import pytest

from taskd import replay
from taskd.core import commands, events
from taskd.core.commands import RecoveryRecord
from taskd.core.faults import Fault, FaultKind
from taskd.manager.held_records import HeldRecords
from taskd.manager.records import Records, describe_fault
from taskd.wire import messages
from tests.unit.manager.peer import recover, types

if TYPE_CHECKING:
    import pathlib


_ZEROS = {field.name: 0 for field in dataclasses.fields(RecoveryRecord)}
RECORD = RecoveryRecord(
    **{**_ZEROS, "strategy": "retry", "faults": (), "sources": (), "skipped": ()}
)


def test_the_time_of_a_record_is_that_of_the_clock_it_was_given(tmp_path) -> None:
    Records(tmp_path, "job").recovery(RECORD, 1234.5)
    assert json.loads((tmp_path / "recoveries.jsonl").read_text())["time"] == 1234.5


def test_whoever_has_seen_the_line_finds_the_record(tmp_path, caplog) -> None:
    found = []

    class Reader(logging.Handler):
        def emit(self, _: logging.LogRecord) -> None:
            found.append((tmp_path / "recoveries.jsonl").read_text(encoding="utf-8"))

    records, reader = Records(tmp_path, "job"), Reader()
    logger = logging.getLogger("taskd.manager.records")
    caplog.set_level(logging.INFO, logger=logger.name)
    logger.addHandler(reader)
    try:
        records.recovery(RECORD, 1.0)
    finally:
        logger.removeHandler(reader)
    assert [json.loads(text)["strategy"] for text in found] == ["retry"]


@pytest.mark.parametrize(
    ("version", "phase", "where"),
    [
        (3, "forward", "in step 3, forward"),
        (3, None, "in step 3"),
        (None, "entered", "before its first restore(), entered"),
        (None, "boot", "at an unknown step, outside of taskd.recoverable"),
        (None, None, "at an unknown step"),
    ],
)
def test_no_line_says_more_of_a_step_than_is_known(version, phase, where: str) -> None:
    fault = Fault(FaultKind.KILLED, 1, 0, "SIGKILL", version, phase)
    assert describe_fault(fault) == f"rank 1 killed (SIGKILL) {where}"


def test_of_a_fault_without_a_detail_none_is_shown() -> None:
    """Its exit status was not told before the recovery was over."""
    fault = Fault(FaultKind.LOST, 2, 0, "")
    assert describe_fault(fault) == "rank 2 lost at an unknown step"


def test_a_recovery_leaves_a_line_a_record_and_a_story(
    service, agent, clock, lines, tmp_path
) -> None:
    recover(service, agent, clock)
    (line,) = [record.message for record in lines.records if record.message.startswith("recovered")]
    for part in (
        "recover-in-place",
        "rank 1",
        "SIGKILL",
        "generation 1",
        "version 7",
        "rank 0 kept",
        "rank 1 from rank 0",
        "0 steps redone",
        "quiesce 0.100",
        "restarts 1 of 3",
        "0.550 s",
    ):
        assert part in line, (part, line)
    (record,) = [
        json.loads(text)
        for text in (tmp_path / "log" / "recoveries.jsonl").read_text().splitlines()
    ]
    assert (
        record["job_id"],
        record["generation"],
        record["steps_redone"],
        record["faults"][0]["detail"],
    ) == ("job", 1, 0, "SIGKILL")
    story = tmp_path / "log" / "story-1.jsonl"
    machine, entries = replay.load_lines(story.read_text().splitlines())
    assert replay.replay(machine, entries) == []


class TestHowItDiedIsNotKnownYet:
    """The alarm comes first, and the recovery may be over before the exit status is there."""

    LOST = Fault(FaultKind.LOST, 1, 0, "")
    KILLED = Fault(FaultKind.KILLED, 1, 0, "SIGKILL")

    @pytest.fixture
    def held(self, clock, tmp_path) -> HeldRecords:
        held = HeldRecords(Records(tmp_path, "job", lambda: 7.0 + clock.now()), clock, 5.0)
        held.take(dataclasses.replace(RECORD, faults=(self.LOST,), generation=1))
        return held

    def written(self, tmp_path: pathlib.Path) -> list[tuple[int, list[str]]]:
        path = tmp_path / "recoveries.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        records = [json.loads(line) for line in lines]
        return [(each["generation"], [one["kind"] for one in each["faults"]]) for each in records]

    def test_the_record_waits_for_it(self, held, clock, tmp_path) -> None:
        assert self.written(tmp_path) == []
        recovered_at = 7.0 + clock.now()
        clock.advance(0.7)
        held.learn(dataclasses.replace(self.KILLED, incarnation=1))
        held.learn(dataclasses.replace(self.KILLED, rank=0))
        assert self.written(tmp_path) == []
        held.learn(self.KILLED)
        assert self.written(tmp_path) == [(1, ["killed"])]
        (line,) = (tmp_path / "recoveries.jsonl").read_text().splitlines()
        assert json.loads(line)["time"] == recovered_at
        assert held.next_deadline is None

    def test_and_so_do_those_that_come_after_it(self, held, tmp_path) -> None:
        held.take(dataclasses.replace(RECORD, generation=2))
        assert self.written(tmp_path) == []
        held.learn(self.KILLED)
        assert self.written(tmp_path) == [(1, ["killed"]), (2, [])]

    def test_but_not_for_long(self, held, clock, tmp_path) -> None:
        clock.advance(4.9)
        held.turn()
        assert self.written(tmp_path) == []
        clock.advance(held.next_deadline - clock.now())
        held.turn()
        assert self.written(tmp_path) == [(1, ["lost"])]

    def test_nor_beyond_the_end_of_the_manager(self, held, tmp_path) -> None:
        held.write_all()
        assert self.written(tmp_path) == [(1, ["lost"])]

    def test_the_manager_tells_it_when_it_comes(
        self, service, agent, clock, lines, tmp_path
    ) -> None:
        recover(service, agent, clock, self.LOST)
        assert self.written(tmp_path / "log") == []
        agent.report(events.WorkerExitKnown, 1, 0, self.KILLED)
        service.turn()
        assert self.written(tmp_path / "log") == [(1, ["killed"])]
        assert any(line.message.startswith("recovered") for line in lines.records)


class TestTheLevelOfTheLine:
    """INFO: nothing is lost. WARNING: nobody knows. ERROR: committed steps are."""

    def level(self, service, lines, **fields) -> tuple[str, str]:
        fault = Fault(FaultKind.KILLED, 1, 0, "SIGKILL", version=fields.pop("fault_version", 40))
        record = commands.RecoveryRecord(
            **{
                "generation": 3,
                "strategy": "recover-in-place",
                "faults": (fault,),
                "followers": 0,
                "version": 40,
                "sources": (),
                "steps_redone": 0,
                **dict.fromkeys(
                    (
                        f"{name}_s"
                        for name in (
                            "detect",
                            "decide",
                            "quiesce",
                            "respawn",
                            "groups",
                            "state",
                            "first_step",
                            "total",
                        )
                    ),
                    0.1,
                ),
                "restarts_used": 1,
                "max_restarts": 3,
            }
            | fields
        )
        service._records.take(record)
        line = next(line for line in lines.records if "recovered" in line.message)
        return line.levelname, line.message

    def test_nothing_was_lost(self, service, lines) -> None:
        assert self.level(service, lines)[0] == "INFO"

    def test_a_step_that_only_the_dead_had(self, service, lines) -> None:
        level, text = self.level(service, lines, steps_redone=1)
        assert (level, text.rpartition(". ")[2]) == (
            "ERROR",
            "Committed steps were lost and are done again",
        )

    def test_a_restart_that_goes_back(self, service, lines) -> None:
        level, text = self.level(service, lines, strategy="restart", version=None, steps_redone=128)
        assert level == "ERROR"
        assert "at most 128 steps redone, from the newest checkpoint on" in text

    def test_a_restart_of_a_script_whose_steps_are_not_known(self, service, lines) -> None:
        assert (
            self.level(service, lines, strategy="restart", version=None, fault_version=None)[0]
            == "WARNING"
        )

    def test_a_restart_before_the_first_step(self, service, lines) -> None:
        assert (
            self.level(service, lines, strategy="restart", version=None, fault_version=0)[0]
            == "INFO"
        )

    def test_one_that_was_not_completed_says_what_came_before(self, service, lines) -> None:
        why = "before every rank had made a new step, rank 1 raised ValueError: x at step 40"
        _, text = self.level(
            service,
            lines,
            strategy="retry",
            reason="every process is alive",
            not_completed=why,
            code=405,
        )
        assert text.startswith(
            f"not recovered ({why}; code 405) by retry (every process is alive): rank 1 "
            "killed (SIGKILL) in step 40; generation 3;"
        )


def test_agents_that_went_on_alone_end_the_manager_and_not_the_job(service, agent, lines) -> None:
    agent.say(messages.AgentLeft(0, "fallback", "rank 1 ended, and no manager answers"))
    service.turn()
    assert service.result is True
    (line,) = [record for record in lines.records if record.levelname == "WARNING"]
    assert line.message.startswith(
        "this manager ends: the agent of node 0 left (fallback: rank 1 "
        "ended, and no manager answers)"
    )


def test_a_job_that_gets_no_further_is_told_of(service, lines) -> None:
    service._executor.execute(commands.ReportNoProgress("cause", 3, "no new step in 3 recoveries"))
    (line,) = [record for record in lines.records if record.levelname == "WARNING"]
    assert line.message.startswith("the job gets no further: no new step in 3 recoveries.")


def test_a_log_directory_that_cannot_be_written_costs_one_warning(
    service, agent, clock, lines, tmp_path
) -> None:
    (tmp_path / "log").write_text("a file is in the way")
    recover(service, agent, clock)
    assert len([record for record in lines.records if "cannot be written" in record.message]) == 1
    agent.say(messages.Heartbeat())
    service.turn()
    assert agent.heard()[0].known


def test_old_stories_are_removed(service, tmp_path) -> None:
    for generation in range(25):
        service._guarded._records.story(generation, ["x"])
    assert len(list((tmp_path / "log").glob("story-*"))) == 20
    assert (tmp_path / "log" / "story-24.jsonl").exists()


def test_giving_up_shows_the_cause_with_its_traceback(service, agent, lines) -> None:
    for attempt, incarnation in enumerate((0, 0, 1)):
        fault = Fault(
            FaultKind.RAISED,
            0,
            incarnation,
            "ValueError: bad",
            5,
            "step",
            "ValueError: bad",
            "Traceback\n  line 7\nValueError: bad",
        )
        agent.report(events.WorkerRaised, 0, incarnation, attempt, fault, True, 0.0)
        service.turn()
        if attempt == 1:  # its cause may be on the way
            service._clock.advance(2.0)
            service.turn()
        agent.report(events.WorkerPaused, 1, 0, attempt + 1, 5, True, "")
        agent.report(events.WorkerPaused, 0, 1, attempt + 1, None, True, "")
        service.turn()
        for _ in range(5):
            service._clock.advance(1.0)
            agent.say(messages.Heartbeat())
            service.turn()
    assert messages.GiveUp in types(agent.heard())
    text = "\n".join(record.message for record in lines.records if record.levelno == logging.ERROR)
    assert "the job is given up" in text
    assert "  line 7" in text


@pytest.mark.parametrize("name", ["story-3.jsonl", "recoveries.jsonl"])
def test_a_link_in_the_folder_costs_the_file_behind_it_nothing(
    tmp_path: pathlib.Path, name: str
) -> None:
    log = tmp_path / "log"
    log.mkdir()
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (log / name).symlink_to(victim)
    records = Records(log, "job", lambda: 0.0)
    records.story(3, ["a story"])
    records.recovery(RECORD, 0.0)
    assert victim.read_text() == "mine"
    assert records._is_failed == (name == "recoveries.jsonl")  # a story is put in its place
    if name == "story-3.jsonl":
        assert (log / name).read_text() == "a story\n"
        assert not (log / name).is_symlink()
    assert not [path for path in log.iterdir() if path.suffix != ".jsonl"]
    for path in log.iterdir():
        assert path.is_symlink() or path.stat().st_mode & 0o777 == 0o640


def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(tmp_path: pathlib.Path) -> None:
    os.mkfifo(tmp_path / "recoveries.jsonl")
    records = Records(tmp_path, "job", lambda: 0.0)
    records.recovery(RECORD, 0.0)
    assert records._is_failed
