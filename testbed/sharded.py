"""A small model for training scripts, sharded by torch in one of many ways, and its digest.

Layouts: ddp; hsdp (2 x half of the ranks), fsdp (all ranks); or FSDP1: flat-STRATEGY, where
HYBRID_SHARD is 2 x half of the ranks, and flat-STRATEGY-orig with use_orig_params.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from collections.abc import Callable


class Net(torch.nn.Module):
    """Linear layers, and two places to hurt: "forward" and "backward-begin".

    `here(place, step)` is called there.
    """

    def __init__(self, hidden: int, layers: int, here: Callable[[str, int], None]) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(hidden, hidden) for _ in range(layers))
        self.step = 0
        self._here = here
        self.layers[1].register_forward_hook(lambda *_: here("forward", self.step))

    def one_layer(self, layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        """Residual, so that a step does not lose the differences between states."""
        return x + torch.tanh(layer(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Through all layers."""
        for layer in self.layers:
            x = self.one_layer(layer, x)
        x.register_hook(lambda _: self._here("backward-begin", self.step))
        return x


def shard(net: Net, layout: str) -> torch.nn.Module:
    """The model that is trained, on all ranks."""
    if layout == "ddp":
        return DistributedDataParallel(net, bucket_cap_mb=0.001)
    world, mesh = dist.get_world_size(), None
    if layout == "hsdp" or "HYBRID" in layout:
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    if layout.startswith("flat-"):
        return _shard_flat(net, layout, mesh)
    mesh = mesh or init_device_mesh("cpu", (world,), mesh_dim_names=("shard",))
    for layer in net.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def _shard_flat(net: Net, layout: str, mesh: DeviceMesh | None) -> torch.nn.Module:
    """FSDP1: a unit for every layer but the last, and one for that and what is around them."""
    _, strategy, *orig = layout.split("-")
    options = {
        "sharding_strategy": ShardingStrategy[strategy],
        "use_orig_params": bool(orig),
        "device_id": torch.device("cpu"),
        "device_mesh": mesh,
    }
    for index, layer in enumerate(net.layers[:-1]):
        net.layers[index] = FullyShardedDataParallel(layer, **options)
    return FullyShardedDataParallel(net, **options)


def noisy_batch(hidden: int, step: int) -> torch.Tensor:
    """This rank's batch of a step, with noise from its global generator."""
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    return torch.randn(8, hidden, generator=generator) * (1 + 0.01 * torch.rand(()))


def digest(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> str:
    """Of all that this rank goes on from: its part of weights and optimizer, its generator."""
    found = hashlib.sha256(f"{step}".encode())
    memory = [value for state in optimizer.state.values() for _, value in sorted(state.items())]
    for tensor in [*model.parameters(), *memory, torch.get_rng_state()]:
        own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        found.update(own.detach().contiguous().view(-1).view(torch.uint8).numpy())
    return found.hexdigest()[:16]
