"""plan_cut, who_advances and plan_writers against what trying everything finds, on small worlds."""

import itertools
from collections import Counter

import hypothesis.strategies as st
from hypothesis import assume, given

from taskd.core.commands import Move
from taskd.core.policy.cut import (
    Copy,
    Cut,
    NoCut,
    plan_cut,
    plan_orphans,
    plan_writers,
    who_advances,
)

VERSIONS = range(5)
SHARDS = ("", "1", "2")


@st.composite
def worlds(
    draw: st.DrawFn, *, shards: tuple[str, ...] = SHARDS, versions: range = VERSIONS
) -> list[Copy]:
    """Up to 6 ranks, each with any state at all.

    Few `versions` and `shards` make it likely that they meet.
    """
    some = st.lists(st.sampled_from(versions), max_size=2).map(tuple)
    return [
        Copy(
            rank, draw(st.none() | st.sampled_from(versions)), clean=draw(st.booleans()),
            replaced=draw(st.booleans()), box_versions=draw(some),
            shard=draw(st.sampled_from(shards)), snapshots=draw(some),
            may_advance=draw(st.booleans()), node=draw(st.integers(0, 1)),
            alive=draw(st.integers(0, 3)) > 0,
        )
        for rank in range(draw(st.integers(1, 6)))
    ]  # fmt: skip


COMMITTED = st.none() | st.sampled_from(VERSIONS)


def newest_known(world: list[Copy], committed: int | None) -> int:
    known = [
        version for version in (committed, *(copy.version for copy in world)) if version is not None
    ]
    return max(known or [version for copy in world for version in copy.snapshots], default=0)


def has_live(copy: Copy, version: int) -> bool:
    return copy.alive and copy.clean and copy.version == version


def has_source(world: list[Copy], shard: str, version: int) -> bool:
    return any(
        copy.shard == shard and (has_live(copy, version) or version in copy.snapshots)
        for copy in world
    )


def best_version(world: list[Copy], newest: int) -> int | None:
    """By trying all."""
    shards = {copy.shard for copy in world}
    complete = [
        version
        for version in range(newest + 1)
        if all(has_source(world, shard, version) for shard in shards)
    ]
    return max(complete, default=None)


@given(worlds(), COMMITTED)
def test_the_newest_version_of_which_every_shard_has_a_source_wins(world, committed) -> None:
    cut = plan_cut(world, committed)
    newest = newest_known(world, committed)
    best = best_version(world, newest)
    if best is not None:
        assert isinstance(cut, Cut)
        assert (cut.version, cut.redone) == (best, newest - best)
    elif newest == 0 and all(copy.version is None for copy in world if copy.alive):
        assert isinstance(cut, Cut)
        assert (cut.version, cut.redone, cut.moves) == (None, 0, ())
    else:
        assert isinstance(cut, NoCut)


@given(worlds(), COMMITTED)
def test_each_rank_keeps_a_whole_copy_or_its_move_leads_to_one(world, committed) -> None:
    cut = plan_cut(world, committed)
    assume(isinstance(cut, Cut) and cut.version is not None)
    of_rank = {copy.rank: copy for copy in world}
    kept = [copy.rank for copy in world if has_live(copy, cut.version)]
    assert [move.rank for move in cut.moves] == sorted(of_rank.keys() - kept)
    move_of = {rank: Move(rank) for rank in kept} | {move.rank: move for move in cut.moves}
    for move in move_of.values():
        copy = of_rank[move.rank]
        replicas = [other for other in world if other.shard == copy.shard]
        live = [other.rank for other in replicas if has_live(other, cut.version)]
        assert move.source is None or move.snapshot is None
        if move.source is not None:
            assert move.source in [other.rank for other in replicas]
            # it has the version itself: it does not receive
            assert move_of[move.source].source is None
        if has_live(copy, cut.version):
            assert (move.source, move.snapshot) == (None, None)
        elif live:
            assert move.source in live
        elif cut.version in copy.snapshots:
            assert move.snapshot == cut.version
        else:
            assert move_of[move.source].snapshot == cut.version


@given(worlds(), COMMITTED)
def test_nobody_dirty_or_dead_is_a_source(world, committed) -> None:
    cut = plan_cut(world, committed)
    assume(isinstance(cut, Cut) and cut.version is not None)
    dirty = {
        copy.rank for copy in world if copy.version is not None and not (copy.clean and copy.alive)
    }
    loads = {move.rank for move in cut.moves if move.snapshot is not None}
    assert not dirty & ({move.source for move in cut.moves} - loads)
    assert dirty <= {move.rank for move in cut.moves}
    assert not dirty & {move.rank for move in cut.moves if move.source is None} - loads


@given(worlds(shards=("", "1")), COMMITTED)
def test_receivers_are_spread_over_the_sources_of_their_shard(world, committed) -> None:
    cut = plan_cut(world, committed)
    assume(isinstance(cut, Cut) and cut.version is not None)
    shard_of = {copy.rank: copy.shard for copy in world}
    for shard in set(shard_of.values()):
        moves = [move for move in cut.moves if shard_of[move.rank] == shard]
        kept = [rank for rank in shard_of if rank not in {move.rank for move in cut.moves}]
        loads = [move.rank for move in moves if move.source is None]
        sources = [rank for rank in kept if shard_of[rank] == shard] or loads
        receivers = Counter(move.source for move in moves if move.source is not None)
        counts = [receivers[source] for source in sources]
        assert max(counts) - min(counts) <= 1


@given(worlds(), COMMITTED)
def test_the_extras_of_those_that_have_none_for_the_version_are_told(world, committed) -> None:
    cut = plan_cut(world, committed)
    assume(isinstance(cut, Cut) and cut.version is not None)
    loads = {move.rank for move in cut.moves if move.snapshot is not None}
    assert set(cut.lacking_extras) == {
        copy.rank
        for copy in world
        if copy.replaced and cut.version not in copy.box_versions and copy.rank not in loads
    }


@given(worlds(), COMMITTED, st.randoms())
def test_the_order_of_reports_changes_nothing(world, committed, random) -> None:
    shuffled = list(world)
    random.shuffle(shuffled)
    assert plan_cut(world, committed) == plan_cut(shuffled, committed)
    assert who_advances(world, committed) == who_advances(shuffled, committed)
    for version in VERSIONS:
        assert plan_writers(world, version) == plan_writers(shuffled, version)


@given(worlds(), COMMITTED)
def test_who_advances_has_somebody_ahead_and_nobody_else_does(world, committed) -> None:
    forward = who_advances(world, committed)
    for copy in world:
        known = [committed, *(other.version for other in world)]
        passed = copy.version is not None and any(
            version is not None and version > copy.version for version in known
        )
        assert (copy.rank in forward) == (passed and copy.clean and copy.alive and copy.may_advance)


@given(worlds(), COMMITTED)
def test_a_reason_names_ranks_of_the_shards_that_lack_something(world, committed) -> None:
    cut = plan_cut(world, committed)
    assume(isinstance(cut, NoCut) and len({copy.shard for copy in world}) > 1)
    for shard in {copy.shard for copy in world}:
        ranks = [copy.rank for copy in world if copy.shard == shard]
        if not any(has_source(world, shard, version) for version in VERSIONS):
            assert (
                f"({'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}) has no"
            ) in cut.reason


# ------------------------------------------------------------------------------------------------
# the writers of a dump


def may_write(world: list[Copy], shard: str, version: int) -> list[int]:
    live = [copy.rank for copy in world if copy.shard == shard and has_live(copy, version)]
    nodes = {copy.node for copy in world if copy.shard == shard and version in copy.snapshots}
    return live or [copy.rank for copy in world if copy.alive and copy.node in nodes]


def least_load(world: list[Copy], version: int) -> int:
    """The fewest shards that the busiest writer can have, by trying all."""
    choices = [may_write(world, shard, version) for shard in {copy.shard for copy in world}]
    return min(max(Counter(ranks).values()) for ranks in itertools.product(*choices))


@given(worlds(versions=range(2)), st.integers(0, 1))
def test_each_shard_is_written_once_by_one_that_can_and_the_busiest_has_as_little_as_possible(
    world, version
) -> None:
    shards = {copy.shard for copy in world}
    written = plan_writers(world, version)
    if not all(may_write(world, shard, version) for shard in shards):
        assert isinstance(written, NoCut)
        return
    assert sorted(shard for mine in written.values() for shard in mine) == sorted(shards)
    for rank, mine in written.items():
        assert all(rank in may_write(world, shard, version) for shard in mine)
    assert max(len(mine) for mine in written.values()) == least_load(world, version)


@given(worlds(), st.sampled_from(VERSIONS), st.data())
def test_each_shard_without_a_writer_is_seen_to_once_from_the_memory_of_a_writer_s_node(
    world, version, data
) -> None:
    able = [
        copy.rank
        for copy in world
        if copy.alive and (has_live(copy, version) or version in copy.snapshots)
    ]
    writers = data.draw(st.sets(st.sampled_from(able))) if able else set()
    of_rank = {copy.rank: copy for copy in world}
    orphaned = {copy.shard for copy in world} - {of_rank[rank].shard for rank in writers}
    within_reach = {
        copy.shard
        for copy in world
        if version in copy.snapshots and copy.node in {of_rank[rank].node for rank in writers}
    }
    pairs = plan_orphans(world, version, writers)
    if orphaned - within_reach:
        assert isinstance(pairs, NoCut)
        return
    assert sorted(of_rank[rank].shard for rank, _ in pairs) == sorted(orphaned)
    for rank, writer in pairs:
        assert writer in writers
        assert version in of_rank[rank].snapshots
        assert of_rank[rank].node == of_rank[writer].node
