"""plan_cut: which version survives, who sends it to whom."""

import pytest

from taskd.core.commands import Move
from taskd.core.policy.cut import Copy, Cut, NoCut, plan_cut, plan_writers, who_advances


def moves(cut: Cut) -> dict[int, int | None]:
    return {move.rank: move.source for move in cut.moves}


TABLE = {
    "all at one version keep it": ([Copy(0, 5), Copy(1, 5)], 5, {}),
    "a replaced rank receives": ([Copy(0, 5), Copy(1, None, replaced=True)], 5, {1: 0}),
    "one behind receives the "
    "newest": ([Copy(0, 5), Copy(1, 6), Copy(2, 5)], 6, {0: 1, 2: 1}),
    "a torn copy is no source": ([Copy(0, 6, clean=False), Copy(1, 5)], 5, {0: 1}),
    "a torn copy of the same version "
    "receives": ([Copy(0, 5, clean=False), Copy(1, 5)], 5, {0: 1}),
    "nobody has anything": ([Copy(0, None), Copy(1, None)], None, {}),
    "version nought is a version": ([Copy(0, 0), Copy(1, None)], 0, {1: 0}),
    "receivers are spread over the sources": (
        [Copy(0, 5), Copy(1, None), Copy(2, None), Copy(3, 5), Copy(4, None), Copy(5, None)],
        5, {1: 0, 2: 3, 4: 0, 5: 3},
    ),
    "the order of reports does not "
    "matter": ([Copy(2, None), Copy(1, 5), Copy(0, 5)], 5, {2: 0}),
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
        "no clean copy of the state is left: ranks 0, 3 hold inconsistent copies (mostly: "
        "between optimizer.step() and commit(); move collectives after commit()): a WARNING of "
        "each such rank says why"
    )


def test_one_torn_copy_is_told_in_the_singular() -> None:
    cut = plan_cut([Copy(1, 5, clean=False)])
    assert isinstance(cut, NoCut)
    assert "rank 1 holds an inconsistent copy (mostly" in cut.reason


def test_committed_steps_that_nobody_holds_are_not_dropped_in_silence() -> None:
    cut = plan_cut([Copy(0, None), Copy(1, None)], committed=7)
    assert isinstance(cut, NoCut)
    assert "step 7 was committed" in cut.reason


def test_nothing_committed_means_nothing_lost() -> None:
    assert isinstance(plan_cut([Copy(0, None)], committed=0), Cut)


def test_it_says_whose_extras_are_missing() -> None:
    cut = plan_cut(
        [
            Copy(0, 5),
            Copy(1, None, replaced=True, box_versions=(4, 5)),
            Copy(2, None, replaced=True, box_versions=(4,)),
            Copy(3, None, replaced=True),
        ]
    )
    assert isinstance(cut, Cut)
    assert cut.lacking_extras == (2, 3)


def test_the_reason_stays_short_for_thousands_of_ranks() -> None:
    cut = plan_cut([Copy(rank, 5) for rank in range(4096)])
    assert isinstance(cut, Cut)
    assert cut.reason.endswith("14, 15 and 4080 more")


def test_steps_that_only_the_dead_had_committed_are_told_as_redone() -> None:
    cut = plan_cut([Copy(0, 5), Copy(1, None, replaced=True)], committed=6)
    assert isinstance(cut, Cut)
    assert (cut.version, cut.redone) == (5, 1)


def test_a_torn_copy_tells_what_was_committed() -> None:
    cut = plan_cut([Copy(0, 5), Copy(1, 6, clean=False)])
    assert isinstance(cut, Cut)
    assert (cut.version, cut.redone) == (5, 1)


# ------------------------------------------------------------------------------------------------
# sharded state

HINT = "TrainState(snapshot_every=k) keeps copies in node memory"


def hsdp(*versions: int | None, **more: object) -> list[Copy]:
    """2x2: ranks 0 and 2 hold shard 0, ranks 1 and 3 shard 1."""
    return [
        Copy(rank, version, replaced=version is None, shard=str(rank % 2), **more)
        for rank, version in enumerate(versions)
    ]


def fsdp(*versions: int | None, snapshots: tuple[int, ...] = ()) -> list[Copy]:
    """One shard per rank."""
    return [
        Copy(rank, version, replaced=version is None, shard=str(rank), snapshots=snapshots)
        for rank, version in enumerate(versions)
    ]


def test_hsdp_a_dead_rank_receives_from_the_replica_of_its_shard_and_nothing_is_redone() -> None:
    cut = plan_cut(hsdp(41, None, 41, 41), committed=41)
    assert isinstance(cut, Cut)
    assert (cut.version, cut.redone) == (41, 0)
    assert cut.moves == (Move(1, 3),)
    assert cut.reason == "version 41 is the newest that each of 2 shards has: 2 from live copies"


def test_hsdp_a_version_that_one_shard_never_reached_is_passed_over() -> None:
    cut = plan_cut(hsdp(41, 40, 40, 40), committed=41)
    assert isinstance(cut, Cut)
    assert (cut.version, cut.redone) == (40, 1)
    assert cut.moves == (Move(0, 2),)


def test_hsdp_mixed_versions_meet_at_the_newest_that_both_shards_have() -> None:
    cut = plan_cut(hsdp(41, 40, 40, 41))
    assert isinstance(cut, Cut)
    assert (cut.version, cut.moves) == (41, (Move(1, 3), Move(2, 0)))


def test_hsdp_a_torn_rank_receives() -> None:
    copies = hsdp(41, 41, 41, 41)
    copies[1] = Copy(1, 41, clean=False, shard="1")
    cut = plan_cut(copies)
    assert isinstance(cut, Cut)
    assert cut.moves == (Move(1, 3),)


def test_fsdp_everybody_goes_back_to_the_snapshot_of_the_dead() -> None:
    cut = plan_cut(fsdp(43, 43, None, 43, snapshots=(40, 36)), committed=43)
    assert isinstance(cut, Cut)
    assert (cut.version, cut.redone) == (40, 3)
    assert cut.moves == tuple(Move(rank, snapshot=40) for rank in range(4))
    assert cut.reason == (
        "version 40 is the newest that each of 4 shards has: 0 from live copies, 4 from snapshots:"
        " shard 0 (rank 0), shard 1 (rank 1), shard 2 (rank 2), shard 3 (rank 3)"
    )


def test_fsdp_a_live_copy_of_the_snapshot_s_version_is_kept() -> None:
    cut = plan_cut(fsdp(40, None, 40, snapshots=(36, 40)), committed=40)
    assert isinstance(cut, Cut)
    assert (cut.version, cut.redone) == (40, 0)
    assert cut.moves == (Move(1, snapshot=40),)
    assert cut.reason == (
        "version 40 is the newest that each of 3 shards has: 2 from live copies, "
        "1 from snapshots: shard 1 (rank 1)"
    )


def test_fsdp_a_snapshot_that_died_half_way_costs_one_snapshot() -> None:
    copies = fsdp(40, None, snapshots=(40, 36))
    copies[1] = Copy(1, None, shard="1", snapshots=(36,))
    cut = plan_cut(copies, committed=40)
    assert isinstance(cut, Cut)
    assert (cut.version, cut.redone) == (36, 4)
    assert cut.moves == (Move(0, snapshot=36), Move(1, snapshot=36))


def test_fsdp_without_the_loss_of_a_rank_nothing_goes_back() -> None:
    cut = plan_cut(fsdp(43, 43, snapshots=(40,)), committed=43)
    assert isinstance(cut, Cut)
    assert (cut.version, cut.moves) == (43, ())


def test_a_rank_without_a_snapshot_receives_from_those_of_its_shard_that_load_theirs() -> None:
    copies = [
        Copy(0, None, replaced=True, shard="0"), Copy(1, 9, clean=False, shard="0", snapshots=(8,)),
        Copy(2, 9, shard="1", snapshots=(8,)),
        Copy(3, 9, clean=False, shard="0", snapshots=(8,)), Copy(4, 9, clean=False, shard="0"),
        Copy(5, None, replaced=True, shard="0"),
    ]  # fmt: skip
    cut = plan_cut(copies)
    assert isinstance(cut, Cut)
    assert cut.moves == (
        Move(0, 1),
        Move(1, snapshot=8),
        Move(2, snapshot=8),
        Move(3, snapshot=8),
        Move(4, 3),
        Move(5, 1),
    )


def test_replicated_state_with_all_copies_torn_is_loaded_from_snapshots() -> None:
    cut = plan_cut(
        [Copy(0, 5, clean=False, snapshots=(4,)), Copy(1, None, replaced=True)], committed=5
    )
    assert isinstance(cut, Cut)
    assert (cut.version, cut.redone) == (4, 1)
    assert cut.moves == (Move(0, snapshot=4), Move(1, 0))
    assert cut.reason == (
        "version 4 is the newest snapshot, of rank 0, and no clean live copy is left"
    )


def test_a_snapshot_of_what_nobody_has_committed_is_ignored() -> None:
    cut = plan_cut(fsdp(5, None, snapshots=(7, 4)), committed=5)
    assert isinstance(cut, Cut)
    assert cut.version == 4


def test_where_nothing_else_is_known_snapshots_tell_what_was_committed() -> None:
    cut = plan_cut(fsdp(None, None, snapshots=(40, 36)))
    assert isinstance(cut, Cut)
    assert (cut.version, cut.redone) == (40, 0)


def test_a_rank_that_loads_its_own_snapshot_has_its_extras_from_there() -> None:
    copies = fsdp(43, None, None, snapshots=(40,))
    copies.append(Copy(3, None, replaced=True, shard="2"))
    cut = plan_cut(copies, committed=43)
    assert isinstance(cut, Cut)
    assert cut.lacking_extras == (3,)


REASONS = {
    "a shard is gone": (
        hsdp(41, None, 41, None),
        "no version of the state is complete: shard 1 (ranks 1, 3) has no live copy and no "
        "snapshot, while the other shard has version 41; " + HINT,
    ),
    "a shard is torn": (
        [*fsdp(41, 41, 41), Copy(3, 41, clean=False, shard="3")],
        "no version of the state is complete: shard 3 (rank 3) has no clean live copy and no "
        "snapshot, while the other 3 shards have version 41;"
        " rank 3 holds an inconsistent copy (mostly: between optimizer.step() and commit(); move "
        "collectives after commit()): a WARNING of each such rank says why; " + HINT,
    ),
    "one shard has no snapshot": (
        [*fsdp(43, 43, snapshots=(40, 36)), Copy(2, None, shard="2"),
        Copy(3, None, shard="3", snapshots=(40, 36))],
        "no version of the state is complete: shard 2 (rank 2) has no live copy and no snapshot, "
        "while the other 3 shards have version 40; " + HINT,
    ),
    "live versions do not meet": (
        fsdp(41, 40),
        "no version of the state is complete: shard 1 (rank 1) has live copies of version 40 only "
        "and no snapshot,"
        " while the other shard has version 41; " + HINT,
    ),
    "snapshots do not meet": (
        [Copy(0, None, shard="0", snapshots=(8, 6)),
        Copy(1, 9, clean=False, shard="1", snapshots=(5, 7))],
        (
            "no version of the state is complete: shard 1 (rank 1) has no clean live copy and "
            "snapshots of version 7, 5 only, while the other"
            " shard has version 8; rank 1 holds an inconsistent copy (mostly: between "
            "optimizer.step() and commit(); move collectives after commit()): a WARNING of each "
            "such rank says why;"
            " TrainState(snapshot_every=k) needs the same k on all ranks"
        ),
    ),
    "everything is gone": (
        fsdp(None, None),
        "no version of the state is complete: shard 0 (rank 0) has no live copy and no snapshot, "
        "shard 1 (rank 1) has no live copy and no snapshot; "
        + HINT,
    ),
    "a rank holds everything, the others a part": (
        [Copy(0, None), Copy(1, 41, shard="1")],
        "no version of the state is complete: the whole state (rank 0) has no live copy and no "
        "snapshot, while the other shard has version 41; "
        + HINT,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("copies", "reason"), REASONS.values(), ids=REASONS)
def test_why_there_is_no_cut(copies, reason) -> None:
    assert plan_cut(copies, committed=43) == NoCut(reason)


def test_the_reason_stays_short_for_thousands_of_shards() -> None:
    cut = plan_cut(fsdp(*[None] * 4096), committed=43)
    assert isinstance(cut, NoCut)
    assert "shard 3 (rank 3) has no live copy and no snapshot and 4092 more" in cut.reason
    assert len(cut.reason) < 1000


def test_a_lost_shard_of_a_job_that_has_committed_nothing_is_no_silent_fresh_start() -> None:
    assert isinstance(plan_cut(fsdp(0, None), committed=0), NoCut)
    assert plan_cut(fsdp(None, None), committed=0).version is None


# ------------------------------------------------------------------------------------------------
# the commit vote


def vote(*versions: int | None) -> list[Copy]:
    return hsdp(*versions, may_advance=True)


def test_nobody_rolls_forward_where_nobody_has_passed_the_vote() -> None:
    assert who_advances(vote(5, 5, None, 5), committed=5) == ()


def test_all_in_the_vote_roll_forward_when_one_has_passed_it() -> None:
    assert who_advances([*vote(5, 5, 5), Copy(3, 6, shard="1")]) == (0, 1, 2)


def test_one_that_passed_and_is_torn_now_has_passed() -> None:
    assert who_advances([*vote(5), Copy(1, 6, clean=False, shard="1")]) == (0,)


def test_one_that_passed_and_is_dead_now_has_passed() -> None:
    assert who_advances([*vote(5, 5, 5), Copy(3, None, shard="1")], committed=6) == (0, 1, 2)


def test_one_that_has_made_two_commits_since_has_passed() -> None:
    """Of two TrainStates that step before either is committed: one vote is for both."""
    world = [Copy(0, None, replaced=True, shard="0"), Copy(1, 7, shard="1"), *vote(5)]
    world[2] = Copy(2, 5, may_advance=True, shard="0")
    assert who_advances(world, committed=7) == (2,)
    assert isinstance(plan_cut([*world[:2], Copy(2, 7, shard="0")], 7), Cut)


def test_only_those_interrupted_in_the_vote_roll_forward() -> None:
    copies = [
        Copy(0, 6),
        Copy(1, 5),
        Copy(2, 5, may_advance=True),
        Copy(3, 5, clean=False, may_advance=True),
        Copy(4, 6, may_advance=True),
    ]
    assert who_advances(copies) == (2,)


def test_rolled_forward_nothing_is_redone() -> None:
    before = [*vote(5, 5, 5), Copy(3, None, replaced=True, shard="1")]
    after = [
        Copy(
            copy.rank, 6 if copy.rank in who_advances(before, 6) else copy.version, shard=copy.shard
        )
        for copy in before
    ]
    cut = plan_cut(after, committed=6)
    assert isinstance(cut, Cut)
    assert (cut.version, cut.redone) == (6, 0)


# ------------------------------------------------------------------------------------------------
# the writers of a dump


def dead(rank: int, **more: object) -> Copy:
    return Copy(rank, None, alive=False, **more)


def test_hsdp_each_shard_is_written_once_and_both_nodes_write() -> None:
    copies = [Copy(rank, 41, shard=str(rank % 4), node=rank // 4) for rank in range(8)]
    assert plan_writers(copies, 41) == {0: ("0",), 2: ("2",), 5: ("1",), 7: ("3",)}


def test_the_replica_of_a_dead_rank_writes() -> None:
    assert plan_writers(
        [
            Copy(0, 41, shard="0"),
            dead(1, shard="1"),
            Copy(2, 41, shard="0"),
            Copy(3, 41, shard="1"),
        ],
        41,
    ) == {0: ("0",), 3: ("1",)}


def test_a_neighbour_writes_the_snapshot_of_a_dead_rank() -> None:
    copies = [
        Copy(0, 43, shard="0", snapshots=(40,)),
        Copy(1, 43, clean=False, shard="1", snapshots=(40,)),
        dead(2, shard="2", snapshots=(40,), node=1),
        Copy(3, 43, shard="3", snapshots=(40,), node=1),
    ]  # fmt: skip
    assert plan_writers(copies, 40) == {0: ("0",), 1: ("1",), 3: ("2", "3")}


def test_one_that_is_idle_writes_for_the_dead() -> None:
    copies = [Copy(0, 40, shard="0"), Copy(1, 40, shard="0"), dead(2, shard="1", snapshots=(40,))]
    assert plan_writers(copies, 40) == {0: ("0",), 1: ("1",)}


def test_a_shard_that_several_nodes_can_write_gives_way_to_one_that_has_no_choice() -> None:
    copies = [
        Copy(0, 40, shard="b"), dead(1, shard="a", snapshots=(40,)),
        dead(2, shard="a", snapshots=(40,), node=1),
        Copy(3, 40, shard="b", clean=False, node=1),
    ]  # fmt: skip
    assert plan_writers(copies, 40) == {0: ("b",), 3: ("a",)}


def test_one_that_is_gone_is_no_source_whatever_it_held() -> None:
    copies = [
        Copy(0, 41, shard="0", alive=False, snapshots=(40,)),
        Copy(1, 41, shard="1", snapshots=(40,)),
    ]
    cut = plan_cut(copies)
    assert isinstance(cut, Cut)
    assert (cut.version, cut.redone, cut.moves) == (
        40,
        1,
        (Move(0, snapshot=40), Move(1, snapshot=40)),
    )
    assert plan_writers(copies, 40) == {1: ("0", "1")}
    assert isinstance(plan_writers(copies, 41), NoCut)


def test_a_large_shard_counts_for_more_than_several_small_ones() -> None:
    copies = [Copy(rank, None, shard=shard, snapshots=(40,)) for rank, shard in enumerate("abcd")]
    assert plan_writers(copies, 40, {"a": 1, "b": 1, "c": 3, "d": 1}) == {
        0: ("c",),
        1: ("a",),
        2: ("b",),
        3: ("d",),
    }
    copies = [*copies[:2], dead(2, shard="c", snapshots=(40,)), dead(3, shard="d", snapshots=(40,))]
    assert plan_writers(copies, 40, {"a": 1, "b": 1, "c": 3, "d": 1}) == {
        0: ("c",),
        1: ("a", "b", "d"),
    }


def test_a_shard_that_nobody_reaches_cannot_be_written() -> None:
    copies = [
        Copy(0, 40, shard="0"),
        dead(1, shard="1", snapshots=(40,), node=1),
        Copy(2, 39, shard="2"),
        Copy(3, 40, clean=False, shard="3"),
    ]
    assert plan_writers(copies, 40) == NoCut(
        "version 40 cannot be written: no live rank reaches a copy of shard 1 (rank 1), shard 2 "
        "(rank 2), shard 3 (rank 3)"
    )
