"""State that is sharded across a stop.

Kept in a new group and on a new mesh, received from the rank with the same shard.
"""

import functools

import pytest
import sharded

pytestmark = pytest.mark.slow

_plain_runs = {}


def plain(world, kind, size):
    """The run without a stop."""
    if (kind, size) not in _plain_runs:
        _plain_runs[kind, size] = world.run(sharded.run, kind, size=size)
    return _plain_runs[kind, size]


def same(left, right):
    return [(one["bytes"], one["random"], one["shard"]) for one in left] == [
        (one["bytes"], one["random"], one["shard"]) for one in right
    ]


STOPS = [(0, "forward"), (1, "backward"), (2, "forward"), (4, "before step")]


@pytest.mark.parametrize(
    ("kind", "size"),
    [
        ("fsdp", 4),
        ("warm", 2),
        ("offload", 2),
        ("mixed", 2),
        ("kept", 2),
        ("hsdp", 4),
        ("tp", 4),
        ("tp_fsdp", 4),
        ("zero", 2),
        ("buckets", 2),
        ("flat", 4),
        ("flat_orig", 4),
        ("flat_kept", 2),
        ("flat_kept_orig", 4),
        ("flat_mixed", 2),
        ("flat_whole", 2),
        ("flat_hybrid", 4),
        ("flat_hybrid_orig", 4),
    ],
)
def test_a_stopped_run_ends_with_the_same_bits(world, kind, size):
    results = world.run(sharded.run, kind, STOPS, size=size)
    assert same(results, plain(world, kind, size))
    for result in results:
        assert result["restored"] == [
            "nothing: fresh start",
            *(f"kept in memory at version {version}" for version, _ in STOPS),
        ]
        assert result["stopped"] == [place for _, place in STOPS]


@pytest.mark.parametrize(
    ("kind", "victims"),
    [
        ("hsdp", [0]),
        ("hsdp", [1, 2]),
        ("tp", [3]),
        ("zero_pairs", [1]),
        ("zero_pairs", [0, 3]),
        ("stages", [1]),
        ("stages", [2, 3]),
        ("flat_hybrid", [0]),
        ("flat_hybrid_orig", [1, 2]),
    ],
)
def test_a_lost_shard_is_received_from_its_replica(world, kind, victims):
    results = world.run(sharded.run, kind, STOPS, victims)
    assert same(results, plain(world, kind, 4))
    for rank, result in enumerate(results):
        assert result["restored"][1:] == [
            f"received version {version} from rank {(rank + 2) % 4}"
            if rank in victims
            else f"kept in memory at version {version}"
            for version, _ in STOPS
        ]


@pytest.mark.parametrize(
    "kind", ["hsdp", "tp", "zero_pairs", "stages", "flat_hybrid", "flat_hybrid_orig"]
)
def test_a_shard_that_was_torn_is_overwritten(world, kind):
    """Rank 1 keeps its process and its memory, with nines in it."""
    results = world.run(sharded.run, kind, [(2, "before step")], [], [1])
    assert same(results, plain(world, kind, 4))
    assert [result["restored"][1] for result in results] == [
        "kept in memory at version 2",
        "received version 2 from rank 3",
        "kept in memory at version 2",
        "kept in memory at version 2",
    ]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            "plain",
            (
                "model.0.weight is a plain tensor with (8, 8) on this rank now, and was of "
                "shape (8, 8), placed S(0) on mesh shard4 at shard"
            ),
        ),
        ("mesh", "model.0.weight is of shape (8, 8), placed R, S(0) on mesh replicate2.dp2 at dp"),
        ("shape", "model.3.weight has shape (5, 8) now and had (7, 8)"),
        ("flat", "holds the part 'fsdp"),
    ],
)
def test_another_sharding_is_an_error_that_names_the_tensor(world, change, text):
    for said in world.run(sharded.misfit, change):
        assert text in said


def test_a_shard_of_another_rank_is_refused_on_both_sides(world):
    for said in world.run(sharded.misfit_of_ranks, "fsdp", size=2):
        assert (
            "model.0.weight has local shape (4, 8) as a DTensor of shape (8, 8), placed "
            "S(0) on "
            "mesh shard2 at shard0/2 on rank 0 and local"
        ) in said
    for said in world.run(sharded.misfit_of_ranks, "zero", size=2):
        assert "rank 0 holds the shard 'zero0/2-" in said
        assert "and rank 1 'zero1/2-" in said
    for said in world.run(sharded.misfit_of_ranks, "flat", size=2):
        assert "rank 0 holds the shard 'fsdp0/2-" in said
        assert "and rank 1 'fsdp1/2-" in said


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("fsdp", "model.0.weight is a DTensor built before the fault"),
        ("zero", "optimizer was built before"),
        (
            "flat",
            (
                "model cannot be carried: the "
                "FullyShardedDataParallel module was built in "
                "a process group that is gone"
            ),
        ),
    ],
)
def test_objects_with_dead_process_groups_are_refused(world, kind, text):
    for said in world.run(sharded.keep_outside, kind, size=2):
        assert text in said
        assert "inside the recoverable function" in said


@pytest.mark.parametrize("place", ["forward", "backward", "before step", "unshard"])
def test_parking_frees_whole_parameters_and_optimizer_memory_changes_hands(world, place):
    for report, left, parked, moved in world.run(sharded.interrupt, place, size=2):
        assert (report.version, report.clean) == (1, True)
        assert left["count"]
        assert (left["bytes"], left["gradients"], left["shards"], left["registered"]) == (
            0,
            0,
            0,
            True,
        )
        assert moved["moments"] == parked["moments"]
        assert moved["bytes"] == parked["bytes"]
        assert moved["one memory"]


def test_a_sharded_parameter_written_by_a_stranger_is_noticed(world):
    for report, *_ in world.run(
        functools.partial(sharded.interrupt, changes_outside=True), "before step", size=2
    ):
        assert (report.version, report.clean) == (1, False)
        assert "not a registered optimizer" in report.reason


def test_results_of_a_new_generation_lie_on_its_own_mesh(world):
    assert world.run(sharded.compute_twice, size=2) == [[True, True]] * 2
