"""How far apart the snapshots of taskd.mindspore are where the script does not say."""

from __future__ import annotations

import random

import pytest

from taskd.mindspore.spacing import LEAST_PART, PART, Spacing

RANKS = 4


def train(
    spacings: list[Spacing], commits: int, step_s: float, snapshot_s: float, rest_s: float
) -> list[int]:
    """As `TrainState.commit` does it; the spacing after each commit, the same on all ranks."""
    found = []
    for step in range(1, commits + 1):
        for one in spacings:
            is_made = step % one.steps == 0
            one.add(step_s, snapshot_s if is_made else None, rest_s)
        if all(one.is_due for one in spacings):
            rows = [one.own() for one in spacings]
            for one in spacings:
                one.adopt(rows)
        assert not any(one.is_due for one in spacings)
        (steps,) = {one.steps for one in spacings}
        found.append(steps)
    return found


@pytest.mark.parametrize(
    ("snapshot_s", "rest_s"),
    [(0.0001, 0.00002), (0.00045, 0.00003), (0.0018, 0.00004), (0.019, 3e-5)],
)
def test_commits_cost_less_than_one_percent_of_the_time(snapshot_s: float, rest_s: float) -> None:
    found = train([Spacing(None) for _ in range(RANKS)], 12, 0.030, snapshot_s, rest_s)
    assert found[:9] == [1] * 9
    steps = found[9]
    assert snapshot_s / steps + rest_s <= 0.01 * 0.030
    assert steps == 1 or snapshot_s / (steps - 1) + rest_s > PART * 0.030, "needlessly far apart"


def test_steps_that_are_too_short_for_any_commit_still_have_snapshots() -> None:
    (*_, steps) = train([Spacing(None)], 10, 0.001, 0.0005, 0.0001)
    assert steps == 125 == round(0.0005 / (LEAST_PART * 0.001))


def test_a_number_that_is_given_stays() -> None:
    one = Spacing(3)
    assert train([one], 1000, 0.030, 0.5, 0.0) == [3] * 1000


def test_the_ranks_agree_whatever_each_has_measured() -> None:
    chance = random.Random(7)
    spacings = [Spacing(None) for _ in range(RANKS)]
    slowest = 0.0
    for _ in range(10):
        for rank, one in enumerate(spacings):
            slowest = max(slowest, 0.001 * (rank + 1))
            one.add(0.030 + 0.001 * rank, 0.001 * (rank + 1), chance.uniform(1e-5, 2e-5))
    rows = [one.own() for one in spacings]
    changed = {one.adopt(rows) for one in spacings}
    assert changed == {True}
    (steps,) = {one.steps for one in spacings}
    assert 16 <= steps <= 19
    assert slowest / steps <= 0.01 * 0.030


def test_it_is_chosen_again_when_steps_are_others() -> None:
    one = Spacing(None)
    assert train([one], 79, 0.030, 0.003, 0.0)[9:] == [13] * 70
    found = train([one], 81, 0.300, 0.003, 0.0)
    assert (found[0], found[-2], found[-1]) == (13, 13, 2)


def test_the_first_step_and_the_first_snapshots_do_not_count() -> None:
    one = Spacing(None)
    train([one], 2, 60.0, 5.0, 1.0)
    assert train([one], 8, 0.030, 0.003, 0.0)[-1] == 13


def test_a_rank_that_makes_no_snapshots_wants_none_of_them_apart() -> None:
    one = Spacing(None)
    for _ in range(10):
        one.add(None, None, 0.0)
    assert one.is_due
    assert one.own() == [0, 0, 0]
    assert not one.adopt([one.own()])
    assert one.steps == 1
