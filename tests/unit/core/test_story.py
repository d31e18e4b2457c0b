"""Story and replay.

What a machine remembers, how it is written down, and that it decides the same again.
"""

import dataclasses
import io
import json
import typing
from enum import Enum

import hypothesis.strategies as st
import pytest
from hypothesis import given

from taskd import replay as replay_module
from taskd.core import commands as do
from taskd.core import events as ev
from taskd.core import story as story_module
from taskd.core.faults import Fault, FaultKind
from taskd.core.story import Note, Story, describe, from_plain, to_plain
from taskd.core.votes import Roster, Voter, Witness
from taskd.replay import StoryWriter, dump_lines, load_lines, main, replay


def heard(now: float, node: int) -> ev.AgentHeard:
    return ev.AgentHeard(now, "beat", node)


class TestStory:
    def test_it_is_bounded_and_counts_what_it_forgot(self) -> None:
        story = Story(capacity=3)
        for now in range(5):
            story.note(float(now), "x")
        assert len(story) == 3
        assert story.dropped == 2

    def test_heartbeats_do_not_push_everything_else_out(self) -> None:
        story = Story()
        story.note(0.0, "first")
        for now in range(1000):
            story.event(heard(float(now), now % 3))
        assert [entry.now for entry in story] == [0.0, 999.0, 997.0, 998.0]
        story.event(ev.Tick(1000.0, "t"))
        story.event(heard(1001.0, 0))
        story.event(heard(1002.0, 0))
        assert [entry.now for entry in story][-2:] == [1000.0, 1002.0]

    def test_a_heartbeat_that_was_forgotten_is_written_again(self) -> None:
        story = Story(capacity=2)
        story.event(heard(0.0, 0))
        story.note(1.0, "a")
        story.note(2.0, "b")
        story.event(heard(3.0, 0))
        assert [entry.now for entry in story] == [2.0, 3.0]

    def test_it_tells_of_one_rank(self, manager) -> None:
        job = manager().joined()
        job.lose(2)
        job.pause_all()
        job.send(ev.AgentHeard, 0)
        lines = "\n".join(job.machine.story.of_rank(2))
        assert "WorkerLost" in lines
        assert "ReplaceWorker" in lines
        assert "Resume" in lines
        assert "AgentHeard" not in lines
        other = "\n".join(job.machine.story.of_rank(1))
        assert "WorkerLost" not in other
        assert "Interrupt" in other
        job.send(ev.AgentLeft, 0, "failed", "")
        assert "AgentLeft" not in "\n".join(job.machine.story.of_rank(1))

    def test_the_last_lines_are_for_error_messages(self) -> None:
        story = Story()
        for now in range(30):
            story.note(float(now), f"note {now}")
        assert story.last(2) == "28.000000 note 28\n29.000000 note 29"

    def test_a_line_leaves_out_what_is_not_set(self) -> None:
        fault = Fault(FaultKind.KILLED, 1, 0, "SIGKILL")
        assert describe(ev.WorkerLost(1.5, "c", 1, 0, fault, 0.0)) == (
            "1.500000 WorkerLost cause=c rank=1 incarnation=0 fault=killed: SIGKILL age_s=0.0"
        )
        assert describe(do.Release("c", 3)) == ("  ->  Release cause=c generation=3").replace(
            "->  ", "-> "
        )


FAULTS = st.builds(
    Fault,
    st.sampled_from(FaultKind),
    st.integers(0, 9),
    st.integers(0, 9),
    st.text(),
    st.none() | st.integers(0, 9),
)
THINGS = st.one_of(
    st.builds(ev.WorkerLost, st.floats(0, 9), st.text(), st.integers(0, 9), st.integers(0, 9),
    FAULTS, st.floats(0, 9),
              st.tuples(st.integers(0, 9))),
    st.builds(do.Resume, st.text(), st.integers(0, 9), st.none() | st.integers(0, 9),
              st.lists(st.builds(do.Move, st.integers(0, 9),
              st.none() | st.integers(0, 9))).map(tuple), st.integers(0, 9)),
    st.builds(do.GiveUp, st.text(), st.integers(0, 9), st.text(), st.none(), st.none() | FAULTS),
    st.builds(Note, st.floats(0, 9), st.text()),
)  # fmt: skip


@given(THINGS)
def test_plain_form_comes_back_the_same_through_json(thing) -> None:
    assert from_plain(json.loads(json.dumps(to_plain(thing)))) == thing


def test_a_story_of_two_nodes_holds_who_votes() -> None:
    voters = tuple(Voter(rank, f"agent-{rank}", f"10.0.0.{rank}:7000") for rank in range(2))
    roster = Roster(1, 2, 2, 8, voters, (), ("10.0.0.2:7000",), Witness("spare", "10.0.0.2:7000"))
    event = ev.AgentRegistered(0.5, "message", 0, "agent-0", 2, 16, 3, 0, 0, (), roster=roster)
    assert from_plain(json.loads(json.dumps(to_plain(event)))) == event


def held_by(kind: object) -> typing.Iterator[type]:
    """The classes of ours that a value of this type may hold, itself one of them."""
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        yield kind
        for inner in typing.get_type_hints(kind).values():
            yield from held_by(inner)
    elif isinstance(kind, type) and issubclass(kind, Enum):
        yield kind
    for inner in typing.get_args(kind):
        yield from held_by(inner)


def test_whatever_an_event_or_a_command_may_hold_can_be_read_again() -> None:
    known = {*story_module._CLASSES.values(), *story_module._ENUMS.values()}
    for module in (ev, do):
        for kind in vars(module).values():
            if dataclasses.is_dataclass(kind):
                assert known.issuperset(held_by(kind)), kind


def test_plain_form_knows_no_other_names() -> None:
    with pytest.raises(ValueError, match="not 'Popen'"):
        from_plain({"type": "Popen", "args": "rm"})


class TestReplay:
    def story_file(self, tmp_path, machine) -> str:
        path = tmp_path / "story.jsonl"
        path.write_text("\n".join(dump_lines(machine)), encoding="utf-8")
        return str(path)

    def played(self, manager):
        job = manager().joined()
        job.lose(2)
        job.pause_all()
        job.recover_all()
        return job.machine

    def test_the_manager_decides_the_same_again(self, manager, tmp_path, capsys) -> None:
        assert main([self.story_file(tmp_path, self.played(manager))]) == 0
        out = capsys.readouterr().out
        assert "WorkerLost" in out
        assert "RecordRecovery" in out

    def test_so_does_a_node(self, node, tmp_path) -> None:
        agent = node(2, incarnations={1: 3})
        agent.alarm(1)
        agent.replace(1, incarnation=4)
        assert main([self.story_file(tmp_path, agent.machine)]) == 0

    def test_another_decision_is_shown(self, manager, tmp_path, capsys) -> None:
        path = tmp_path / "story.jsonl"
        lines = [line for line in dump_lines(self.played(manager)) if "ReplaceWorker" not in line]
        path.write_text("\n".join(lines), encoding="utf-8")
        assert main([str(path)]) == 1
        assert "decided differently" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("", "must be a header"),
            ("[]", "must be a header"),
            (
                '{"format": 1, "machine": "RecoveryMachine", "arguments": {}, "dropped": 7}',
                "first 7 entries",
            ),
            ('HEADER\n{"type": "Popen"}', "line 2"),
            ('HEADER\n{"type": "Tick"}', "line 2"),
        ],
    )
    def test_what_is_no_story_is_refused(self, manager, tmp_path, capsys, text, words) -> None:
        path = tmp_path / "story.jsonl"
        header = dump_lines(manager().machine)[0]
        path.write_text(text.replace("HEADER", header), encoding="utf-8")
        assert main([str(path)]) == 2
        assert words in capsys.readouterr().err

    def test_a_missing_file_and_a_missing_name(self, tmp_path, capsys) -> None:
        assert main([str(tmp_path / "none")]) == 2
        assert main([]) == 2
        assert "usage" in capsys.readouterr().err

    def test_a_fresh_machine_is_made_of_the_same_arguments(self, manager) -> None:
        fresh, entries = load_lines(io.StringIO("\n".join(dump_lines(self.played(manager)))))
        assert fresh.arguments == manager().machine.arguments
        assert replay(fresh, entries) == []
        assert replay_module.FORMAT == 1

    def test_an_entry_is_put_into_words_once(self, manager, monkeypatch) -> None:
        """A manager writes its story down at each recovery, and hears nobody meanwhile."""
        job = manager().joined()
        writer, worded = StoryWriter(job.machine), []
        assert list(writer.lines()) == dump_lines(job.machine)
        before = list(job.machine.story)
        job.send(ev.AgentHeard, 0)
        job.lose(2)
        job.pause_all()
        expected = dump_lines(job.machine)
        monkeypatch.setattr(
            replay_module, "to_plain", lambda thing: worded.append(thing) or to_plain(thing)
        )
        assert list(writer.lines()) == expected
        assert not [entry for entry in before if any(entry is thing for thing in worded)]
        assert any(isinstance(thing, ev.WorkerLost) for thing in worded)

    def test_the_words_that_are_kept_are_bounded(self, manager, monkeypatch) -> None:
        job = manager().joined()
        expected = dump_lines(job.machine)
        monkeypatch.setattr(replay_module, "_KEPT_CHARACTERS", len(expected[1]) + 1)
        writer, worded = StoryWriter(job.machine), []
        assert list(writer.lines()) == expected
        monkeypatch.setattr(
            replay_module, "to_plain", lambda thing: worded.append(thing) or to_plain(thing)
        )
        assert list(writer.lines()) == expected
        again = [any(entry is thing for thing in worded) for entry in job.machine.story]
        assert again == [False] + [True] * (len(again) - 1)
