"""Which ranks hold the same part of a state, as the tensors themselves tell it.

Real gloo groups of 2 and 4 processes.
"""

import pytest
import sharded
import torch
from torch import nn

from taskd.errors import StateError
from taskd.worker.objects import shards
from taskd.worker.objects.identity import identity_of
from taskd.worker.objects.roles import Roles

pytestmark = pytest.mark.slow

# For each kind of sharding, the ranks that hold the same.
GROUPS = {
    "ddp": [{0, 1, 2, 3}],
    "fsdp": [{0}, {1}, {2}, {3}],
    "hsdp": [{0, 2}, {1, 3}],
    "tp": [{0, 2}, {1, 3}],
    "tp_fsdp": [{0}, {1}, {2}, {3}],
    "zero": [{0}, {1}, {2}, {3}],
    "zero_pairs": [{0, 2}, {1, 3}],
    "flat": [{0}, {1}, {2}, {3}],
    "flat_kept_orig": [{0}, {1}, {2}, {3}],
    "flat_hybrid": [{0, 2}, {1, 3}],
    "flat_hybrid_orig": [{0, 2}, {1, 3}],
    "flat_whole": [{0, 1, 2, 3}],
    "flat_pairs": [{0}, {1}, {2}, {3}],
}
SAME = ("ddp", "flat_whole")


@pytest.mark.parametrize("kind", GROUPS)
def test_ranks_with_equal_identities_hold_equal_content(world, kind):
    results = world.run(sharded.identify, kind)
    for before, after, _ in results:
        assert before == after
        assert len(before) <= 64
    for left, (identity, _, content) in enumerate(results):
        group = next(group for group in GROUPS[kind] if left in group)
        for right, (other, _, other_content) in enumerate(results):
            assert (identity == other) == (right in group)
            # Averaged gradients make replicas of parameters equal; what is sharded differs.
            assert (content == other_content) == (right in group) or kind in SAME
    assert all((identity == "") == (kind in SAME) for identity, _, _ in results)


def test_identities_can_be_read(world):
    assert [
        identity.rsplit("-", 1)[0] for identity, _, _ in world.run(sharded.identify, "tp_fsdp")
    ] == ["dp0/2.tp0/2", "dp0/2.tp1/2", "dp1/2.tp0/2", "dp1/2.tp1/2"]
    assert [
        identity.rsplit("-", 1)[0] for identity, _, _ in world.run(sharded.identify, "zero", size=2)
    ] == ["zero0/2", "zero1/2"]
    assert [
        identity.rsplit("-", 1)[0] for identity, _, _ in world.run(sharded.identify, "flat_hybrid")
    ] == ["fsdp0/2", "fsdp1/2"] * 2
    assert [
        identity.rsplit("-", 1)[0]
        for identity, _, _ in world.run(sharded.identify, "flat_pairs", "stage 1")
    ] == ["stage 1.fsdp0/2on0", "stage 1.fsdp1/2on1", "stage 1.fsdp0/2on2", "stage 1.fsdp1/2on3"]
    long = world.run(
        sharded.identify,
        "hsdp",
        None,
        "a_name_of_a_mesh_dimension_that_is_longer_than_the_limit_of_a_shards_identity",
    )
    assert [len(identity) for identity, _, _ in long] == [64] * 4
    assert [long[0][0] == other for other, _, _ in long] == [True, False, True, False]


def test_one_shard_is_no_sharding(world):
    assert [identity for identity, _, _ in world.run(sharded.identify, "fsdp", size=1)] == [""]
    assert [identity for identity, _, _ in world.run(sharded.identify, "hsdp", size=2)] == ["", ""]


def test_a_shard_id_is_taken_as_it_is_and_what_is_sharded_within_is_added(world):
    roles = Roles.sort("train", {"model": nn.Linear(1, 1)})
    assert identity_of(roles, "stage 1") == ("stage 1", "stage 1")
    assert identity_of(roles) == ("", "")
    found = [identity for identity, _, _ in world.run(sharded.identify, "hsdp", "stage 1")]
    assert [identity.rsplit("-", 1)[0] for identity in found] == [
        "stage 1.dp0/2",
        "stage 1.dp1/2",
    ] * 2
    assert len(set(found)) == 2
    assert set(found).isdisjoint(
        identity for identity, _, _ in world.run(sharded.identify, "hsdp", "stage 2")
    )


def test_a_shard_id_is_a_short_text_or_a_number():
    roles = Roles()
    assert [identity_of(roles, given).part for given in (None, "", 0, 3, "stage 1")] == [
        "",
        "",
        "0",
        "3",
        "stage 1",
    ]
    for wrong, text in [(True, "not True"), (1.5, r"not 1\.5"), ("x" * 65, "at most 64")]:
        with pytest.raises(StateError, match=text):
            identity_of(roles, wrong)


@pytest.mark.parametrize("kind", ["ddp", "fsdp", "hsdp", "tp", "tp_fsdp"])
def test_spans_say_where_the_local_tensor_lies(world, kind):
    results = world.run(sharded.locate, kind)
    for found in results:
        for name, (shape, local, offsets, is_equal) in found.items():
            assert is_equal, (name, shape, local, offsets)
    empty = [found["1.scale"][1] for found in results if found] if kind == "fsdp" else []
    assert empty == ([(1, 1), (1, 1), (0, 1), (0, 1)] if kind == "fsdp" else [])


def test_a_plain_tensor_is_its_own_memory():
    tensor = torch.ones(2, 3, requires_grad=True)
    assert shards.local(tensor) is tensor
    assert shards.sharding_of(tensor) is None
    assert shards.spans(tensor) == ((2, 3), (0, 0))


def test_partial_sums_are_refused_by_name(world):
    for buffer, found, value in world.run(sharded.refuse_partial, size=2):
        assert "model.sum is a DTensor" in buffer
        assert "Partial" in found
        assert "DTensor is carried inside a module" in value


@pytest.mark.parametrize(
    ("mistake", "text"),
    [
        (
            "offload",
            (
                "model cannot be carried: the FullyShardedDataParallel 1 has "
                "CPUOffload(offload_params=True): use fully_shard with"
            ),
        ),
        ("buffers", "would make the buffer passes torch.bfloat16 in its first pass: build it so"),
        (
            "backward",
            (
                "has an optimizer in its backward pass, where a fault would tear parameters: step "
                "it after"
            ),
        ),
        (
            "within",
            (
                "model._flat_param belongs to a FullyShardedDataParallel module that is not "
                "registered: give that module"
            ),
        ),
        (
            "alone",
            (
                "optimizer.parameter 0 belongs to a FullyShardedDataParallel module that is not "
                "registered"
            ),
        ),
        (
            "tensors",
            (
                "other.weight is a DTensor, and other parameters are in FullyShardedDataParallel: "
                "use fully_shard"
            ),
        ),
    ],
)
def test_what_fsdp1_does_that_cannot_be_carried_is_refused_by_name(world, mistake, text):
    for said in world.run(sharded.refuse_units, mistake, size=2):
        assert text in said


def test_an_optimizer_that_steps_within_the_backward_pass_is_refused(world):
    for optimizer in world.run(sharded.refuse_optimizer, size=2):
        assert (
            "overlap_with_ddp=True writes parameters in the middle of the backward pass"
        ) in optimizer


def test_what_results_on_a_mesh_were_computed_from_is_forgotten_with_it() -> None:
    """Otherwise each recovery would leave its own."""
    import torch.distributed.tensor
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        torch.empty(2) + 1
    assert FakeTensorMode.cache
    shards.forget_meshes()
    assert not FakeTensorMode.cache
