"""The plan against brute force: every group has a live source of one step, or the answer is no."""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindx_elastic import strategy


@st.composite
def worlds(draw):
    """A partition of a few ranks, and the steps of some of them."""
    size = draw(st.integers(1, 8))
    order = draw(st.permutations(range(size)))
    cuts = sorted(draw(st.sets(st.integers(1, size - 1), max_size=size - 1))) if size > 1 else []
    groups = [order[a:b] for a, b in itertools.pairwise([0, *cuts, size])]
    steps = {
        rank: step
        for rank in range(size)
        if (step := draw(st.one_of(st.none(), st.integers(0, 3)))) is not None
    }
    return size, groups, steps


def brute_force(groups, steps):
    """The newest step for which each group has a rank, by trying every choice of sources."""
    best = None
    for choice in itertools.product(*groups):
        found = {steps.get(rank) for rank in choice}
        if len(found) == 1 and None not in found:
            step = found.pop()
            best = step if best is None else max(best, step)
    return best


@given(worlds())
def test_every_group_has_a_live_source_or_the_answer_is_no(world) -> None:
    size, groups, steps = world
    strategy.check_groups(groups, size)
    expected = brute_force(groups, steps)
    if expected is None:
        with pytest.raises(strategy.NoWayError):
            strategy.plan(groups, steps)
        return
    step, sources = strategy.plan(groups, steps)
    assert step == expected
    assert {frozenset(group) for group in sources} == {frozenset(group) for group in groups}
    for group, rank in sources.items():
        assert rank in group
        assert steps[rank] == step
    # As the documented script reads it.
    by_group = json.loads(strategy.restore_map(sources))
    listed = [int(rank) for rank in strategy.restore_ranks(sources).split(",")]
    assert sorted(set(by_group.values())) == listed
    for rank in range(size):
        assert [one for one in by_group if str(rank) in one.split(",")], rank


@given(worlds(), st.integers(0, 9))
def test_groups_that_do_not_fit_the_world_are_refused(world, other_size) -> None:
    size, groups, _ = world
    if other_size != size:
        with pytest.raises(strategy.NoWayError, match="do not fit"):
            strategy.check_groups(groups, other_size)
    with pytest.raises(strategy.NoWayError, match="do not fit"):
        strategy.check_groups([*groups, [0]], size)


def test_the_reason_is_said() -> None:
    with pytest.raises(strategy.NoWayError, match=r"none of the ranks 1, 3"):
        strategy.plan([[0, 2], [1, 3]], {0: 5})
    with pytest.raises(
        strategy.NoWayError, match=r"different steps .*0, 2: \[5\]; ranks 1, 3: \[4"
    ):
        strategy.plan([[0, 2], [1, 3]], {0: 5, 1: 4, 3: 6})
