"""The units of FSDP1.

Modules wrapped in `FullyShardedDataParallel`, each with one flat parameter of which every rank has
a shard.

Owns the reading of torch's `FlatParamHandle`. No collective, and nothing is asked of process groups
but who is in them. The class is looked up among the modules that the user's script has imported.

A forward or backward pass points the flat parameter at memory of its own in which it is whole, and
the parameters that it was made of (as attributes, or as parameters with `use_orig_params=True`) at
parts of that. What lasts is the local shard, to which all of them point between the steps. It is
written by the optimizer alone, so a pass may be cut short anywhere.
"""

import re
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from taskd.worker import internals

_FLAT_NAME = "_flat_param"  # by which torch registers a flat parameter in the module within
# What is read of a unit's handle and of its flat parameter.
_OF_HANDLE = (
    "flat_param",
    "process_group",
    "_training_state",
    "_prefetched",
    "_use_orig_params",
    "_use_sharded_views",
    "_offload_params",
    "_fsdp_extension",
)
_OF_FLAT = (
    "_fqns",
    "_numels_with_padding",
    "_param_extensions",
    "_param_infos",
    "_params",
    "_shapes",
    "_sharded_size",
    "_shared_param_infos",
    "_shared_params",
)
# memory that a pass fills and empties
_WHOLE = ("_full_param_padded", "_full_prec_full_param_padded", "_mp_shard")


def reshard(module: torch.nn.Module) -> None:
    """Point everything at the local shards again, and free what was whole.

    Wherever a pass was cut short: `FlatParamHandle.reshard()` would trust in a state that an
    interrupt may have left half changed, and leaves memory to a pass that will not end.
    """
    for wrapper in _wrappers_of(module):
        from torch.distributed.fsdp._common_utils import HandleTrainingState, TrainingState  # noqa: PLC0415

        wrapper.training_state = TrainingState.IDLE
        handle = wrapper._handle
        if handle is None:
            continue
        handle._training_state, handle._prefetched = HandleTrainingState.IDLE, False
        flat = handle.flat_param
        own = getattr(flat, "_local_shard", None)
        if own is not None:  # else no pass has begun yet: the parameter has no other memory
            flat.data = own
            _free_whole(handle)
        if handle._use_orig_params:
            handle._use_sharded_views()
        else:
            _show_flat(wrapper)


def _free_whole(handle: Any) -> None:
    """Give the unit other, empty memory in place of that of whole parameters.

    A collective that was cut short between its beginning and its wait still goes on, in a thread of
    its group, and reads or writes this memory: it goes with the last that holds it.
    """
    for name in _WHOLE:
        whole = getattr(handle.flat_param, name, None)
        if whole is None or not whole.untyped_storage().size():
            continue
        if whole.device.type == "cpu":
            empty = torch.empty_like(whole)  # untouched, so never in real memory
            empty.untyped_storage().resize_(0)
            whole.data = empty
        # memory there is free again when the stream comes to it; kernels that still run may read it
        else:
            whole.record_stream(handle._device_handle.current_stream())
            whole.untyped_storage().resize_(0)


def _show_flat(wrapper: Any) -> None:
    """Put the flat parameter back where `summon_full_params()` shows those it was made of."""
    flat = wrapper._handle.flat_param
    for name, owner, *_ in (*flat._param_infos, *flat._shared_param_infos):
        owner._parameters.pop(name, None)
    wrapper.module._parameters[_FLAT_NAME] = flat


def drop_gradients(module: torch.nn.Module) -> None:
    """Free the gradients of flat parameters, and what a backward pass that was cut short has left.

    That is what it has summed so far, and what it would have let go of: its hooks, and the parts of
    the whole parameter. Both lead to a node of the graph that holds the flat parameter, and so the
    unit with its process groups: circles through C++, which Python's collection does not see.
    """
    for unit in _units_of(module):
        flat = unit._handle.flat_param
        flat.grad = None
        left = vars(flat)
        left.pop("_saved_grad_shard", None)
        for hook in (
            left.pop("_post_backward_hook_state", (None,))[-1],
            left.pop("_post_backward_hook_handle", None),
        ):
            if hook is not None:
                hook.remove()
        parts = left.get("_tensors") or []  # with use_orig_params
        parts[:] = [None] * len(parts)
        for name, owner, *_ in (*flat._param_infos, *flat._shared_param_infos):
            part = vars(owner).get(name)  # without
            if isinstance(part, torch.Tensor):
                # not detach(): torch refuses where the memory was written to since
                vars(owner)[name] = part.data


def parameters_of(modules: Iterable[torch.nn.Module]) -> set[int]:
    """The flat parameters and those that they were made of, by id.

    Their memory is the unit's, and must stay where it is.
    """
    found: set[int] = set()
    for module in modules:
        for unit in _units_of(module):
            flat = unit._handle.flat_param
            found.update(map(id, (flat, *(flat._params or ()), *(flat._shared_params or ()))))
    return found


def is_of_unit(tensor: torch.Tensor) -> bool:
    """Whether it is a flat parameter, or one that a flat parameter was made of."""
    return bool(getattr(tensor, "_fsdp_flattened", False))


# ---------------------------------------------------------------- identity


def places_of(modules: dict[str, torch.nn.Module]) -> tuple[list[str], list[str]]:
    """Which shards this rank has: "fsdp0/4", each once.

    And what tells them apart: how every unit is laid out. Empty if all ranks have the same.

    Two ranks have the same shard if they are replicas of each other under HYBRID_SHARD. Units in
    groups that have nothing to do with one another (the stages of a pipeline) are told apart by the
    ranks that they are on.
    """
    places: dict[str, None] = {}  # an ordered set
    layouts: list[str] = []
    for role, module in modules.items():
        for path, unit in module.named_modules():
            if not _is_wrapper(unit) or unit._handle is None:
                continue
            place = _place(unit)
            if place:
                places[place] = None
            flat = unit._handle.flat_param
            layouts.append(
                f"{role}.{path} {place} {flat._fqns} {flat._shapes} "
                f"{flat._numels_with_padding} {tuple(flat._sharded_size)}"
            )
    return list(places), layouts if places else []


def _place(unit: Any) -> str:
    handle = unit._handle
    members = dist.get_process_group_ranks(handle.process_group)
    replicas, size, index = members, 1, 0  # NO_SHARD
    if handle.uses_sharded_strategy:
        # of HYBRID_SHARD: the ranks that have the same shard
        between = getattr(unit, "_inter_node_pg", None)
        replicas = (
            [members[handle.rank]] if between is None else dist.get_process_group_ranks(between)
        )
        size, index = handle.world_size, handle.rank
    is_everywhere = size * len(replicas) == dist.get_world_size()
    if size == 1 and is_everywhere:
        return ""
    return f"fsdp{index}/{size}" + ("" if is_everywhere else f"on{min(replicas)}")


def has_any(modules: Iterable[torch.nn.Module]) -> bool:
    """Whether any of the modules is FSDP1's."""
    return any(True for module in modules for _ in _units_of(module))


def is_place(text: str) -> bool:
    """Whether a text that tells a part of a state is, or ends in, one of `places_of`."""
    return re.search(r"(^|\.)fsdp\d+/\d+", text) is not None


# ---------------------------------------------------------------- what cannot be carried


def problem_of(module: torch.nn.Module) -> str:
    """Why the units in the module cannot be carried, or ""."""
    for path, unit in module.named_modules():
        if not _is_wrapper(unit):
            continue
        if not _is_known(unit):
            return "is one that taskd does not know in this torch: use fully_shard"
        if unit._handle is None:
            continue
        problem = _problem(unit)
        if problem:
            return f"the FullyShardedDataParallel {path or 'module'} {problem}"
    return ""


def _is_known(unit: Any) -> bool:
    what = "the units of FSDP1"
    if not internals.has(what, (unit, "_handle")) or unit._handle is None:
        return hasattr(unit, "_handle")
    return internals.has(what, *((unit._handle, name) for name in _OF_HANDLE)) and internals.has(
        what, *((unit._handle.flat_param, name) for name in _OF_FLAT)
    )


def _problem(unit: Any) -> str:
    handle, flat = unit._handle, unit._handle.flat_param
    try:
        dist.get_process_group_ranks(handle.process_group)
    except (KeyError, ValueError):  # unknown; no default group at all
        return (
            "was built in a process group that is gone: build it inside the recoverable "
            "function, after init_process_group()"
        )
    if handle._fsdp_extension is not None or any(flat._param_extensions):
        return (
            "is laid over DTensors (tensor parallelism): use fully_shard, which shards them "
            "once more"
        )
    if handle._offload_params:
        return (
            "has CPUOffload(offload_params=True): use fully_shard with CPUOffloadPolicy, or "
            "leave it out"
        )
    if any(hasattr(parameter, "_in_backward_optimizers") for parameter in flat._params or ()):
        return (
            "has an optimizer in its backward pass, where a fault would tear parameters: step "
            "it after the backward pass"
        )
    wanted = unit.mixed_precision.buffer_dtype
    # theirs may be another
    inner = {id(buffer) for other in _wrappers_of(unit.module) for buffer in other.buffers()}
    for name, buffer in unit.module.named_buffers():
        if (
            wanted is not None
            and id(buffer) not in inner
            and buffer.is_floating_point()
            and buffer.dtype != wanted
        ):
            return (
                f"would make the buffer {name} {wanted} in its first pass: build it so, or "
                "leave MixedPrecision(buffer_dtype=) out"
            )
    return ""


# ---------------------------------------------------------------- finding them


def _is_wrapper(module: torch.nn.Module) -> bool:
    fsdp = sys.modules.get("torch.distributed.fsdp")
    kind = None if fsdp is None else getattr(fsdp, "FullyShardedDataParallel", None)
    return kind is not None and isinstance(module, kind)


def _wrappers_of(module: torch.nn.Module) -> Iterator[Any]:
    """The module and those within that are wrapped, with parameters or without."""
    yield from (part for part in module.modules() if _is_wrapper(part))


def _units_of(module: torch.nn.Module) -> Iterator[Any]:
    yield from (part for part in _wrappers_of(module) if part._handle is not None)
