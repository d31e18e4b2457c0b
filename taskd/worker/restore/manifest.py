"""What one rank says of its TrainState before it sends the tensors: everything but their bytes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from taskd.worker.objects import kinds, shards
from taskd.worker.objects.roles import parameters_of
from taskd.worker.state.own_extras import Told

if TYPE_CHECKING:
    from taskd.worker.objects.named import Named
    from taskd.worker.state.holding import Holding


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
    told: Told = field(default_factory=Told)  # of the extras that it goes with
    held: tuple[str, ...] = ()  # the names of all TrainStates that the sender has of this version
    metas: list[Meta] = field(default_factory=list)


class _Tensors:
    """Those of one TrainState, numbered: what takes their place in the manifest."""

    def __init__(self) -> None:
        self.metas: list[Meta] = []
        self.found: list[torch.Tensor] = []
        self.problem = ""  # why one of them cannot be sent
        # By id(tensor): one that hangs in two places is sent once. With the tensor itself: the id
        # of a copy that a state_dict() has made is free for the next one as soon as nobody has it.
        self._slots: dict[int, tuple[torch.Tensor, Slot]] = {}

    def pack(self, label: str, value: Any) -> Any:
        """`value` with slots for its tensors."""
        if isinstance(value, torch.Tensor):
            return self._slot(label, value)
        if isinstance(value, dict):
            packed = {key: self.pack(f"{label}.{key}", item) for key, item in value.items()}
            return kinds.dict_as(value, packed)
        if isinstance(value, (list, tuple)):
            return kinds.sequence_as(value, (self.pack(label, item) for item in value))
        return value

    def _slot(self, label: str, tensor: torch.Tensor) -> Slot | None:
        if id(tensor) not in self._slots:
            problem = shards.problem_of_memory(tensor)
            if problem:
                self.problem = self.problem or f"{label} {problem}"
                return None
            self._slots[id(tensor)] = tensor, Slot(len(self.found))
            self.found.append(shards.local(tensor).detach())
            self.metas.append(meta_of(label, tensor))
        return self._slots[id(tensor)][1]


def describe(
    holding: Holding, named: Named, version: int, told: Told
) -> tuple[Manifest, list[torch.Tensor]]:
    """The manifest of this rank's copy, and the tensors that its slots number.

    With a `problem` if there is a tensor that cannot be sent.
    """
    roles = holding.roles
    tensors = _Tensors()
    pack = tensors.pack
    manifest = Manifest(
        version,
        is_present=True,
        step=holding.step,
        shard=holding.shard,
        values=dict(roles.values),
        told=told,
        caches=named.caches,
        metas=tensors.metas,
    )
    manifest.named = {name: pack(name, tensor) for name, tensor in named.tensors.items()}
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
    for role, value in roles.others.items():
        manifest.states[role] = pack(role, value.state_dict())
    manifest.problem = tensors.problem
    return manifest, tensors.found


def meta_of(label: str, tensor: torch.Tensor) -> Meta:
    """The description of one tensor; `label`: its name in messages."""
    own = shards.local(tensor)
    return Meta(
        label,
        tuple(own.shape),
        own.dtype,
        own.device.type == "cpu",
        shards.sharding_of(tensor, label),
    )
