"""Each promise of README.md has its test on real processes; see tests/promises.py."""

from __future__ import annotations

import pathlib
import re

import pytest

from tests.promises import LIMITS, PROMISES

ROOT = pathlib.Path(__file__).parents[2]
README = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
ON_PROCESSES = ("tests/process/", "tests/examples/")


@pytest.mark.parametrize("words", [*PROMISES, *LIMITS])
def test_the_page_has_these_words_once(words: str) -> None:
    assert README.count(words) == 1


@pytest.mark.parametrize("heading", ["What is promised", "What is not"])
def test_no_point_of_a_list_is_left_out(heading: str) -> None:
    text = README.partition(f"## {heading} ")[2].partition(" ## ")[0]
    points = re.split(r"(?:^| )- (?=[A-Z`])", text)[1:]
    assert len(points) > 6, "they were not found"
    known = [*PROMISES, *LIMITS]
    assert [one for one in points if not any(words in one for words in known)] == []


def test_each_has_a_test_on_real_processes() -> None:
    for words, patterns in PROMISES.items():
        assert patterns, words
        assert all(pattern.startswith(ON_PROCESSES) for pattern in patterns), words
