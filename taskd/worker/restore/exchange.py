"""Sending one TrainState to a rank that lost it, over the job's default process group.

Owns the protocol between the two ranks of a move; nobody else takes part:

    source                                   receiver
      | -- length, manifest (pickled) -->      |    shapes, dtypes, everything that is not a tensor
      | <-- length, verdict (text, "" = fits)  |    both raise StateError if it does not fit: no hang
      | -- tensors, 32 MiB at a time -->       |    two in flight

Small tensors are packed together, large ones go from and to their own memory. Of a DTensor its
local tensor travels, to a rank with the same shard. Knows neither plan nor parking. Pickle stays
within the job's own process group, whose members run the same script.
"""

from __future__ import annotations

import pickle
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from taskd.errors import StateError
from taskd.worker.objects import shards
from taskd.worker.objects.roles import parameters_of
from taskd.worker.objects.rollback import load_scaler, write_group
from taskd.worker.restore.parking import caches_of

if TYPE_CHECKING:
    from taskd.worker.state.holding import Holding

# large enough for any link, small enough to hold two beside a full model
_CHUNK_BYTES = 32 * 1024 * 1024
# below this a tensor shares a chunk with its neighbours: one message costs about 50 us
_PACKED_BYTES = 1024 * 1024
_IN_FLIGHT = 2


@dataclass(frozen=True)
class Slot:
    """Stands in a manifest for tensor number `index`."""

    index: int


@dataclass(frozen=True)
class Meta:
    """What the receiver must have room for.

    `is_host`: it lives on the CPU even if the parameters do not.

    `shape` is that of the memory, so the local one of a DTensor. `sharding` None: a plain tensor.
    """

    label: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_host: bool
    sharding: shards.Sharding | None = None

    def __str__(self) -> str:
        return (
            f"shape {self.shape}"
            if self.sharding is None
            else (f"local shape {self.shape} as a DTensor {self.sharding}")
        )


@dataclass
class Manifest:
    """One TrainState without its tensors' bytes."""

    version: int
    is_present: bool
    step: int = 0
    shard: str = ""
    problem: str = ""
    named: dict[str, Slot] = field(default_factory=dict)
    caches: set[str] = field(default_factory=set)
    optimizers: dict[str, Any] = field(default_factory=dict)
    # schedulers, scalers, steppers, replicas: packed state_dicts
    states: dict[str, Any] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    metas: list[Meta] = field(default_factory=list)


# ---------------------------------------------------------------- the two ends


def send(holding: Holding, receiver: int, version: int, *, is_present: bool) -> None:
    """Send this rank's copy to `receiver`.

    `is_present` False: this rank has none either (the state is new).

    Raises:
        StateError: it does not fit what the receiver built.
    """
    manifest = Manifest(version, is_present)
    tensors: list[torch.Tensor] = []
    if is_present:
        manifest, tensors = _describe(holding, version)
    try:
        data = pickle.dumps(manifest, 5)
    except (TypeError, AttributeError, pickle.PicklingError) as error:
        manifest = Manifest(
            version,
            is_present,
            problem=f"rank {dist.get_rank()} cannot send it: "
            f"{error}; give objects whose state_dict "
            "can be pickled",
        )
        data = pickle.dumps(manifest, 5)
    device = wire_device(holding.name)
    _send_bytes(data, receiver, device)
    verdict = _receive_bytes(receiver, device).decode()
    if verdict:
        raise StateError(verdict)
    _send_tensors(tensors, receiver, device)


def receive(holding: Holding, source: int) -> bool:
    """Receive the copy of rank `source` into the holding's objects.

    False: the source has none either.

    Raises:
        StateError: it does not fit what this rank built.
    """
    device = wire_device(holding.name)
    manifest: Manifest = pickle.loads(_receive_bytes(source, device))  # noqa: S301
    problem = manifest.problem or (
        _misfit(manifest, holding, source) if manifest.is_present else ""
    )
    verdict = (
        (
            f"TrainState({holding.name!r}) of rank {source} cannot be received by rank "
            f"{dist.get_rank()}: {problem}"
        )
        if problem
        else ""
    )
    _send_bytes(verdict.encode(), source, device)
    if problem:
        raise StateError(verdict)
    if not manifest.is_present:
        return False
    targets = _Targets(manifest, holding)
    _receive_tensors(manifest.metas, targets.tensors, source, device)
    targets.finish()
    return True


def wire_device(name: str) -> torch.device:
    """Where the group's backend wants its tensors."""
    if not dist.is_initialized():
        message = (
            f"TrainState({name!r}): call init_process_group() before restore(): the "
            "state is "
            "received from another rank"
        )
        raise StateError(message)
    backends = str(dist.get_backend_config()).lower()
    for backend, kind in (("nccl", "cuda"), ("hccl", "npu"), ("xccl", "xpu")):
        module = getattr(torch, kind, None)
        if backend in backends and module is not None and module.is_available():
            return torch.device(kind, module.current_device())
    return torch.device("cpu")


# ---------------------------------------------------------------- describing


def _describe(holding: Holding, version: int) -> tuple[Manifest, list[torch.Tensor]]:
    roles = holding.roles
    metas: list[Meta] = []
    tensors: list[torch.Tensor] = []
    slots: dict[int, Slot] = {}  # by id(tensor): one that hangs in two places is sent once

    def pack(label: str, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            slot = slots.get(id(value))
            if slot is None:
                slot = slots[id(value)] = Slot(len(tensors))
                tensors.append(shards.local(value).detach())
                metas.append(_meta_of(label, value))
            return slot
        if isinstance(value, dict):
            return {key: pack(f"{label}.{key}", item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return (
                [pack(label, item) for item in value]
                if isinstance(value, list)
                else tuple(pack(label, item) for item in value)
            )
        return value

    manifest = Manifest(
        version,
        is_present=True,
        step=holding.step,
        shard=holding.shard,
        values=dict(roles.values),
        caches=caches_of(roles),
        metas=metas,
    )
    manifest.named = {name: pack(name, tensor) for name, tensor in roles.named_tensors().items()}
    for role, optimizer in roles.optimizers.items():
        index_of = {parameter: index for index, parameter in enumerate(parameters_of(optimizer))}
        groups = [
            {key: value for key, value in group.items() if key != "params"}
            for group in optimizer.param_groups
        ]
        entries = []
        for key, value in shards.memory_of(optimizer).items():
            is_index = key in index_of
            entries.append(
                (is_index, index_of[key] if is_index else key, pack(f"{role}.state", value))
            )
        manifest.optimizers[role] = (
            groups,
            [len(group["params"]) for group in optimizer.param_groups],
            entries,
        )
    for kind in (roles.schedulers, roles.scalers, roles.steppers, roles.replicas):
        for role, value in kind.items():
            manifest.states[role] = pack(role, value.state_dict())
    return manifest, tensors


def _meta_of(label: str, tensor: torch.Tensor) -> Meta:
    own = shards.local(tensor)
    return Meta(
        label,
        tuple(own.shape),
        own.dtype,
        own.device.type == "cpu",
        shards.sharding_of(tensor, label),
    )


def _misfit(manifest: Manifest, holding: Holding, source: int) -> str:
    """Why the source's state does not fit the objects here, or ""."""
    roles, here = holding.roles, dist.get_rank()
    own = roles.named_tensors()
    caches = manifest.caches | caches_of(roles)
    for name in {**manifest.named, **own}:
        if name in caches:
            continue
        if name not in own:
            return f"rank {source} has {name}, rank {here} has not"
        if name not in manifest.named:
            return f"rank {here} has {name}, rank {source} has not"
        theirs, ours = manifest.metas[manifest.named[name].index], _meta_of(name, own[name])
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
    )  # type: ignore[attr-defined]


def _find_mesh(meshes: list[Any], sharding: shards.Sharding) -> Any:
    """The first of `meshes` with the form that `sharding` names, on which this rank has the place that it names; or None."""
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
    others = {*roles.schedulers, *roles.scalers, *roles.steppers, *roles.replicas}
    if manifest.states.keys() != others:
        return (
            f"rank {source} registered {sorted(manifest.states)} and rank {here} {sorted(others)}"
        )
    return ""


class _Targets:
    """Room for every tensor of a manifest.

    The objects' own where they fit, new memory where there is none.
    """

    def __init__(self, manifest: Manifest, holding: Holding) -> None:
        self._manifest, self._holding = manifest, holding
        self._staged: list[tuple[torch.Tensor, torch.Tensor]] = []  # (received, to copy it to)
        tensors: list[torch.Tensor | None] = [None] * len(manifest.metas)
        own = holding.roles.named_tensors()
        self._meshes = _meshes_of(own)
        self._default_device = next((t.device for t in own.values()), torch.device("cpu"))
        for name, slot in manifest.named.items():
            meta = manifest.metas[slot.index]
            target = shards.local(own[name]) if name in own else None
            if target is None or tuple(target.shape) != meta.shape:
                continue
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
            parameters = parameters_of(optimizer)
            states = self._optimizer_states[role] = {}
            for is_index, key, packed in entries:
                parameter = parameters[key] if is_index else None
                target_key = parameter if is_index else key
                states[target_key] = self._unpack(
                    packed, shards.memory_of(optimizer).get(target_key), parameter
                )
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
            near = [like.device_mesh] if like is not None and shards.is_distributed(like) else []  # type: ignore[attr-defined]
            return shards.wrap(
                tensor, meta.sharding, _find_mesh([*near, *self._meshes], meta.sharding)
            )
        if isinstance(packed, dict):
            known = present if isinstance(present, dict) else {}
            return {key: self._unpack(item, known.get(key), like) for key, item in packed.items()}
        if isinstance(packed, (list, tuple)):
            known_items = (
                present
                if isinstance(present, (list, tuple)) and len(present) == len(packed)
                else [None] * len(packed)
            )
            return type(packed)(
                self._unpack(item, known, like)
                for item, known in zip(packed, known_items, strict=True)
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
        with torch.no_grad():
            for received, target in self._staged:
                target.copy_(received)
        for role, (groups, _, _) in manifest.optimizers.items():
            optimizer = holding.roles.optimizers[role]
            memory = shards.memory_of(optimizer)
            memory.clear()
            memory.update(self._optimizer_states[role])
            for group, remembered in zip(optimizer.param_groups, groups, strict=True):
                write_group(group, remembered)
        for kind in (holding.roles.schedulers, holding.roles.steppers, holding.roles.replicas):
            for role, value in kind.items():
                value.load_state_dict(self._states[role])
        for role, scaler in holding.roles.scalers.items():
            load_scaler(scaler, self._states[role])
        holding.step = manifest.step
        holding.roles.values = dict(manifest.values)


# ---------------------------------------------------------------- bytes


def _send_bytes(data: bytes, peer: int, device: torch.device) -> None:
    dist.send(torch.tensor([len(data)], dtype=torch.int64, device=device), peer)
    if data:
        dist.send(torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device), peer)


def _receive_bytes(peer: int, device: torch.device) -> bytes:
    length = torch.zeros(1, dtype=torch.int64, device=device)
    dist.recv(length, peer)
    if not length.item():
        return b""
    data = torch.empty(int(length.item()), dtype=torch.uint8, device=device)
    dist.recv(data, peer)
    return bytes(data.cpu().untyped_storage())


def _flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's memory as a flat byte tensor: a view if it is contiguous, else a copy."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _chunks(sizes: list[int]) -> list[list[tuple[int, int, int]]]:
    """Cut tensors of these byte sizes into messages: lists of (tensor, first byte, last byte + 1).

    Both ends compute the same.
    """
    chunks: list[list[tuple[int, int, int]]] = []
    packed: list[tuple[int, int, int]] = []
    filled = 0
    for index, size in enumerate(sizes):
        if size >= _PACKED_BYTES:
            chunks += [
                [(index, start, min(start + _CHUNK_BYTES, size))]
                for start in range(0, size, _CHUNK_BYTES)
            ]
        elif size:
            if filled + size > _CHUNK_BYTES:
                chunks.append(packed)
                packed, filled = [], 0
            packed.append((index, 0, size))
            filled += size
    return [*chunks, packed] if packed else chunks


def _send_tensors(tensors: list[torch.Tensor], receiver: int, device: torch.device) -> None:
    in_flight: deque[tuple[Any, torch.Tensor]] = deque()
    for chunk in _chunks([tensor.numel() * tensor.element_size() for tensor in tensors]):
        pieces = [_flat_bytes(tensors[index])[start:end].to(device) for index, start, end in chunk]
        data = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        in_flight.append((dist.isend(data, receiver), data))
        if len(in_flight) >= _IN_FLIGHT:
            in_flight.popleft()[0].wait()
    while in_flight:
        in_flight.popleft()[0].wait()


def _receive_tensors(
    metas: list[Meta], targets: list[torch.Tensor], source: int, device: torch.device
) -> None:
    in_flight: deque[tuple[Any, torch.Tensor, list[tuple[int, int, int]]]] = deque()
    # large tensors that are not contiguous, or not where the wire is
    staged: dict[int, torch.Tensor] = {}

    def arrive() -> None:
        work, data, chunk = in_flight.popleft()
        work.wait()
        offset = 0
        for index, start, end in chunk:
            _put(targets[index], staged, index, (start, end), data[offset : offset + end - start])
            offset += end - start

    sizes = [meta.dtype.itemsize * torch.Size(meta.shape).numel() for meta in metas]
    for chunk in _chunks(sizes):
        in_flight.append(_post(targets, chunk, source, device))
        if len(in_flight) >= _IN_FLIGHT:
            arrive()
    while in_flight:
        arrive()


def _post(
    targets: list[torch.Tensor],
    chunk: list[tuple[int, int, int]],
    source: int,
    device: torch.device,
) -> tuple[Any, torch.Tensor, list[tuple[int, int, int]]]:
    """Start receiving a chunk, straight into the target where that is one piece of contiguous memory."""
    index, start, end = chunk[0]
    target = targets[index]
    if len(chunk) == 1 and target.is_contiguous() and target.device == device:
        data = _flat_bytes(target)[start:end]
    else:
        data = torch.empty(
            sum(end - start for _, start, end in chunk), dtype=torch.uint8, device=device
        )
    return dist.irecv(data, source), data, chunk


def _put(
    target: torch.Tensor,
    staged: dict[int, torch.Tensor],
    index: int,
    span: tuple[int, int],
    data: torch.Tensor,
) -> None:
    """Put received bytes `span` of tensor `index` in place."""
    start, end = span
    size = target.numel() * target.element_size()
    if target.is_contiguous():
        place = _flat_bytes(target)[start:end]
        if place.data_ptr() != data.data_ptr():
            place.copy_(data)
        return
    whole = staged.get(index)
    if whole is None:
        whole = staged[index] = torch.empty(size, dtype=torch.uint8, device=target.device)
    whole[start:end].copy_(data)
    if end == size:
        target.copy_(staged.pop(index).view(target.dtype).view(target.shape))
