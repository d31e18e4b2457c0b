"""The dump of tensor-parallel replicas after one death: whole, and equal to the weights.

Each replica has a mesh of its own, so that what several ranks of one hold is written by several
groups of ranks, which know nothing of each other.
"""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from taskd.checkpoint import pieces
from taskd.checkpoint.draft import Draft
from taskd.checkpoint.load import load
from taskd.checkpoint.names import Kind
from taskd.checkpoint.pieces import Held, Piece, Pieces, divide, holders_of, may_repeat
from taskd.checkpoint.publish import publish
from taskd.checkpoint.save import write

pytestmark = pytest.mark.slow

RANKS = range(8)
GENERATOR = torch.Generator().manual_seed(0)
WHOLE = {
    "plain": torch.randn(9, generator=GENERATOR),
    "columns": torch.randn(10, 3, generator=GENERATOR),
    "rows": torch.randn(3, 10, generator=GENERATOR),
    "norm": torch.randn(11, 5, generator=GENERATOR),
    "bias": torch.randn(7, generator=GENERATOR),
    "passes": torch.tensor(5.0),
}
# Sizes and names of the mesh; of a tensor the dimensions that it lies on, and how.
LAYOUTS = {
    "tp 4, dp 2": (
        {"dp": 2, "tp": 4},
        {
            "columns": {"tp": Shard(0)},
            "rows": {"tp": Shard(1)},
            "norm": {"tp": Replicate()},
            "bias": {"tp": Replicate()},
            "passes": {"tp": Replicate()},
        },
    ),
    "tp 2, hsdp 2 x 2": (
        {"replicate": 2, "shard": 2, "tp": 2},
        {
            "columns": {"replicate": Replicate(), "shard": Shard(0), "tp": Shard(1)},
            "rows": {"replicate": Replicate(), "shard": Shard(1)},
            "norm": {"replicate": Replicate(), "shard": Shard(0)},
            "bias": {"tp": Replicate()},
            "passes": {"replicate": Replicate(), "shard": Replicate()},
        },
    ),
}


@pytest.fixture(scope="module", params=LAYOUTS)
def states(request):
    """What each rank holds: in memory, and as its snapshot says it. Its groups are gone."""
    sizes, placed = LAYOUTS[request.param]
    found = []
    for rank in RANKS:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=len(RANKS))
        mesh = init_device_mesh("cpu", (*sizes.values(),), mesh_dim_names=(*sizes,))
        live = {
            name: _part(tensor, mesh[tuple(placed[name])], [*placed[name].values()])
            if name in placed
            else Held(tensor, tuple(RANKS))
            for name, tensor in WHOLE.items()
        }
        dist.destroy_process_group()
        found.append((live, {name: _stored(name, item, rank) for name, item in live.items()}))
    return found


def _part(tensor, mesh, placements):
    own = tensor
    for size, place, placement in zip(mesh.shape, mesh.get_coordinate(), placements, strict=True):
        if placement.is_shard():
            own = _chunk(own, size, placement.dim, place)
    return DTensor.from_local(
        own, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def _chunk(tensor, count, dim, index):
    step = -(-tensor.shape[dim] // count)
    start = min(index * step, tensor.shape[dim])
    return tensor.narrow(dim, start, min(step, tensor.shape[dim] - start)).contiguous()


def _stored(name, item, rank):
    if isinstance(item, Held):
        return item
    is_repeated = may_repeat(item, rank, len(RANKS))
    return Held(replace(Piece.of(item), may_repeat=is_repeated), holders_of(name, item, rank))


@pytest.fixture(params=["whole", "in parts"])
def size(request, monkeypatch):
    """Tensors are written in one piece, or in several."""
    if request.param == "in parts":
        monkeypatch.setattr(pieces, "MAX_PIECE_BYTES", 48)


@pytest.mark.usefixtures("size")
@pytest.mark.parametrize("stored", [(), RANKS, RANKS[::2]], ids=["memory", "snapshots", "both"])
def test_what_all_but_one_write_is_the_whole_and_nothing_overlaps(states, stored):
    for victim in RANKS:
        _assert_whole(_written(states, {victim}, stored))


@pytest.mark.usefixtures("size")
@pytest.mark.parametrize("stored", [(), RANKS], ids=["memory", "snapshots"])
def test_what_is_left_in_the_memory_of_a_node_fits_in(states, stored):
    """A replica is dead, and so is a rank of the other: the snapshot of its twin is written."""
    _assert_whole(_written(states, {0, 1, 2, 3, 5}, stored, orphans={1: 4}))


def test_the_dump_is_published_without_one_of_the_ranks_and_loaded(tmp_path, states):
    """Some write from memory, others from snapshots."""
    for victim in RANKS[::3]:
        writers = tuple(rank for rank in RANKS if rank != victim)
        draft = Draft(tmp_path, "job", Kind.DUMP, 1, f"a{victim}", writers, 1, len(RANKS))
        for rank, state in _states_of(states, {victim}, RANKS[::2]).items():
            write(draft, rank, state)
        target = {name: torch.zeros_like(tensor) for name, tensor in WHOLE.items()}
        load(publish(draft), target)
        for name, tensor in WHOLE.items():
            assert torch.equal(target[name], tensor), (victim, name)


def test_replicas_of_one_shard_divide_it_among_them(states, monkeypatch):
    """Whoever else writes it cuts it in the same places."""
    monkeypatch.setattr(pieces, "MAX_PIECE_BYTES", 20)
    norm = states[0][1]["norm"]
    written = [
        [
            piece.offsets[0]
            for name, piece in divide(states[rank][0], rank, RANKS, len(RANKS))[0]
            if name == "norm"
        ]
        for rank in norm.holders
    ]
    assert sorted(row for rows in written for row in rows) == [*range(len(norm.value.tensor))]
    assert all(written)


def _states_of(states, dead, stored, orphans=()):
    """What each writer gives. `stored`: those that write from snapshots."""
    writers = {*RANKS} - dead
    found = {rank: dict(states[rank][rank in stored]) for rank in sorted(writers)}
    for other in orphans:
        state = found[orphans[other]]
        for name, held in states[other][1].items():
            if not {*held.holders} & writers:  # as StoredSnapshot.orphans
                state[name] = Pieces((state[name], held.value))
    return found


def _written(states, dead, stored, orphans=()):
    given = _states_of(states, dead, stored, orphans)
    return [
        found
        for rank, state in given.items()
        for found in divide(state, rank, tuple(given), len(RANKS))[0]
    ]


def _assert_whole(written):
    """The same piece may come twice, as a checkpoint has it once."""
    boxes = {
        (name, piece.offsets, tuple(piece.tensor.shape)): piece.tensor for name, piece in written
    }
    covered = {name: torch.zeros(tensor.shape, dtype=torch.int) for name, tensor in WHOLE.items()}
    for (name, offsets, shape), content in boxes.items():
        box = tuple(slice(start, start + n) for start, n in zip(offsets, shape, strict=True))
        assert torch.equal(WHOLE[name][box], content), name
        covered[name][box] += 1
    for name, counts in covered.items():
        assert (counts == 1).all(), name
