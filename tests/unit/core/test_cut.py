"""plan_cut: which version survives, who sends it to whom."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from taskd.core.commands import Move
from taskd.core.cut import Copy, Cut, NoCut, plan_cut


def moves(cut: Cut) -> dict[int, int | None]:
    return {move.rank: move.source for move in cut.moves}


TABLE = {
    "all at one version keep it": ([Copy(0, 5), Copy(1, 5)], 5, {0: None, 1: None}),
    "a replaced rank receives": ([Copy(0, 5), Copy(1, None, replaced=True)], 5, {0: None, 1: 0}),
    "one behind receives the newest": ([Copy(0, 5), Copy(1, 6), Copy(2, 5)], 6, {0: 1, 1: None, 2: 1}),
    "a torn copy is no source": ([Copy(0, 6, clean=False), Copy(1, 5)], 5, {0: 1, 1: None}),
    "a torn copy of the same version receives": ([Copy(0, 5, clean=False), Copy(1, 5)], 5, {0: 1, 1: None}),
    "nobody has anything": ([Copy(0, None), Copy(1, None)], None, {0: None, 1: None}),
    "version nought is a version": ([Copy(0, 0), Copy(1, None)], 0, {0: None, 1: 0}),
    "receivers are spread over the sources": (
        [Copy(0, 5), Copy(1, None), Copy(2, None), Copy(3, 5), Copy(4, None), Copy(5, None)],
        5, {0: None, 1: 0, 2: 3, 3: None, 4: 0, 5: 3},
    ),
    "the order of reports does not matter": ([Copy(2, None), Copy(1, 5), Copy(0, 5)], 5, {0: None, 1: None, 2: 0}),
}  # fmt: skip


@pytest.mark.parametrize(("copies", "version", "plan"), TABLE.values(), ids=TABLE)
def test_table(copies, version, plan) -> None:
    cut = plan_cut(copies)
    assert isinstance(cut, Cut)
    assert cut.version == version
    assert moves(cut) == plan


def test_all_torn_says_which_and_what_to_do() -> None:
    cut = plan_cut([Copy(0, 5, clean=False), Copy(1, None, replaced=True), Copy(3, 5, clean=False)])
    assert isinstance(cut, NoCut)
    assert cut.reason == (
        "no clean copy of the state is left: ranks 0, 3 were between optimizer.step() and commit()"
        " (move collectives after commit())"
    )


def test_one_torn_copy_is_told_in_the_singular() -> None:
    cut = plan_cut([Copy(1, 5, clean=False)])
    assert isinstance(cut, NoCut)
    assert "rank 1 was between" in cut.reason


def test_committed_steps_that_nobody_holds_are_not_dropped_in_silence() -> None:
    cut = plan_cut([Copy(0, None), Copy(1, None)], committed=7)
    assert isinstance(cut, NoCut)
    assert "step 7 was committed" in cut.reason


def test_nothing_committed_means_nothing_lost() -> None:
    assert isinstance(plan_cut([Copy(0, None)], committed=0), Cut)


def test_it_says_whose_extras_are_missing() -> None:
    cut = plan_cut([
        Copy(0, 5),
        Copy(1, None, replaced=True, box_versions=(4, 5)),
        Copy(2, None, replaced=True, box_versions=(4,)),
        Copy(3, None, replaced=True),
    ])
    assert isinstance(cut, Cut)
    assert cut.lacking_extras == (2, 3)


def test_the_reason_stays_short_for_thousands_of_ranks() -> None:
    cut = plan_cut([Copy(rank, 5) for rank in range(4096)])
    assert isinstance(cut, Cut)
    assert cut.reason.endswith("14, 15 and 4080 more")


COPIES = st.lists(
    st.tuples(st.one_of(st.none(), st.integers(0, 3)), st.booleans()), min_size=1, max_size=8
).map(lambda found: [Copy(rank, version, clean) for rank, (version, clean) in enumerate(found)])


@given(COPIES, st.one_of(st.none(), st.integers(0, 5)), st.randoms())
def test_properties(copies, committed, random) -> None:
    shuffled = list(copies)
    random.shuffle(shuffled)
    cut = plan_cut(copies, committed)
    assert cut == plan_cut(shuffled, committed)
    good = {copy.version for copy in copies if copy.version is not None and copy.clean}
    if not good:
        assert isinstance(cut, NoCut) or cut.version is None
        if any(copy.version is not None for copy in copies):
            assert isinstance(cut, NoCut)
        return
    assert isinstance(cut, Cut)
    assert cut.version == max(good)
    by_rank = {copy.rank: copy for copy in copies}
    assert [move.rank for move in cut.moves] == sorted(by_rank)
    loads: dict[int, int] = {}
    for move in cut.moves:
        holder = by_rank[move.rank if move.source is None else move.source]
        assert holder.version == cut.version
        assert holder.clean
        assert move.source != move.rank
        if move.source is not None:
            loads[move.source] = loads.get(move.source, 0) + 1
    sources = [copy.rank for copy in copies if copy.clean and copy.version == cut.version]
    assert max(loads.values(), default=0) - min((loads.get(rank, 0) for rank in sources), default=0) <= 1
    assert Move(sources[0]) in cut.moves
