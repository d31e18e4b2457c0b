"""A world of DTensors, FSDP2 and tensor-parallel, that saves or loads.

Reshard.py save|load FOLDER WORLD. Forks its ranks.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from taskd.checkpoint.draft import Draft
from taskd.checkpoint.load import load
from taskd.checkpoint.names import Kind
from taskd.checkpoint.pieces import Piece
from taskd.checkpoint.publish import publish
from taskd.checkpoint.save import write

# What is left when rank 2 of 4 is dead: each shard is held by two ranks, or each rank holds all.
REPLICATED = ("fsdp.0.weight", "fsdp.0.bias", "mesh2.first", "replicated", "plain", "scalar")


def values() -> dict[str, torch.Tensor]:
    """The whole tensors, the same everywhere."""
    generator = torch.Generator().manual_seed(5)
    shapes = {
        "fsdp.0.weight": (37, 12),
        "fsdp.0.bias": (37,),
        "fsdp.2.weight": (8, 37),
        "fsdp.2.bias": (8,),
        "mesh2.first": (10, 6),
        "mesh2.second": (9, 4),
        "tp.0.weight": (16, 12),
        "tp.1.weight": (12, 16),
        "uneven": (3, 5),
        "replicated": (64, 3),
        "plain": (50, 7),
        "scalar": (),
    }
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def build(
    world: int, whole: dict[str, torch.Tensor], *, is_filled: bool
) -> dict[str, torch.Tensor]:
    flat = init_device_mesh("cpu", (world,))
    rows = max(1, world // 2)
    two = init_device_mesh("cpu", (world // rows, rows), mesh_dim_names=("replicate", "shard"))
    dense = init_device_mesh("cpu", (rows, world // rows), mesh_dim_names=("dp", "tp"))
    state: dict[str, torch.Tensor] = {}

    model = nn.Sequential(nn.Linear(12, 37), nn.ReLU(), nn.Linear(37, 8))
    fully_shard(model[0], mesh=two)  # HSDP
    fully_shard(model, mesh=flat)  # FSDP2
    state.update({f"fsdp.{name}": tensor for name, tensor in model.state_dict().items()})
    blocks = nn.Sequential(nn.Linear(12, 16, bias=False), nn.Linear(16, 12, bias=False))
    parallelize_module(blocks, dense["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    # both: the first weight is sharded twice along one dimension
    fully_shard(blocks, mesh=dense["dp"])
    state.update({f"tp.{name}": tensor for name, tensor in blocks.state_dict().items()})
    state["mesh2.first"] = distribute_tensor(torch.zeros(10, 6), two, [Replicate(), Shard(1)])
    state["mesh2.second"] = distribute_tensor(torch.zeros(9, 4), two, [Shard(0), Shard(1)])
    state["uneven"] = distribute_tensor(torch.zeros(3, 5), flat, [Shard(0)])
    state["replicated"] = distribute_tensor(torch.zeros(64, 3), flat, [Replicate()])
    state["plain"], state["scalar"] = torch.zeros(50, 7), torch.zeros(())
    assert state.keys() == whole.keys()
    with torch.no_grad():
        for name, tensor in state.items():
            source = (
                distribute_tensor(whole[name], tensor.device_mesh, tensor.placements)
                if isinstance(tensor, DTensor) and name[:2] != "tp"
                else None
            )
            if name[:2] == "tp":
                fill_strided(tensor, whole[name], is_filled)
            elif is_filled:
                (tensor.to_local() if source is not None else tensor).copy_(
                    source.to_local() if source is not None else whole[name]
                )
            else:
                (tensor.to_local() if source is not None else tensor).fill_(float("nan"))
    return state


def fill_strided(tensor: DTensor, whole: torch.Tensor, is_filled: bool) -> None:
    """Independent of the code under test.

    Full_tensor() of what is filled is compared with the whole.
    """
    local = tensor.to_local()
    if not is_filled:
        local.fill_(float("nan"))
        return
    mesh = tensor.device_mesh
    dp, tp = mesh.get_coordinate()
    dimension = 0 if tensor.placements[1].dim == 0 else 1
    part = (
        whole.chunk(mesh.size(1), dimension)[tp].chunk(mesh.size(0), 0)[dp]
        if mesh.ndim == 2
        else whole
    )
    local.copy_(part)
    assert torch.equal(tensor.full_tensor(), whole)


def compare(state: dict[str, torch.Tensor], whole: dict[str, torch.Tensor]) -> None:
    for name, tensor in state.items():
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        assert torch.equal(full, whole[name]), name


def run(command: str, folder: Path, rank: int, world: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    whole = values()
    if command == "save":
        state = build(world, whole, is_filled=True)
        draft = Draft(folder, "job", Kind.PERIODIC, 1, "a", tuple(range(world)), 0, world)
        write(draft, rank, state, {f"random/{rank}": bytes([rank])})
        dist.barrier()
        if rank == 0:
            publish(draft)
        # A dump when the groups are gone and rank 2 is dead: survivors write their shards without a
        # collective; where nobody holds what it had, rank 3 has it from elsewhere.
        dist.barrier()
        snapshot = torch.zeros(1, 5)
        if rank == 2:
            dist.send(state["uneven"].to_local(), 3)
        if rank == 3:
            dist.recv(snapshot, 2)
        dist.destroy_process_group()
        if rank == 2:
            return
        draft = Draft(folder, "job", Kind.DUMP, 2, "b", (0, 1, 3), 1, world, "rank 2: SIGKILL")
        kept = {name: state[name] for name in REPLICATED}
        # Four ranks share three rows: rank 3 has none of its own.
        kept["uneven"] = Piece((3, 5), (2, 0), snapshot) if rank == 3 else Piece.of(state["uneven"])
        write(draft, rank, kept)
        if rank == 0:
            while draft.missing():
                time.sleep(0.01)
            publish(draft)
    else:
        state = build(world, whole, is_filled=False)
        loaded = load(folder / "step-000000000001", state)
        compare(state, whole)
        assert loaded == {f"random/{one}": bytes([one]) for one in range(4)}
        dumped = {
            name: tensor
            for name, tensor in build(world, whole, is_filled=False).items()
            if name in {*REPLICATED, "uneven"}
        }
        load(folder / "dump-000000000002", dumped)
        compare(dumped, whole)
        dist.destroy_process_group()


def main(command: str, folder: str, world: int) -> int:
    with tempfile.NamedTemporaryFile(delete=False) as store:
        pass
    children = []
    for rank in range(world):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                run(command, Path(folder), rank, world, store.name)
                code = 0
            except BaseException:  # noqa: BLE001
                import traceback

                traceback.print_exc()
            os._exit(code)
        children.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
    os.unlink(store.name)
    print(command, world, codes)
    return max(map(abs, codes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
