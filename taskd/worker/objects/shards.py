"""What part of the state this rank holds, and the memory in which it holds it.

Owns the reading of torch's sharded tensors: DTensor (FSDP2 `fully_shard`, HSDP, TP) and the
partition of a `ZeroRedundancyOptimizer`. FSDP1 is the business of `taskd.worker.objects.units`.
Pure functions over tensors: no collective, no process group. Classes of torch are looked up among
the modules that the user's script has imported, so that replicated training imports nothing for
them.

A DTensor is a local tensor and a place on a DeviceMesh. The mesh names process groups, and these do
not survive a recovery: what is kept is the local tensor and a `Sharding`, and the DTensor is made
again on the mesh of the new generation.
"""

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from taskd.checkpoint.cast import is_cast, plain
from taskd.errors import StateError
from taskd.worker import internals
from taskd.worker.objects import units
from taskd.worker.objects.kinds import dict_as, sequence_as


@dataclass(frozen=True)
class Sharding:
    """How a DTensor lies on its mesh, without the mesh itself.

    Two ranks with equal ones hold the same elements.

    `shape` and `stride` are those of the global tensor, `mesh` names the mesh's dimensions and
    their sizes, `place` this rank's coordinates on those that the tensor is sharded over ("" if it
    is replicated).
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    placements: tuple[Any, ...]
    mesh: str
    place: str

    def __str__(self) -> str:
        placements = ", ".join(map(str, self.placements))
        return (f"of shape {self.shape}, placed {placements} on mesh {self.mesh}") + (
            f" at {self.place}" if self.place else ""
        )

    def without_replicas(self) -> "Sharding":
        """The same however many replicas there are: `place` says over what it is sharded."""
        return replace(self, mesh="")


# ---------------------------------------------------------------- one tensor


def is_distributed(value: Any) -> bool:
    """Whether it is a DTensor, replicated ones included."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The memory that this rank holds: of a DTensor its local tensor, else the tensor itself.

    Of a cast (`taskd.checkpoint.cast`) the tensor within. Neither waits nor records a gradient.
    """
    return plain(_held(tensor))


def _held(tensor: torch.Tensor) -> torch.Tensor:
    """The same with a cast as it is."""
    if not is_distributed(tensor):
        return tensor
    own: torch.Tensor
    if internals.has("the local tensor of a DTensor", (tensor, "_local_tensor")):
        own = tensor._local_tensor
        return own
    with torch.no_grad():
        own = tensor.to_local()  # type: ignore[attr-defined]
        return own


def is_of_others(tensor: torch.Tensor) -> bool:
    """Whether the memory that this rank holds of it is that of tensors within.

    Of a class that acts on each operation, that is. One that adds methods or attributes alone has
    the memory of a tensor, and so has a cast.
    """
    own = _held(tensor)
    is_plain = type(own).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    return not is_plain and not is_cast(own)


def problem_of_memory(tensor: torch.Tensor) -> str:
    """Why the bytes that this rank holds of it are not all that it is, or ""."""
    own = local(tensor)
    if is_of_others(tensor):
        return (
            f"is a {type(own).__name__}, whose content is in tensors within it: keep plain tensors "
            "in modules and in the memory of optimizers, and make such a one of them in the "
            "forward pass"
        )
    if own.layout is not torch.strided or own.is_quantized or own.is_nested:
        return (
            f"is a tensor with layout {own.layout} and dtype {own.dtype}: only dense ones can be "
            "sent; keep the tensors that it is made of"
        )
    return ""


def sharding_of(tensor: torch.Tensor, name: str = "a tensor") -> Sharding | None:
    """How the DTensor lies on its mesh; None for a plain tensor.

    Raises:
        StateError: it has a Partial placement: what it holds is a summand, not a part.
    """
    if not is_distributed(tensor):
        return None
    mesh: Any = tensor.device_mesh
    placements = tuple(tensor.placements)
    if any(placement.is_partial() for placement in placements):
        message = (
            f"{name} is a DTensor with placements {placements}: a Partial one is a sum that "
            "is not complete yet. Call "
            "redistribute() with Shard or Replicate before it becomes part of the state"
        )
        raise StateError(message)
    return Sharding(
        tuple(tensor.shape),
        tuple(tensor.stride()),
        placements,
        mesh_text(mesh),
        place_on(mesh, placements),
    )


def spans(tensor: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Where this rank's local tensor lies.

    The global shape, and the index of its first element there, both in elements.

    A rank that holds nothing has the offset one past the end in the sharded dimensions.

    Raises:
        StateError: the local tensor has not the shape that its placements give
            (`DTensor.from_local` with uneven shards).
    """
    shape = tuple(tensor.shape)
    if not is_distributed(tensor):
        return shape, (0,) * len(shape)
    sharding = sharding_of(tensor)
    assert sharding is not None
    local_shape, offsets = _place_in(sharding, tensor.device_mesh)
    own = tuple(local(tensor).shape)
    if own != tuple(local_shape) and local(tensor).numel():
        message = (
            f"a DTensor {sharding_of(tensor)} has a local tensor of shape {own}; its "
            f"placements give {tuple(local_shape)}"
        )
        raise StateError(message)
    return shape, tuple(offsets) if offsets else shape


def _place_in(sharding: Sharding, mesh: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shape of this rank's part, and the index of its first element."""

    def place() -> tuple[tuple[int, ...], tuple[int, ...]]:
        from torch.distributed.tensor._utils import (  # noqa: PLC0415
            compute_local_shape_and_global_offset,
        )

        return compute_local_shape_and_global_offset(  # type: ignore[no-any-return]
            sharding.shape, mesh, sharding.placements
        )

    found = internals.attempt("the place of a local tensor", place)
    if found is None:
        raise StateError(f"where a part of {sharding} lies cannot be said on this torch")
    return found


def wrap(own: torch.Tensor, sharding: Sharding, mesh: Any) -> torch.Tensor:
    """A DTensor over the memory of `own`, on another mesh of the same form. No communication."""
    from torch.distributed.tensor import DTensor  # noqa: PLC0415

    with torch.no_grad():
        return DTensor.from_local(
            own,
            mesh,
            sharding.placements,
            run_check=False,
            shape=torch.Size(sharding.shape),
            stride=sharding.stride,
        )


def placements_beside(tensor: torch.Tensor, parameter: torch.Tensor) -> list[str] | None:
    """How a DTensor lies on the mesh of its parameter, as text.

    For each dimension of the mesh "=" (as the parameter), "R" (replicated), or "S" and the number
    of the dimension that is sharded. None: on another mesh, in another way, or no DTensor.
    """
    if not (is_distributed(tensor) and is_distributed(parameter)):
        return None
    from torch.distributed.tensor import Shard  # noqa: PLC0415

    found: list[str] = []
    for own, other in zip(tensor.placements, parameter.placements, strict=False):
        if own == other:
            found.append("=")
        elif own.is_replicate() or type(own) is Shard:
            found.append("R" if own.is_replicate() else f"S{own.dim}")
    is_all = len(found) == len(tensor.placements)
    return found if is_all and tensor.device_mesh == parameter.device_mesh else None


def room_beside(
    parameter: Any, placements: list[str], shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    """A DTensor without content on the mesh of a parameter.

    `placements`: as of `placements_beside`. If that mesh had another number of dimensions, it is
    sharded as the parameter where it has the sharded dimension in the same size.
    """
    from torch.distributed.tensor import Replicate, Shard  # noqa: PLC0415

    mesh, others = parameter.device_mesh, tuple(parameter.placements)
    if len(placements) != len(others):
        is_alike = len(shape) == parameter.dim()
        placements = [
            "=" if is_alike and _has_same_size(shape, parameter, other) else "R" for other in others
        ]
    made = tuple(
        other if text == "=" else Replicate() if text == "R" else Shard(int(text[1:]))
        for text, other in zip(placements, others, strict=True)
    )
    sharding = Sharding(
        shape, torch.empty(shape, device="meta").stride(), made, mesh_text(mesh), ""
    )
    size, _ = _place_in(sharding, mesh)
    own = torch.empty(size, dtype=dtype, device=local(parameter).device)
    return wrap(own, sharding, mesh)


def _has_same_size(shape: tuple[int, ...], parameter: torch.Tensor, placement: Any) -> bool:
    """Of the dimension that a placement shards."""
    return placement.is_shard() and shape[placement.dim] == parameter.shape[placement.dim]


def rewrap(value: Any, meshes: dict[Any, Any], name: str) -> Any:
    """`value` with every DTensor in it made again on the mesh that `meshes` has for its own.

    Old memory, new mesh.

    Containers without DTensors stay the same objects.

    Raises:
        StateError: a DTensor lies on a mesh that `meshes` has not.
    """
    if isinstance(value, torch.Tensor):
        sharding = sharding_of(value, name)
        if sharding is None:
            return value
        mesh = meshes.get(value.device_mesh)
        if mesh is None:
            message = (
                f"{name} is a DTensor {sharding}, and no parameter lies on this mesh now: build "
                "the same mesh and the same model in every entry"
            )
            raise StateError(message)
        return wrap(_held(value), sharding, mesh)
    if isinstance(value, dict):
        items = {key: rewrap(item, meshes, f"{name}.{key}") for key, item in value.items()}
        is_same = all(items[key] is item for key, item in value.items())
        return value if is_same else dict_as(value, items)
    if isinstance(value, (list, tuple)):
        parts = [rewrap(item, meshes, name) for item in value]
        return (
            value
            if all(part is item for part, item in zip(parts, value, strict=True))
            else sequence_as(value, parts)
        )
    return value


def mesh_text(mesh: Any) -> str:
    """The dimensions of a DeviceMesh with their sizes: "replicate2.shard4"."""
    return ".".join(f"{name}{mesh.size(index)}" for index, name in enumerate(_dimensions(mesh)))


def place_on(mesh: Any, placements: tuple[Any, ...]) -> str:
    """This rank's coordinates on the dimensions that `placements` shard over: "shard1/4"."""
    return ".".join(places(mesh, placements))


def places(mesh: Any, placements: tuple[Any, ...]) -> list[str]:
    """The same, one text for each dimension."""
    coordinate = mesh.get_coordinate()  # None: this rank is no member of the mesh
    return [
        f"{name}{'-' if coordinate is None else coordinate[index]}/{mesh.size(index)}"
        for index, (name, placement) in enumerate(zip(_dimensions(mesh), placements, strict=True))
        if not placement.is_replicate() and mesh.size(index) > 1
    ]


def _dimensions(mesh: Any) -> list[str]:
    names = mesh.mesh_dim_names
    return (
        list(names)
        if names
        else [f"dim{index}-" for index in range(mesh.ndim)]
        if mesh.ndim > 1
        else ["shard"]
    )


# ---------------------------------------------------------------- memory of optimizers and FSDP2


def is_zero(optimizer: Any) -> bool:
    """Whether it is a `ZeroRedundancyOptimizer`.

    Its memory is in an optimizer within, over the parameters of this rank's part.
    """
    module = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    return module is not None and isinstance(optimizer, module.ZeroRedundancyOptimizer)


def memory_of(optimizer: torch.optim.Optimizer) -> dict[Any, Any]:
    """The optimizer's memory by parameter, as this rank holds it."""
    keeper = optimizer.optim if is_zero(optimizer) else optimizer
    memory: dict[Any, Any] = keeper.state
    return memory


def reshard(module: torch.nn.Module) -> None:
    """Give FSDP its shards back, wherever a pass was cut short, and free the whole parameters.

    While these are in use they stand in the module in place of the shards. FSDP2's
    `FSDPModule.reshard()` would leave them there in the middle of a forward pass, and trusts in a
    state that an interrupt may have left half changed.
    """
    if problem_of(module):
        for part in _parts_of(module):
            part.reshard()
    for group in _groups_of(module):
        group._to_sharded()
        for parameter in group.fsdp_params:
            parameter.to_sharded()
    units.reshard(module)


def drop_whole_gradients(module: torch.nn.Module) -> None:
    """Free gradients of whole FSDP parameters.

    A backward pass that was cut short has not reduced them to the shards.
    """
    for group in _groups_of(module):
        group._partial_reduce_output = None
        for parameter in group.fsdp_params:
            if "unsharded_accumulated_grad" in vars(parameter):  # torch before 2.15 adds up there
                parameter.unsharded_accumulated_grad = None
            whole = getattr(parameter, "_unsharded_param", None)
            if whole is not None:
                whole.grad = None
    units.drop_gradients(module)


def problem_of(module: torch.nn.Module) -> str:
    """Why an interrupted pass cannot be undone in the module; "": it can. Looks at one part."""
    part = next(_parts_of(module), None)
    if part is None or _is_known(part):
        return ""
    return "this torch does not let taskd see the parameter groups of FSDP2"


def _is_known(part: Any) -> bool:
    def has(*places: tuple[object, str]) -> bool:
        return internals.has("the parameter groups of FSDP2", *places)

    if not has((part, "_get_fsdp_state")):
        return False
    state = part._get_fsdp_state()
    if not hasattr(state, "_fsdp_param_groups") and not has((state, "_fsdp_param_group")):
        return False
    names = ("_to_sharded", "fsdp_params", "_partial_reduce_output")
    return all(
        has(*((group, name) for name in names))
        and has(*((parameter, "to_sharded") for parameter in group.fsdp_params))
        for group in _groups_in(part)
    )


def _parts_of(module: torch.nn.Module) -> Iterator[Any]:
    """The module and those within that FSDP2 shards."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    kind = None if fsdp is None else getattr(fsdp, "FSDPModule", None)
    if kind is not None:
        yield from (part for part in module.modules() if isinstance(part, kind))


def _groups_of(module: torch.nn.Module) -> Iterator[Any]:
    """FSDP2's parameter groups in the module and those within; none if they are not known."""
    if not problem_of(module):
        for part in _parts_of(module):
            yield from _groups_in(part)


def _groups_in(part: Any) -> Iterable[Any]:
    state = part._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # before torch 2.12 there is one
        groups = [state._fsdp_param_group] if state._fsdp_param_group is not None else []
    return groups  # type: ignore[no-any-return]


def forget_meshes() -> None:
    """Empty DTensor's caches.

    They know a mesh by its form, and would give results on the new mesh to the old one and its dead
    groups.
    """
    if "torch.distributed.tensor" in sys.modules:
        internals.attempt("the caches of DTensor", _empty_caches)


def prepare_caches() -> None:
    """Import what empties them: when they are emptied there is no time for it."""
    if "torch.distributed.tensor" in sys.modules:
        internals.attempt("the caches of DTensor", _owners_of_caches)


def _owners_of_caches() -> tuple[Any, Any, Any]:
    from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: PLC0415
    from torch.distributed.tensor import _redistribute, debug  # noqa: PLC0415

    return FakeTensorMode, _redistribute, debug


def _empty_caches() -> None:
    fakes, redistribute, debug = _owners_of_caches()
    # Not under every release of torch. Groups have the same names in every generation, so that
    # most results work all the same. The shapes that results are computed from go with them:
    # each generation would add its own, 160 kB.
    for owner, name in (
        (debug, "_clear_sharding_prop_cache"),
        (redistribute._gen_transform_infos, "cache_clear"),
        (fakes, "cache_clear"),
    ):
        getattr(owner, name, lambda: None)()
