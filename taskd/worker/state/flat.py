"""One TrainState as a flat table of named tensors and one tree of plain values.

The form that checkpoints have.

Owns the names. A tensor keeps its name whatever the world size: parameters by module path,
optimizer state by the parameter that it belongs to, so that a checkpoint of four ranks is read by
two. Knows no files.

    <state>.<role>.<parameter or buffer>             of modules
    <state>.<role>.state.<role>.<parameter>.<key>    of optimizers
    <state>.<role>.<path>                            of other objects with large tensors (an EMA)

<state> is the TrainState's name, with its shard_id behind an "@" if it has one: what another part
of the model has is another tensor. So has each shard of FSDP1, whose `shard_id` says which one it
is. Of a ZeroRedundancyOptimizer each rank has the memory of some parameters, so all ranks together
have each name once.

Buffers that are no part of a state_dict (caches: tables of a rotary embedding, masks) are in it,
and are read where they fit: a forward pass may make them, and make them anew for a longer input.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from taskd.errors import StateError
from taskd.worker.objects.devices import at_parameter, to_own_device
from taskd.worker.objects.kinds import dict_as, sequence_as
from taskd.worker.objects.roles import parameters_of
from taskd.worker.objects.rollback import write_group
from taskd.worker.objects.shards import (
    is_distributed,
    memory_of,
    placements_beside,
    room_beside,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from taskd.worker.objects.named import Named
    from taskd.worker.state.holding import Holding


def label(holding: Holding) -> str:
    """The prefix of all names of a TrainState in a checkpoint, without the dot."""
    quoted = holding.name.replace("%", "%25").replace(".", "%2E").replace("@", "%40")
    return f"{quoted}@{holding.shard_id}" if holding.shard_id else quoted


def flatten(holding: Holding, named: Named) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The tensors as they are (no copies), and everything else.

    Per-rank objects (samplers, generators) are left out.

    Raises:
        StateError: an optimizer that cannot be taken apart.
    """
    found = tensors(holding, named)
    return found, plain(holding, named, memories(holding, named), found)


def tensors(holding: Holding, named: Named) -> dict[str, torch.Tensor]:
    """Those of modules and optimizers. Raises as `flatten`."""
    prefix, owners = label(holding), named.names
    found = {f"{prefix}.{name}": tensor.detach() for name, tensor in named.distinct.items()}
    for role, optimizer in holding.roles.optimizers.items():
        is_divided = role in holding.zeros()
        for parameter, entries in memory_of(optimizer).items():
            owner = owners.get(id(parameter))
            if owner is None:
                message = (
                    f"TrainState({holding.name!r}): {role} keeps state for {parameter!r}, "
                    "which is none of its parameters: it cannot be saved"
                )
                raise StateError(message)
            for key, value in entries.items():
                if isinstance(value, torch.Tensor):
                    found[f"{prefix}.{role}.state.{owner}.{key}"] = value.detach()
                elif is_divided:
                    message = (
                        f"TrainState({holding.name!r}): {role} keeps {key!r} of {owner} as "
                        f"{type(value).__name__}: of a "
                        "ZeroRedundancyOptimizer only tensors can be saved"
                    )
                    raise StateError(message)
    return found


def memories(holding: Holding, named: Named) -> dict[str, dict[str, Any]]:
    """Of each optimizer, by role.

    The names of its parameters by group, and its memory with None in place of the tensors. Of
    DTensors in it that have not the shape of their parameter, how they lie on its mesh.
    """
    owners, found = named.names, {}
    for role, optimizer in holding.roles.optimizers.items():
        is_divided = role in holding.zeros()
        # divided, it is this rank's alone; the names of the tensors say it all
        memory = {} if is_divided else memory_of(optimizer)
        state = {
            owners[id(parameter)]: {
                key: None if isinstance(value, torch.Tensor) else value
                for key, value in entries.items()
            }
            for parameter, entries in memory.items()
            if entries
        }
        groups = [
            [owners[id(parameter)] for parameter in group["params"]]
            for group in optimizer.param_groups
        ]
        found[role] = {
            "groups": groups,
            "state": state,
            "is_divided": is_divided,
            "placements": _placements(memory, owners),
        }
    return found


def _placements(memory: dict[Any, Any], owners: dict[int, str]) -> dict[str, dict[str, list[str]]]:
    """By the name of the parameter and the key. Row statistics are such tensors."""
    found: dict[str, dict[str, list[str]]] = {}
    for parameter, entries in memory.items():
        for key, value in entries.items():
            if isinstance(value, torch.Tensor) and value.shape != parameter.shape:
                placements = placements_beside(value, parameter)
                if placements is not None:
                    found.setdefault(owners[id(parameter)], {})[key] = placements
    return found


def plain(
    holding: Holding,
    named: Named,
    memories: dict[str, dict[str, Any]],
    further: dict[str, torch.Tensor],
) -> dict[str, Any]:
    """Everything but tensors. `memories`: as `memories`.

    What other objects (an EMA) have of tensors is put into `further`.
    """
    roles, prefix = holding.roles, label(holding)
    optimizers = {
        role: memory
        | {
            "groups": [
                group | {"params": names}
                for group, names in zip(
                    roles.optimizers[role].param_groups, memory["groups"], strict=True
                )
            ]
        }
        for role, memory in memories.items()
    }
    states = {}
    for role, value in roles.others.items():
        states[role] = _take_tensors(value.state_dict(), f"{prefix}.{role}", further)
    return {
        "step": holding.step,
        "values": dict(roles.values),
        "optimizers": optimizers,
        "states": states,
        "caches": sorted(caches(holding, named)),
        "shared": named.shared,
    }


def caches(holding: Holding, named: Named) -> set[str]:
    """Those of the tensors that need not be the same on all ranks, nor fit when they are read."""
    return {f"{label(holding)}.{name}" for name in named.optional}


def targets(
    holding: Holding,
    named: Named,
    plain: dict[str, Any],
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]],
) -> dict[str, torch.Tensor]:
    """Where a checkpoint's tensors are to be read into.

    The objects' own where there are any, new memory elsewhere. Without caches that do not fit.

    Args:
        plain: what `flatten` gave besides the tensors.
        shapes: global shape and dtype of every tensor in the checkpoint.

    Raises:
        StateError: the objects are others than those that were saved; the text names the tensor or
            role.
    """
    prefix = label(holding)
    # a checkpoint of an earlier version does not say which names were of one tensor
    shared = plain.get("shared", {})
    named.align(
        {
            name: shared.get(
                name, name if f"{prefix}.{name}" in shapes else named.names[id(tensor)]
            )
            for name, tensor in named.tensors.items()
        }
    )
    named.unfold()
    wanted = {f"{prefix}.{name}": tensor for name, tensor in named.distinct.items()}
    wanted.update(_optimizer_targets(holding, named, plain["optimizers"], shapes))
    wanted.update(_other_targets(holding, plain["states"], shapes))
    divided = tuple(f"{prefix}.{role}.state." for role in holding.zeros())
    saved_names = {
        name
        for name in shapes
        if name.startswith(f"{prefix}.") and (name in wanted or not name.startswith(divided))
    }
    # as in a recovery in place: what is one in either of them
    for name in caches(holding, named).union(plain.get("caches", ())):
        if name not in wanted or shapes.get(name) != _form(wanted[name]):
            wanted.pop(name, None)
            saved_names.discard(name)
    for name in sorted(saved_names ^ set(wanted)):
        raise _misfit(
            holding,
            f"{name} is only in {'the checkpoint' if name in saved_names else 'this program'}",
        )
    for name, tensor in wanted.items():
        if tuple(tensor.shape) != tuple(shapes[name][0]):
            raise _misfit(
                holding,
                f"{name} has shape {tuple(shapes[name][0])} in the checkpoint "
                f"and {tuple(tensor.shape)} here",
            )
    return wanted


def _form(tensor: torch.Tensor) -> tuple[tuple[int, ...], torch.dtype]:
    """Global shape and dtype, as of a checkpoint's tensors."""
    return tuple(tensor.shape), tensor.dtype


def _other_targets(
    holding: Holding, saved: dict[str, Any], shapes: dict[str, Any]
) -> dict[str, torch.Tensor]:
    prefix, others = label(holding), holding.roles.others
    if saved.keys() != others.keys():
        raise _misfit(holding, f"it was saved with {sorted(saved)}, here are {sorted(others)}")
    own: dict[str, torch.Tensor] = {}
    for role, value in others.items():
        _take_tensors(value.state_dict(), f"{prefix}.{role}", own)
    wanted = {}
    for name in _slots(saved):
        shape, dtype = shapes[name]
        is_sharded = (
            name in own and is_distributed(own[name]) and tuple(own[name].shape) == tuple(shape)
        )
        wanted[name] = (
            torch.empty_like(own[name], dtype=dtype)
            if is_sharded
            else torch.empty(shape, dtype=dtype, device="cpu")
        )
    return wanted


def _optimizer_targets(
    holding: Holding, named: Named, saved_optimizers: dict[str, Any], shapes: dict[str, Any]
) -> dict[str, torch.Tensor]:
    names, wanted = named.names, {}
    for role in sorted({*saved_optimizers, *holding.roles.optimizers}):
        saved, own = saved_optimizers.get(role), holding.roles.optimizers.get(role)
        if saved is None or own is None:
            raise _misfit(
                holding,
                f"the optimizer {role!r} is only in "
                f"{'the checkpoint' if own is None else 'this program'}",
            )
        own_groups = [
            [names[id(parameter)] for parameter in group["params"]] for group in own.param_groups
        ]
        if [group["params"] for group in saved["groups"]] != own_groups:
            raise _misfit(holding, f"{role} has other parameter groups")
        # a checkpoint of an earlier version does not have them
        placements = saved.get("placements", {})
        for name, owner, key in _memory(holding, _kept(holding, named, role), role, saved, shapes):
            known = placements.get(owner, {}).get(key)
            wanted[name] = _room(name, named.distinct[owner], own, shapes, known)
    return wanted


def _memory(
    holding: Holding, kept: list[str], role: str, saved: dict[str, Any], names: Collection[str]
) -> Iterator[tuple[str, str, str]]:
    """Which of a checkpoint's tensors belong into this rank's memory of an optimizer.

    Name, name of the parameter, key. `kept`: as `_kept`.
    """
    start = f"{label(holding)}.{role}.state."
    if saved["is_divided"]:
        found: dict[str, list[str]] = {owner: [] for owner in kept}
        for name in names:
            owner, _, key = name.removeprefix(start).rpartition(".")
            if name.startswith(start) and owner in found:
                found[owner].append(key)
        yield from (
            (f"{start}{owner}.{key}", owner, key) for owner, keys in found.items() for key in keys
        )
    for owner in (owner for owner in kept if owner in saved["state"]):
        for key, value in saved["state"][owner].items():
            name = f"{start}{owner}.{key}"
            if value is None and name in names:  # else a value that is None
                yield name, owner, key


def _kept(holding: Holding, named: Named, role: str) -> list[str]:
    """The parameters whose memory is this rank's, in the optimizer's order."""
    optimizer = holding.roles.optimizers[role]
    keeper = optimizer.optim if role in holding.zeros() else optimizer
    return [named.names[id(parameter)] for parameter in parameters_of(keeper)]


def place_memories(named: Named, plain: dict[str, Any]) -> None:
    """Of a checkpoint: put tensors that lie deeper in the memory of optimizers beside parameters.

    Those of LBFGS are in lists. `plain`: what has fitted `targets`.
    """
    for saved in plain["optimizers"].values():
        for owner, entries in saved["state"].items():
            saved["state"][owner] = at_parameter(entries, named.tensors[owner])


def load(
    holding: Holding, named: Named, plain: dict[str, Any], tensors: dict[str, torch.Tensor]
) -> None:
    """All tensors are read: put everything else in place."""
    roles, parameters = holding.roles, named.tensors
    for role, saved in plain["optimizers"].items():
        optimizer = roles.optimizers[role]
        memory, kept = memory_of(optimizer), _kept(holding, named, role)
        memory.clear()
        for owner in (owner for owner in kept if owner in saved["state"]):
            parameter = parameters[owner]
            memory[parameter] = to_own_device(saved["state"][owner], None, (parameter,))
        for name, owner, key in _memory(holding, kept, role, saved, tensors):
            memory.setdefault(parameters[owner], {})[key] = tensors[name]
        for group, remembered in zip(optimizer.param_groups, saved["groups"], strict=True):
            further = {key: value for key, value in remembered.items() if key != "params"}
            write_group(group, to_own_device(further, group, parameters.values()))
    roles.load_others({role: _put_tensors(tree, tensors) for role, tree in plain["states"].items()})
    holding.step = plain["step"]
    roles.values = to_own_device(plain["values"], roles.values, parameters.values())


def names_of_changing(holding: Holding, named: Named) -> list[str]:
    """The tensors that a forward pass may change.

    Buffers, and parameters that were seen to change without an optimizer.
    """
    changing = {
        id(buffer) for module in holding.roles.modules.values() for buffer in module.buffers()
    }
    changing |= {id(kept.tensor) for kept in holding.rollback.untrained.moving}
    return [
        f"{label(holding)}.{name}"
        for name, tensor in named.distinct.items()
        if id(tensor) in changing
    ]


def _room(
    name: str,
    parameter: torch.Tensor,
    optimizer: torch.optim.Optimizer,
    shapes: dict[str, Any],
    placements: list[str] | None,
) -> torch.Tensor:
    """Memory for one tensor of an optimizer's state.

    `placements`: of a DTensor that has not the shape of the parameter.

    A single number is a count of steps in most cases, which torch keeps in host memory.
    """
    shape, dtype = shapes[name]
    if tuple(shape) == tuple(parameter.shape):
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    if placements is not None and is_distributed(parameter):
        return room_beside(parameter, placements, tuple(shape), dtype)
    on_device = len(shape) > 0 or any(
        group.get("capturable") or group.get("fused") for group in optimizer.param_groups
    )
    return torch.empty(shape, dtype=dtype, device=parameter.device if on_device else "cpu")


# ---------------------------------------------------------------- tensors in trees

_SLOT = "taskd:tensor"  # {_SLOT: name} stands for the tensor of that name


def _take_tensors(tree: Any, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(tree, torch.Tensor):
        tensors[path] = tree.detach()
        return {_SLOT: path}
    if isinstance(tree, dict):
        items = {key: _take_tensors(value, f"{path}.{key}", tensors) for key, value in tree.items()}
        return dict_as(tree, items)
    if isinstance(tree, (list, tuple)):
        return sequence_as(
            tree,
            (_take_tensors(value, f"{path}.{index}", tensors) for index, value in enumerate(tree)),
        )
    return tree


def _put_tensors(tree: Any, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(tree, dict):
        return (
            tensors[tree[_SLOT]]
            if set(tree) == {_SLOT}
            else dict_as(tree, {key: _put_tensors(value, tensors) for key, value in tree.items()})
        )
    if isinstance(tree, (list, tuple)):
        return sequence_as(tree, (_put_tensors(value, tensors) for value in tree))
    return tree


def _slots(tree: Any) -> Iterator[str]:
    if isinstance(tree, dict):
        if set(tree) == {_SLOT}:
            yield tree[_SLOT]
        else:
            for value in tree.values():
                yield from _slots(value)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from _slots(value)


def _misfit(holding: Holding, what: str) -> StateError:
    return StateError(f"TrainState({holding.name!r}) does not fit the checkpoint: {what}")
