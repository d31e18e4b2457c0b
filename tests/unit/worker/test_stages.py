"""Parts of different models whose DTensors look alike are not taken for replicas."""

import functools
import re

import pytest
import stages

pytestmark = pytest.mark.slow

_NAMES = (
    "rank 0 and rank 2 have tensors of other names than each other: it cannot be saved. Give it a "
    "shard_id that is the same on the ranks of one part alone"
)


@pytest.mark.parametrize(
    ("kind", "learning_rates", "steps"),
    [
        ("stages", (0.1,), 0),
        ("seeded alike", (0.1,), 1),
        ("seeded alike", (0.0, 0.0, 0.1), 3),  # a warm-up: found in the fourth vote
    ],
)
def test_stages_without_a_shard_id_are_refused(world, tmp_path, kind, learning_rates, steps):
    """Before the first step; equal ones as soon as a step has made them differ."""
    train = functools.partial(stages.train, learning_rates=learning_rates)
    for reached, error, _, _ in world.run(train, kind, tmp_path):
        assert reached == steps
        assert error.startswith(
            "TrainState('train'): rank 0 and rank 2 would count as replicas, as their DTensors have"
        )
        assert "Give the TrainState a shard_id" in error


@pytest.mark.parametrize(("kind", "has_id"), [("stages", True), ("replicas", False)])
def test_stages_with_a_shard_id_and_replicas_are_trained_and_saved(world, tmp_path, kind, has_id):
    train = functools.partial(stages.train, has_id=has_id)
    for reached, error, saved, warnings in world.run(train, kind, tmp_path):
        assert (reached, error, warnings) == (5, "", [])
        assert saved == "save-000000000005"


def test_stages_of_other_names_are_trained_and_not_saved(world, tmp_path):
    """No rank could read them again: each would miss what the others have."""
    for rank, (reached, error, saved, warnings) in enumerate(
        world.run(stages.train, "names", tmp_path)
    ):
        assert (reached, error) == (5, "")
        assert "cannot be saved: rank 0 and rank 2 have tensors of other names" in saved
        assert warnings == ([f"TrainState('train'): {_NAMES}"] if rank == 0 else [])


def test_two_contents_of_one_piece_are_warned_of(world, tmp_path):
    """They may be statistics of replicas: that is no reason to save nothing. Once in a process."""
    lines = {}
    for kind in ("replicas", "stages"):
        ((path, lines[kind]), *_) = world.run(stages.publish_undetected, kind, tmp_path / kind)
        assert path == "save-000000000001"
    assert lines["replicas"] == []
    (line,) = lines["stages"]
    assert re.search(r"train\.model\.0\.(bias|weight) differs between rank 0 and rank 2", line)
    assert "shard_id" in line
