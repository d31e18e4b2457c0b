"""Who is slow, and in what."""

from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from taskd.core.marks import Mark
from taskd.core.policy.stragglers import AGAIN_S, WINDOW_S, Stragglers, median_without

STEPS = 100


def marks(
    at: int, slow: dict[str, float] | None = None, rank: int = 2, incarnation: int = 0
) -> list[Mark]:
    """Four ranks after `at` windows; `slow` gives seconds per step of one rank in some phases."""
    found = []
    for each in range(4):
        per_step = {"forward": 0.02, "backward": 0.03, "optimizer": 0.005} | (
            (slow or {}) if each == rank else {}
        )
        times = tuple(
            (name, STEPS * at, STEPS * at * seconds) for name, seconds in per_step.items()
        )
        found.append(
            Mark(each, incarnation if each == rank else 0, 0, STEPS * at, "step", 0.0, times=times)
        )
    return found


def report(slow: dict[str, float], windows: int = 2) -> list[tuple[int, str, float]]:
    stragglers = Stragglers()
    said = []
    for window in range(windows):
        said += stragglers.note(100.0 + window * WINDOW_S, marks(window + 1, slow))
    return [(slow.rank, slow.phase, round(slow.slowdown, 2)) for slow in said]


def test_a_slow_rank_is_named_with_its_slowdown() -> None:
    assert report({"forward": 0.04}) == [(2, "forward", 2.0)]


def test_the_phases_in_which_others_are_waited_for_say_nothing() -> None:
    assert report({"backward": 0.09}) == []


@pytest.mark.parametrize("slow", [{}, {"forward": 0.028}, {"optimizer": 0.0077}, {"forward": 0.01}])
def test_small_differences_are_not_worth_a_word(slow: dict[str, float]) -> None:
    assert report(slow) == []


def test_it_is_said_once_in_a_while() -> None:
    per_report = int(AGAIN_S / WINDOW_S)
    assert len(report({"forward": 0.04}, windows=2 + per_report)) == 2


def test_a_rank_that_was_replaced_in_between_is_not_compared() -> None:
    stragglers = Stragglers()
    stragglers.note(100.0, marks(1))
    assert stragglers.note(100.0 + WINDOW_S, marks(2, {"forward": 0.4}, incarnation=1)) == []


def test_the_window_begins_with_the_first_times() -> None:
    stragglers = Stragglers()
    assert stragglers.note(90.0, [Mark(rank, 0, 0, 0, "step", 0.0) for rank in range(4)]) == []
    stragglers.note(100.0, marks(1))
    assert [
        slow.rank for slow in stragglers.note(100.0 + WINDOW_S, marks(2, {"forward": 0.04}))
    ] == [2]


def test_few_steps_tell_nothing() -> None:
    stragglers = Stragglers()
    stragglers.note(100.0, marks(1))
    assert stragglers.note(100.0 + WINDOW_S, marks(1, {"forward": 0.4})) == []


def test_marks_without_times_are_passed_over() -> None:
    stragglers = Stragglers()
    stragglers.note(100.0, marks(1))
    bare = [Mark(rank, 0, 0, 200, "step", 0.0) for rank in range(4)]
    assert stragglers.note(101.0, bare) == []
    assert [
        slow.rank for slow in stragglers.note(100.0 + WINDOW_S, marks(2, {"forward": 0.04}))
    ] == [2]


@given(st.lists(st.sampled_from([0.01, 0.02, 0.03, 0.5, 1.0]), min_size=2))
def test_the_median_of_the_others_is_that_of_the_others(seconds: list[float]) -> None:
    for index, own_s in enumerate(seconds):
        others = seconds[:index] + seconds[index + 1 :]
        assert median_without(sorted(seconds), own_s) == median(others)
