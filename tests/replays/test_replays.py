"""Stories of past bugs: the machines of today decide as they did when each bug had been corrected.

README.md in this folder says which story guards against what, and how one is recorded.
"""

import pathlib
import re

import pytest

from taskd.core.commands import Command
from taskd.core.policy import stagnation
from taskd.core.story import Note
from taskd.replay import load_lines, replay
from tests.replays import record

README = record.STORIES.parent / "README.md"
STORIES = sorted(record.STORIES.glob("*.jsonl"))


def differences(path: pathlib.Path) -> list[str]:
    return replay(*load_lines(path.read_text(encoding="utf-8").splitlines()))


@pytest.mark.parametrize("path", STORIES, ids=lambda path: path.stem)
def test_the_machine_decides_as_it_did(path: pathlib.Path) -> None:
    machine, entries = load_lines(path.read_text(encoding="utf-8").splitlines())
    assert any(isinstance(entry, Command) for entry in entries), (
        "a story without a decision guards nothing"
    )
    assert replay(machine, entries) == []
    machine.check()


def test_the_page_says_of_each_story_what_it_guards_against() -> None:
    named = re.findall(r"(?m)^- `(\w+)`:", README.read_text(encoding="utf-8"))
    assert sorted(named) == [path.stem for path in STORIES]


def test_with_the_bug_of_early_deaths_the_whole_group_is_restarted(monkeypatch) -> None:
    """Only live ranks counted as declared, and none had come to the decorator yet."""
    path = record.STORIES / "death_before_others_declared.jsonl"
    machine, _ = load_lines(path.read_text(encoding="utf-8").splitlines())
    as_before = property(
        lambda self: any(member.declared and member.is_live for member in self.members.values())
    )
    assert differences(path) == []
    monkeypatch.setattr(type(machine.membership), "is_declared", as_before)
    then, _, now = differences(path)[0].partition("now:")
    assert "ReplaceWorker" in then
    assert "RestartGroup" not in then
    assert "RestartGroup" in now


def test_with_the_bug_of_texts_that_vary_the_job_spins(monkeypatch) -> None:
    """Each exception was a new one, and nobody counted recoveries without a new step."""
    path = record.STORIES / "exceptions_that_differ_each_time.jsonl"
    assert differences(path) == []
    monkeypatch.setattr(stagnation, "OWN_LIMIT", 10**9)
    found = differences(path)
    assert "GiveUp" in found[-1].partition("now:")[0]
    assert "GiveUp" not in found[-1].partition("now:")[2]


def heard_and_decided(path: pathlib.Path) -> list[object]:
    _, entries = load_lines(path.read_text(encoding="utf-8").splitlines())
    return [entry for entry in entries if not isinstance(entry, Note)]


@pytest.mark.parametrize("path", STORIES, ids=lambda path: path.stem)
def test_a_story_recorded_again_is_the_same_story(path: pathlib.Path, tmp_path) -> None:
    copy = tmp_path / path.name
    copy.write_bytes(path.read_bytes())
    assert record.again(copy) == []
    assert heard_and_decided(copy) == heard_and_decided(path)


def test_a_story_recorded_again_has_the_new_decisions(tmp_path, monkeypatch) -> None:
    copy = tmp_path / "story.jsonl"
    copy.write_bytes((record.STORIES / "exceptions_that_differ_each_time.jsonl").read_bytes())
    monkeypatch.setattr(stagnation, "OWN_LIMIT", 10**9)
    assert record.again(copy)
    assert differences(copy) == []
    assert "GiveUp" not in {type(entry).__name__ for entry in heard_and_decided(copy)}


@pytest.mark.parametrize("node", [None, 0])
def test_a_random_history_is_recorded_as_a_story(tmp_path, node) -> None:
    path = tmp_path / "history.jsonl"
    record.history(20261122, 21261, path, node)
    assert differences(path) == []
