"""Checkpoints of state that is sharded.

Read by the same world to the last bit, and by another one.
"""

import functools

import pytest
import sharded_saving

pytestmark = pytest.mark.slow

KINDS = [
    "ddp",
    "fsdp",
    "rows",
    "hsdp",
    "tp",
    "tp_fsdp",
    "cast",
    "zero",
    "zero_pairs",
    "buckets",
    "stages",
    "grown",
    "flat",
    "flat_kept_orig",
    "flat_hybrid_orig",
    "flat_whole",
    "flat_pairs",
]


@pytest.fixture(scope="module")
def undisturbed(world, tmp_path_factory):
    """By kind: what each of four ranks has after a training that nothing stops. Trained once."""

    @functools.cache
    def train(kind):
        folder = tmp_path_factory.mktemp("none")
        return world.run(sharded_saving.train_and_save, kind, str(folder), 0)

    return train


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_world_goes_on_to_the_last_bit(world, tmp_path, undisturbed, kind):
    world.run(sharded_saving.train_and_save, kind, str(tmp_path / "some"), 2, 3)
    resumed = world.run(sharded_saving.resume, kind, str(tmp_path / "some"))
    for rank, (before, after) in enumerate(zip(undisturbed(kind), resumed, strict=True)):
        assert after["restored"].startswith("read version 2 from ")
        assert (after["named"], after["random"]) == (before["named"], before["random"])
        assert after["seen"] == before["seen"] == 4 * (1 + rank)


@pytest.mark.parametrize(("kind", "size", "other"), [
    ("zero", 4, "zero"), ("zero", 4, "ddp"), ("ddp", 4, "zero"), ("zero_pairs", 4, "zero"),
    ("zero", 2, "zero_pairs"),
    ("stages", 4, "stages"), ("stages", 2, "stages"), ("fsdp", 2, "tp_fsdp"),
    ("rows", 4, "rows"), ("rows", 2, "rows"),
    ("flat_hybrid", 4, "flat"),
])  # fmt: skip
def test_another_world_has_every_tensor(world, tmp_path, kind, size, other):
    saved = world.run(sharded_saving.train_and_save, kind, str(tmp_path), size=size)
    read = world.run(sharded_saving.resume, other, str(tmp_path), size=6 - size)
    assert {result["restored"].split(" from ")[0] for result in read} == {"read version 4"}
    before, after = _together(saved), _together(read)
    assert before == after
    ends = ("exp_avg_sq", "mean")
    assert any(".state." in name and name.endswith(ends) for name in before)


def _together(results):
    """All ranks' tensors; asserts that those with equal names are equal."""
    together = {}
    for result in results:
        for name, data in result["named"].items():
            assert together.setdefault(name, data) == data, name
    return together


def test_a_part_that_no_writer_has_is_refused(world, tmp_path):
    for said in world.run(sharded_saving.save_without, "zero", str(tmp_path), [0, 2]):
        assert said.startswith(
            "TrainState('train') cannot be saved: none of the ranks that write "
            "has the shard 'zero1/4-"
        )
    assert (
        world.run(sharded_saving.save_without, "zero_pairs", str(tmp_path), [0, 1]) == ["", ""] * 2
    )


def test_a_checkpoint_of_other_shard_ids_is_refused(world, tmp_path):
    world.run(sharded_saving.train_and_save, "stages", str(tmp_path), size=2)
    said = world.run(sharded_saving.resume_as, "stages", "3", str(tmp_path), size=2)
    assert all("TrainState('train') with shard_id '3' is not in " in text for text in said)


@pytest.mark.parametrize(
    ("kind", "size", "other", "held"),
    [
        ("flat", 4, "flat", "fsdp0/4"),
        ("flat", 4, "ddp", "fsdp0/4"),
        ("ddp", 4, "flat", ""),
        ("flat", 2, "flat_orig", "fsdp0/2"),
    ],
)
def test_what_fsdp1_has_sharded_is_refused_by_another_number_of_ranks_and_another_wrapping(
    world, tmp_path, kind, size, other, held
):
    world.run(sharded_saving.train_and_save, kind, str(tmp_path), size=size)
    folder = tmp_path / "step-000000000004"
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    for said in world.run(sharded_saving.resume_as, other, None, str(tmp_path), size=2):
        assert (f"is not in {folder}, which holds train") + (
            f" with shard_id '{held}-" if held else "."
        ) in said
        assert (
            f"Start the job as it was saved, by {size} ranks; nothing was changed or deleted"
        ) in said
    assert before == {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize(("kind", "orphaned"), [
    ("ddp", {0: 1}), ("fsdp", {1: 0, 2: 3}), ("fsdp", {1: 3, 2: 3}), ("hsdp", {0: 1, 2: 1}),
    ("tp_fsdp", {3: 0}), ("zero", {0: 2}), ("zero_pairs", {1: 0, 3: 0}),
    ("stages", {1: 2, 3: 2}), ("stages", {1: 2, 3: 0}), ("flat", {1: 0, 2: 3}),
    ("flat_orig", {3: 0}), ("flat_hybrid", {0: 1, 2: 1}), ("grown", {1: 2, 3: 0}),
])  # fmt: skip
@pytest.mark.parametrize("steps", [2, 3])
def test_parts_of_the_dead_are_saved_from_the_memory_of_their_node(
    world, tmp_path, undisturbed, kind, orphaned, steps
):
    """Those that have no living replica; of those that have one nothing is written twice.

    The living have version 2 live, or as a snapshot, too.
    """
    _is_saved_from_memory(world, tmp_path, undisturbed(kind), kind, orphaned, steps)


@pytest.mark.parametrize(
    ("kind", "orphaned", "replicated"),
    [
        ("hsdp", {1: 2}, (0, 3)),
        ("ddp", {}, (0, 1, 2)),
        ("stages", {1: 0}, (2, 3)),
        ("tp", {}, (1,)),
    ],
)
@pytest.mark.parametrize("steps", [2, 4])
def test_what_is_a_dead_ranks_alone_is_saved_too(
    world, tmp_path, undisturbed, kind, orphaned, replicated, steps
):
    """Generators and values are in its black box or, of an older version, with its snapshot."""
    _is_saved_from_memory(world, tmp_path, undisturbed(kind), kind, orphaned, steps, replicated)


def _is_saved_from_memory(world, tmp_path, undisturbed, kind, orphaned, steps, replicated=()):
    dead = {*orphaned, *replicated}
    for rank, said in enumerate(
        world.run(sharded_saving.dump_from_memory, kind, str(tmp_path), orphaned, steps, replicated)
    ):
        publisher = min(set(range(4)) - dead)
        assert said[0] == (("", "") if rank in dead else ("written", ""))
        assert said[1] == (
            ("published", str(tmp_path / "dump-000000000002")) if rank == publisher else ("", "")
        )
    resumed = world.run(sharded_saving.resume, kind, str(tmp_path))
    for before, after in zip(undisturbed, resumed, strict=True):
        assert after["restored"].startswith("read version 2 from ")
        assert (after["named"], after["random"], after["seen"]) == (
            before["named"],
            before["random"],
            before["seen"],
        )


@pytest.mark.parametrize("kind", ["rows", "cast"])
def test_a_snapshot_is_loaded_into_memory_of_the_same_placements(world, kind):
    """Memory that has not the shape of its parameter, which the next step goes on with."""
    for undisturbed, resumed in world.run(sharded_saving.load_own, kind, size=2):
        assert undisturbed == resumed


def test_a_snapshot_of_another_part_is_refused(world):
    """As of a torchrun that was started again with another script."""
    for rank, (first, again, other) in enumerate(
        world.run(sharded_saving.load_the_shards_of_others, size=4)
    ):
        assert first == again == ""
        assert other == (
            f"rank {rank}: its part of train.model.weight begins at ({6 - 2 * rank}, 0), and at "
            f"({2 * rank}, 0) in its snapshot of version 2: the model is sharded in another way "
            "than when that was made. Start the job as it was before"
        )
