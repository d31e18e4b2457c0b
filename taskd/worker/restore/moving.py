"""Moving the parked state of an entry into what the next entry built.

Optimizer memory and plain parameters change hands by reference; DTensors and flat parameters are
copied into the local memory of the new ones, which is there already and to which FSDP holds
references of its own. So the peak is the old state plus a fresh model either way. Knows no
collectives: what comes from other ranks is `taskd.worker.restore.exchange`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from taskd.errors import StateError
from taskd.worker.objects import shards, units
from taskd.worker.objects.memory import overwrite, version_of
from taskd.worker.objects.named import Named
from taskd.worker.objects.nesting import NestingScheduler
from taskd.worker.objects.own_state import OwnState
from taskd.worker.objects.roles import parameters_of
from taskd.worker.objects.rollback import write_group
from taskd.worker.objects.scalers import load_scaler

if TYPE_CHECKING:
    from taskd.worker.objects.roles import Roles
    from taskd.worker.state.holding import Holding


def move(old: Holding, new: Holding, named: Named, *, is_kept: bool) -> None:
    """Put the parked objects' content into the new ones.

    Args:
        named: the tensors of `new`.
        is_kept: False if another rank's state is received afterwards: only the memory matters then.

    Raises:
        StateError: the two do not fit; the text names the tensor or role.
    """
    if old.roles.object_roles() != new.roles.object_roles():
        raise StateError(_different_roles(old, new))
    if old.shard_id != new.shard_id:
        message = (
            f"TrainState({new.name!r}) holds the part {new.shard_id!r} now and held "
            f"{old.shard_id!r} before the fault: build the same model on "
            "the same rank in every entry"
        )
        raise StateError(message)
    meshes = _move_tensors(old, new, named, is_kept=is_kept)
    for role, optimizer in new.roles.optimizers.items():
        _move_optimizer(
            f"TrainState({new.name!r}): {role}", old.roles.optimizers[role], optimizer, meshes
        )
    for kind in ("steppers", "schedulers", "replicas"):
        before, now = getattr(old.roles, kind), getattr(new.roles, kind)
        for role, value in now.items():
            is_same = value is before[role] or (
                isinstance(value, (OwnState, NestingScheduler)) and value.is_of_same(before[role])
            )
            if not is_same:
                label = f"TrainState({new.name!r}): {role}"
                value.load_state_dict(shards.rewrap(before[role].state_dict(), meshes, label))
    for role, scaler in new.roles.scalers.items():
        load_scaler(scaler, old.roles.scalers[role].state_dict())
    new.step = old.step
    new.roles.values = dict(old.roles.values)


def _move_tensors(old: Holding, new: Holding, named: Named, *, is_kept: bool) -> dict[Any, Any]:
    """Returns which DeviceMesh took the place of which."""
    before = Named(old.roles)
    parked, fresh, caches = before.tensors, named.tensors, before.caches | named.caches
    _check_names(new.name, parked, named, caches)
    meshes: dict[Any, Any] = {}
    fixed = _fixed(new.roles)
    with torch.no_grad():
        for name, source in parked.items():
            target = fresh.get(name)
            if target is None or (name in caches and target.shape != source.shape):
                continue
            if target is source:
                _check_mesh_is_new(new.name, name, source)
                if is_kept:
                    _check_untouched(old, new.name, name, source)
            elif target.shape != source.shape:
                message = (
                    f"TrainState({new.name!r}): {name} has shape {tuple(target.shape)} now "
                    f"and had {tuple(source.shape)} before the "
                    "fault: build the same model in every entry"
                )
                raise StateError(message)
            elif shards.is_distributed(target) or shards.is_distributed(source):
                _check_sharding(new.name, name, source, target, is_resized=old.world != new.world)
                meshes[source.device_mesh] = target.device_mesh
                if is_kept:
                    shards.local(target).copy_(shards.local(source))
            elif (
                target.dtype == source.dtype
                and target.device == source.device
                and id(target) not in fixed
            ):
                target.data = source.data
            else:
                overwrite(target, source)
    return meshes


def _check_names(
    state_name: str, parked: dict[str, torch.Tensor], named: Named, caches: set[str]
) -> None:
    """The same names; and buffers that were one tensor, or several, are that again."""
    fresh = named.tensors
    missing, added = (
        sorted(parked.keys() - fresh.keys() - caches),
        sorted(fresh.keys() - parked.keys() - caches),
    )
    if missing or added:
        has, has_not = (
            ("parked state has", "newly built objects have")
            if missing
            else ("newly built objects have", "parked state has")
        )
        what = f"the {has} {(missing or added)[0]}, the {has_not} not"
        message = f"TrainState({state_name!r}): {what}: build the same model in every entry"
        raise StateError(message)
    one = named.align({name: id(tensor) for name, tensor in parked.items()})
    if one:
        message = (
            f"TrainState({state_name!r}): {one} now, and were two before the fault: build the same "
            "model in every entry"
        )
        raise StateError(message)


def _fixed(roles: Roles) -> set[int]:
    """Parameters (by id) whose memory must stay.

    Views of an optimizer's buckets, which it sends to the other ranks, and those of FSDP1's units.
    """
    return units.parameters_of(roles.modules.values()) | {
        id(parameter)
        for optimizer in roles.optimizers.values()
        if getattr(optimizer, "parameters_as_bucket_view", False)
        for parameter in parameters_of(optimizer)
    }


def _check_sharding(
    state_name: str, name: str, source: torch.Tensor, target: torch.Tensor, *, is_resized: bool
) -> None:
    before, now = shards.sharding_of(source, name), shards.sharding_of(target, name)
    if is_resized and before is not None and now is not None:  # there are more or fewer replicas
        before, now = before.without_replicas(), now.without_replicas()
    if before != now or shards.local(source).shape != shards.local(target).shape:
        message = (
            f"TrainState({state_name!r}): {name} is {now or 'a plain tensor'} with "
            f"{tuple(shards.local(target).shape)} on this rank now, and was "
            f"{before or 'a plain tensor'} with {tuple(shards.local(source).shape)} before the "
            "fault: build the same mesh and the same model in every entry"
        )
        raise StateError(message)


def _check_mesh_is_new(state_name: str, name: str, tensor: torch.Tensor) -> None:
    if shards.is_distributed(tensor):
        message = (
            f"TrainState({state_name!r}): {name} is a DTensor built before the fault, and "
            "the process groups of its DeviceMesh are gone: build "
            "the mesh and the model inside the recoverable function"
        )
        raise StateError(message)


def _check_untouched(old: Holding, state_name: str, name: str, tensor: torch.Tensor) -> None:
    parked_version = old.parked_versions.get(id(tensor))
    if parked_version is not None and version_of(tensor) != parked_version:
        message = (
            f"TrainState({state_name!r}): {name} was written to after the fault and before "
            "restore(): the trained values are gone. Build the model inside the recoverable "
            "function, or call restore() before anything initialises it again"
        )
        raise StateError(message)


def _move_optimizer(
    label: str, old: torch.optim.Optimizer, new: torch.optim.Optimizer, meshes: dict[Any, Any]
) -> None:
    is_zero = shards.is_zero(new)
    if old is new:
        if is_zero:
            message = (
                f"{label} was built before the fault, and its process group is gone: build "
                "it inside the recoverable function"
            )
            raise StateError(message)
        return
    before, now = parameters_of(old), parameters_of(new)
    if [len(group["params"]) for group in old.param_groups] != [
        len(group["params"]) for group in new.param_groups
    ]:
        message = (
            f"{label} has {len(now)} parameters in {len(new.param_groups)} groups now and had "
            f"{len(before)} in {len(old.param_groups)} before the fault: build the same optimizer "
            "in every entry"
        )
        raise StateError(message)
    if is_zero != shards.is_zero(old) or (
        is_zero and (new.rank, new.world_size) != (old.rank, old.world_size)
    ):
        message = (
            f"{label} is partitioned over other ranks than before the fault: build the same "
            "optimizer over the same group in every entry"
        )
        raise StateError(message)
    twins = dict(zip(before, now, strict=True))
    # By reference: until the parked state is dropped both optimizers look at one memory, and an
    # interrupt in here loses nothing.
    memory = shards.memory_of(new)
    memory.clear()
    for key, entries in shards.memory_of(old).items():
        memory[twins.get(key, key)] = shards.rewrap(entries, meshes, f"{label}.state")
    for group, parked in zip(new.param_groups, old.param_groups, strict=True):
        write_group(group, parked)


def _different_roles(old: Holding, new: Holding) -> str:
    before = ", ".join(sorted(old.roles.object_roles())) or "nothing"
    now = ", ".join(sorted(new.roles.object_roles())) or "nothing"
    return (
        f"TrainState({new.name!r}) holds {now} now and held {before} before the fault: register "
        "the same objects in every entry"
    )
