"""Where a received TrainState goes: whether it fits what this rank built, and room for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from taskd.worker.objects import devices, kinds, shards
from taskd.worker.objects.memory import overwrite
from taskd.worker.objects.roles import parameters_of
from taskd.worker.objects.rollback import write_group
from taskd.worker.restore.manifest import Manifest, Meta, Slot, meta_of

if TYPE_CHECKING:
    from taskd.worker.objects.named import Named
    from taskd.worker.state.holding import Holding


def misfit(manifest: Manifest, holding: Holding, named: Named, source: int) -> str:
    """Why the source's state does not fit the objects here, or ""."""
    here, own = dist.get_rank(), named.tensors
    caches = manifest.caches | named.caches
    for name in {**manifest.named, **own}:
        if name in caches:
            continue
        if name not in own:
            return f"rank {source} has {name}, rank {here} has not"
        if name not in manifest.named:
            return f"rank {here} has {name}, rank {source} has not"
        theirs, ours = manifest.metas[manifest.named[name].index], meta_of(name, own[name])
        if (theirs.shape, theirs.sharding) != (ours.shape, ours.sharding):
            mine = ours.shape if theirs.sharding is ours.sharding is None else ours
            return f"{name} has {theirs} on rank {source} and {mine} on rank {here}"
    if manifest.shard != holding.shard:
        return f"rank {source} holds the shard {manifest.shard!r} and rank {here} {holding.shard!r}"
    return _misfit_of_optimizers(manifest, holding, source) or _misfit_of_meshes(
        manifest, own, source
    )


def _misfit_of_meshes(manifest: Manifest, own: dict[str, torch.Tensor], source: int) -> str:
    """Optimizer memory and the like are made again here.

    There must be a mesh for them, on which this rank has the same place.
    """
    meshes = _meshes_of(own)
    for meta in manifest.metas:
        if meta.sharding is not None and _find_mesh(meshes, meta.sharding) is None:
            return (
                f"{meta.label} has {meta} on rank {source}, and no parameter of rank "
                f"{dist.get_rank()} lies on such a mesh at that place"
            )
    return ""


def _meshes_of(own: dict[str, torch.Tensor]) -> list[Any]:
    """The DeviceMeshes on which these tensors lie."""
    return list(
        {tensor.device_mesh: None for tensor in own.values() if shards.is_distributed(tensor)}
    )


def _find_mesh(meshes: list[Any], sharding: shards.Sharding) -> Any:
    """The first of `meshes` with the form and this rank's place that `sharding` names; or None."""
    for mesh in meshes:
        if (
            shards.mesh_text(mesh) == sharding.mesh
            and shards.place_on(mesh, sharding.placements) == sharding.place
        ):
            return mesh
    return None


def _misfit_of_optimizers(manifest: Manifest, holding: Holding, source: int) -> str:
    roles, here = holding.roles, dist.get_rank()
    if manifest.optimizers.keys() != roles.optimizers.keys():
        return (
            f"optimizers are {sorted(manifest.optimizers)} on rank {source} and "
            f"{sorted(roles.optimizers)} on rank {here}"
        )
    for role, (_, sizes, _) in manifest.optimizers.items():
        own_sizes = [len(group["params"]) for group in roles.optimizers[role].param_groups]
        if sizes != own_sizes:
            return (
                f"{role} has parameter groups of {sizes} parameters on rank {source} and "
                f"{own_sizes} on rank {here}"
            )
    others = roles.others
    if manifest.states.keys() != others.keys():
        return (
            f"rank {source} registered {sorted(manifest.states)} and rank {here} {sorted(others)}"
        )
    return ""


class Targets:
    """Room for every tensor of a manifest.

    The objects' own where they fit, new memory where there is none.
    """

    def __init__(self, manifest: Manifest, holding: Holding, named: Named) -> None:
        self._manifest, self._holding = manifest, holding
        self._staged: list[tuple[torch.Tensor, torch.Tensor]] = []  # (received, to copy it to)
        tensors: list[torch.Tensor | None] = [None] * len(manifest.metas)
        own = named.tensors
        self._near, self._meshes = own.values(), _meshes_of(own)
        self._default_device = next((t.device for t in own.values()), torch.device("cpu"))
        placed: dict[int, torch.Tensor] = {}
        for name, slot in manifest.named.items():
            meta = manifest.metas[slot.index]
            target = shards.local(own[name]) if name in own else None
            if target is None or tuple(target.shape) != meta.shape:
                continue
            room = tensors[slot.index]
            if room is not None:  # one tensor there
                if placed[slot.index] is not target:  # and several here
                    self._staged.append((room, target))
                continue
            placed[slot.index] = target
            if target.dtype == meta.dtype:
                tensors[slot.index] = target.detach()
            else:
                tensors[slot.index] = torch.empty(
                    meta.shape, dtype=meta.dtype, device=target.device
                )
                self._staged.append((tensors[slot.index], target))  # type: ignore[arg-type]
        self._optimizer_states: dict[str, dict[Any, Any]] = {}
        self._slots = tensors
        for role, (_, _, entries) in manifest.optimizers.items():
            optimizer = holding.roles.optimizers[role]
            parameters, memory = parameters_of(optimizer), shards.memory_of(optimizer)
            states = self._optimizer_states[role] = {}
            for is_index, key, packed in entries:
                parameter = parameters[key] if is_index else None
                target_key = parameter if is_index else key
                states[target_key] = self._unpack(packed, memory.get(target_key), parameter)
        self._states = {
            role: self._unpack(packed, None, None) for role, packed in manifest.states.items()
        }
        self.tensors = [
            self._room(meta, None, None) if tensor is None else tensor
            for tensor, meta in zip(tensors, manifest.metas, strict=True)
        ]

    def _unpack(self, packed: Any, present: Any, like: torch.Tensor | None) -> Any:
        """Put tensors where the manifest has slots.

        `present` is what this rank has in the same place.
        """
        if isinstance(packed, Slot):
            meta = self._manifest.metas[packed.index]
            tensor = self._slots[packed.index]
            if tensor is None:
                tensor = self._slots[packed.index] = self._room(meta, present, like)
            if meta.sharding is None:
                return tensor
            near = [like.device_mesh] if like is not None and shards.is_distributed(like) else []
            return shards.wrap(
                tensor, meta.sharding, _find_mesh([*near, *self._meshes], meta.sharding)
            )
        if isinstance(packed, dict):
            known = present if isinstance(present, dict) else {}
            items = {key: self._unpack(item, known.get(key), like) for key, item in packed.items()}
            return kinds.dict_as(packed, items)
        if isinstance(packed, (list, tuple)):
            known_items = (
                present
                if isinstance(present, (list, tuple)) and len(present) == len(packed)
                else [None] * len(packed)
            )
            items_in_order = zip(packed, known_items, strict=True)
            return kinds.sequence_as(
                packed, (self._unpack(item, known, like) for item, known in items_in_order)
            )
        return packed

    def _room(self, meta: Meta, present: Any, like: torch.Tensor | None) -> torch.Tensor:
        """Memory for one tensor.

        That of `present`, this rank's tensor in the same place, if it fits; else new, laid out as
        `like`'s.
        """
        if isinstance(present, torch.Tensor):
            present = shards.local(present)
            if tuple(present.shape) == meta.shape and present.dtype == meta.dtype:
                return present.detach()
        like = None if like is None else shards.local(like)
        device = (
            torch.device("cpu")
            if meta.is_host
            else (self._default_device if like is None else like.device)
        )
        if like is not None and tuple(like.shape) == meta.shape:
            return torch.empty_like(like, dtype=meta.dtype, device=device, requires_grad=False)
        return torch.empty(meta.shape, dtype=meta.dtype, device=device)

    def finish(self) -> None:
        """All bytes are here: put hyperparameters and the state of everything else in place."""
        holding, manifest = self._holding, self._manifest
        for received, target in self._staged:
            overwrite(target, received)
        for role, (groups, _, _) in manifest.optimizers.items():
            optimizer = holding.roles.optimizers[role]
            memory = shards.memory_of(optimizer)
            memory.clear()
            memory.update(self._optimizer_states[role])
            for group, remembered in zip(optimizer.param_groups, groups, strict=True):
                write_group(group, devices.to_own_device(remembered, group, self._near))
        holding.roles.load_others(self._states)
        holding.step = manifest.step
        holding.roles.values = devices.to_own_device(
            manifest.values, holding.roles.values, self._near
        )
