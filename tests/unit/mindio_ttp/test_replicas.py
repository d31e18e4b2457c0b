"""Who holds what, who saves it, who sends it: against brute force."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mindio_ttp import replicas
from mindio_ttp.replicas import ReplicaGroup


@st.composite
def layouts(draw):
    """The groups of each rank of a world: equal groups, in any order of ranks."""
    parts, copies, count = (draw(st.integers(1, 4)) for _ in range(3))
    size = parts * copies
    ranks = draw(st.permutations(range(size * count)))
    found = [ReplicaGroup(tuple(ranks[at : at + size]), copies)
             for at in range(0, len(ranks), size)]  # fmt: skip
    return {rank: (group,) for group in found for rank in group.ranks}


def holders(declared, rank):
    """By the definition: the members of the group at every (L / copies)-th place."""
    (group,) = declared[rank]
    step = len(group.ranks) // group.copies
    at = group.ranks.index(rank)
    return {other for other in group.ranks if (group.ranks.index(other) - at) % step == 0}


@given(layouts())
def test_ranks_have_the_same_name_if_they_hold_the_same(declared):
    world = len(declared)
    assert replicas.misfit(declared, world) == ""
    names = {rank: replicas.shard_of(groups, rank, world) for rank, groups in declared.items()}
    for rank in declared:
        assert {other for other in declared if names[other] == names[rank]} == holders(
            declared, rank
        )
    assert all(len(name) <= 64 for name in names.values())


@given(layouts(), st.data())
def test_each_part_that_somebody_holds_is_saved_by_one_that_can(declared, data):
    able = data.draw(st.sets(st.sampled_from(sorted(declared)), min_size=1))
    for rank, groups in declared.items():
        ((kind, chosen),) = [one.values() for one in replicas.save_info(groups, able)]
        assert kind == 0
        assert set(chosen) <= able
        for other in groups[0].ranks:
            whole = holders(declared, other)
            assert len(whole & set(chosen)) == (1 if whole & able else 0), rank


@given(st.dictionaries(st.integers(0, 9), st.integers(10, 14), max_size=6), st.integers(1, 2))
def test_what_is_sent_is_what_is_received(sources, kinds):
    told = {rank: replicas.repair_info(rank, sources, kinds, 3, 0) for rank in range(16)}
    sent = [
        (kind, source, target)
        for info in told.values() if info is not None and info["repair_type"] == 0
        for kind, source, target in zip(info["type"], info["src"], info["dst"], strict=True)
    ]  # fmt: skip
    received = [
        (kind, source, target)
        for info in told.values() if info is not None and info["repair_type"] == 3
        for kind, source, target in zip(info["type"], info["src"], info["dst"], strict=True)
    ]  # fmt: skip
    assert sorted(sent) == sorted(received)
    assert sorted(received) == sorted(
        (kind, source, target) for target, source in sources.items() for kind in range(kinds)
    )
    everybody = sorted({*sources, *sources.values()})
    assert all(info["rank_list"] == everybody for info in told.values() if info is not None)
    assert {rank for rank, info in told.items() if info is not None} == set(everybody)


def test_a_name_tells_the_types_apart():
    dense, experts = ReplicaGroup((0, 2, 4, 6), 2), ReplicaGroup((2, 6), 2)
    assert replicas.shard_of((dense, experts), 2, 8) == "a0-1.m2-0"
    assert replicas.shard_of((ReplicaGroup((0, 1), 2),), 1, 2) == ""
    assert replicas.parse([{"rank_list": [3, 4], "replica_cnt": -1, "replica_shift": 0}]) == (
        ReplicaGroup((3, 4), 2),
    )


WHOLE = (ReplicaGroup((0, 1), 2),)


@pytest.mark.parametrize(("declared", "problem"), [
    ({0: WHOLE}, "rank 1 has not declared its replicas"),
    ({0: WHOLE, 1: ()}, "rank 1 has not declared its replicas"),
    ({0: WHOLE, 1: (*WHOLE, *WHOLE)}, "some ranks have declared MOE replicas"),
    ({0: WHOLE, 1: (ReplicaGroup((0, 1), 1),)}, "has not declared the same group"),
    ({0: (ReplicaGroup((1,), 1),), 1: (ReplicaGroup((1,), 1),)}, "lacks the rank itself"),
    ({rank: (ReplicaGroup((0, 0, 1), 3),) for rank in (0, 1)}, "names a rank twice"),
    ({rank: (ReplicaGroup((0, 1), 3),) for rank in (0, 1)}, "does not divide 2 ranks"),
    ({rank: (ReplicaGroup((0, 1), 0),) for rank in (0, 1)}, "replica_cnt 0"),
    ({rank: (ReplicaGroup((0, 1, 2), 3),) for rank in (0, 1)}, "rank 2 is in its rank_list"),
])  # fmt: skip
def test_a_declaration_that_does_not_fit_is_named_with_its_rank(declared, problem):
    assert problem in replicas.misfit(declared, 2)
