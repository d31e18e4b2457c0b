"""A small model, sharded in one of many ways."""

import torch
import torch.distributed as dist
from job import Stop
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._pytree import tree_map_only


class Counting(nn.Linear):
    """A buffer that changes in each forward pass.

    A plain tensor, but a DTensor under tensor parallelism.
    """

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, x):
        self.passes += 1
        return super().forward(x)


class Block(nn.Module):
    """10 is no multiple of 4, and 2 is less: shards of unequal size, and empty ones."""

    stop = ""

    def __init__(self):
        super().__init__()
        self.first = Counting(8, 10)
        self.second = nn.Linear(10, 8)
        self.scale = nn.Parameter(torch.ones(2, 1))

    def forward(self, x):
        hidden = torch.relu(self.first(x))
        if self.stop == "forward":
            raise Stop
        if self.stop == "backward":
            hidden.register_hook(_raise)
        return x + self.second(hidden) * self.scale.sum()


class Masked(nn.Module):
    """A mask that is no part of a state_dict, made in a forward pass, on each rank as it needs."""

    def __init__(self, needed):
        super().__init__()
        self.needed = needed
        self.register_buffer("first", torch.zeros(1), persistent=False)

    def forward(self, x):
        for name in ("first", "late"):
            self.register_buffer(name, torch.ones(self.needed), persistent=False)
        return x


class Rows(torch.optim.Optimizer):
    """Keeps a mean of the squared gradient for each row of a matrix."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                square = parameter.grad.square()
                if parameter.dim() > 1:
                    square = square.mean(-1, keepdim=True)
                memory = self.state[parameter]
                if not memory:
                    memory["mean"] = torch.zeros_like(square)
                memory["mean"].lerp_(square, 0.1)
                parameter.add_(parameter.grad / (memory["mean"].sqrt() + 1e-3), alpha=-group["lr"])


class Cast(torch.Tensor):
    """A weight that FSDP2 gathers with fewer bits, as torchao's float8 ones: around a plain one."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.size(), strides=inner.stride(), dtype=inner.dtype, device=inner.device
        )

    def __init__(self, inner):
        self.inner = inner

    def __tensor_flatten__(self):
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(inner, *_):
        return Cast(inner["inner"])

    @classmethod
    def __torch_dispatch__(cls, function, types, args, kwargs=None):
        args, kwargs = tree_map_only(cls, lambda one: one.inner, (args, kwargs or {}))
        found = function(*args, **kwargs)
        if function not in _STAY_CAST:
            return found
        return tree_map_only(torch.Tensor, cls, found)

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        return (self.inner.to(torch.bfloat16),), None

    def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
        (gathered,) = outputs
        if out is None:
            whole = gathered.to(param_dtype)
            return whole, (whole,)
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
            out.copy_(gathered)
        return None


_ATEN = torch.ops.aten
_STAY_CAST = {
    _ATEN.detach.default, _ATEN.empty_like.default, _ATEN.new_zeros.default, _ATEN.slice.Tensor,
    _ATEN.copy_.default, _ATEN.view.default, _ATEN.as_strided.default, _ATEN._to_copy.default,
    _ATEN.split.Tensor, _ATEN.clone.default, _ATEN.transpose.int, _ATEN.t.default,
}  # fmt: skip


def _cast_some(model, kind):
    linears = [model[0], model[1].second, model[2].second] if kind == "cast" else []
    for linear in linears:
        linear.weight = nn.Parameter(Cast(linear.weight.detach()))


def _raise(*_):
    raise Stop


def build(kind, mesh_name="dp"):
    """A model, its optimizer, and the number that its data depend on.

    The number is equal on the ranks that see the same batch.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(7 + (shard_id_of(kind) or 0))
    model = nn.Sequential(nn.Linear(8, 8), Block(), Block(), nn.Linear(8, 7))
    data = rank if shard_id_of(kind) is None else shard_id_of(kind)
    _cast_some(model, kind)
    if kind in ("fsdp", "warm", "offload", "mixed", "kept", "rows", "cast"):
        options = {
            "offload": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
            "kept": {"reshard_after_forward": False},
            "mixed": {
                "mp_policy": MixedPrecisionPolicy(
                    param_dtype=torch.bfloat16, reduce_dtype=torch.float32
                )
            },
        }.get(kind, {})
        shard_blocks(model, mesh=init_device_mesh("cpu", (world,)), **options)
    elif kind == "hsdp":
        shard_blocks(
            model,
            mesh=init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", mesh_name)),
        )
    elif kind == "grown":
        model = nn.Sequential(Masked(8 + rank), model)
    elif kind in FSDP1:
        model = _wrap(model, kind)
    elif kind in ("tp", "tp_fsdp"):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        for block in model[1:3]:
            parallelize_module(
                block, mesh["tp"], {"first": ColwiseParallel(), "second": RowwiseParallel()}
            )
        data = 0
        if kind == "tp_fsdp":
            data = mesh.get_local_rank("dp")
            shard_blocks(model, mesh=mesh["dp"])
    elif kind in ("ddp", "zero", "buckets", "zero_pairs"):
        model = nn.parallel.DistributedDataParallel(model)
    if kind in ("zero", "buckets", "zero_pairs"):
        group = None if kind != "zero_pairs" else dist.new_subgroups(2)[0]
        return (
            model,
            ZeroRedundancyOptimizer(
                model.parameters(),
                torch.optim.Adam,
                process_group=group,
                lr=0.01,
                parameters_as_bucket_view=kind == "buckets",
            ),
            data,
        )
    # its parameters lie on several meshes, or are plain
    foreach = False if kind.startswith("tp") else None
    parameters = model.parameters()
    optimizer = (
        Rows(parameters, 0.01)
        if kind == "rows"
        else torch.optim.Adam(parameters, lr=0.01, foreach=foreach)
    )
    return model, optimizer, data


# Strategy, use_orig_params, more.
FSDP1 = {
    "flat": ("FULL_SHARD", False, {}),
    "flat_orig": ("FULL_SHARD", True, {}),
    "flat_kept": ("SHARD_GRAD_OP", False, {}),
    "flat_kept_orig": ("SHARD_GRAD_OP", True, {}),
    "flat_mixed": (
        "FULL_SHARD",
        True,
        {"mixed_precision": MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
    ),
    "flat_whole": ("NO_SHARD", True, {}),
    "flat_hybrid": ("HYBRID_SHARD", False, {}),
    "flat_hybrid_orig": ("HYBRID_SHARD", True, {}),
    "flat_pairs": ("FULL_SHARD", False, {}),
}


def _wrap(model, kind):
    """FSDP1: two blocks, and around them."""
    strategy, use_orig_params, more = FSDP1[kind]
    options = {
        "sharding_strategy": ShardingStrategy[strategy],
        "use_orig_params": use_orig_params,
        "device_id": torch.device("cpu"),
        **more,
    }
    if strategy == "HYBRID_SHARD":
        options["device_mesh"] = init_device_mesh(
            "cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard")
        )
    if kind == "flat_pairs":
        options["process_group"] = dist.new_subgroups(2)[0]
    for index in (1, 2):
        model[index] = FullyShardedDataParallel(model[index], **options)
    return FullyShardedDataParallel(model, **options)


def shard_id_of(kind):
    """Two stages of a model, each on two ranks that see the same data."""
    return dist.get_rank() % 2 if kind in ("stages", "grown") else None


def shard_blocks(model, **options):
    for block in model[1:3]:
        fully_shard(block, **options)
    fully_shard(model, **options)
