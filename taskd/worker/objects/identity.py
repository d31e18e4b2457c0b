"""Which part of the state a rank holds, as a text that is equal on the ranks with the same part."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, NamedTuple

import torch

from taskd.errors import StateError
from taskd.worker.objects import shards, units

if TYPE_CHECKING:
    from taskd.worker.objects.roles import Roles

_MAX_TEXT = 64  # of a shard's identity: it travels with every report of a rank
_DIGEST_CHARACTERS = 12  # 48 bits tell the few shards apart that share a readable prefix


class Identity(NamedTuple):
    """Each of at most 64 characters; "": every rank has the same.

    `part`: which plain tensors, by `shard_id` and FSDP1. `shard`: the whole content, which adds
    DTensors and the partition of a `ZeroRedundancyOptimizer`.
    """

    part: str
    shard: str


def identity_of(roles: Roles, shard_id: str | int | None = None) -> Identity:
    """What this rank holds.

    Decided from the parameters and buffers, from the partition of a `ZeroRedundancyOptimizer`, and
    from optimizer memory only where that is sharded over more dimensions than they are: so it is
    the same before and after an optimizer has made its memory. Two ranks whose plain tensors differ
    (the stages of a pipeline) need a `shard_id`; what is found within that part is added to it.

    Raises:
        StateError: a tensor with a Partial placement, or that holds others; a `shard_id` that is
            too long, or neither text nor number.
    """
    part = _joined(_checked(shard_id), *units.places_of(roles.modules))
    places: dict[str, None] = {}  # an ordered set
    details: list[str] = []
    for name, tensor in roles.named_tensors().items():
        _check_class(name, tensor)
        _note(name, tensor, places, details)
    for role, optimizer in roles.optimizers.items():
        if shards.is_zero(optimizer):
            if optimizer.world_size > 1:
                place = f"zero{optimizer.rank}/{optimizer.world_size}"
                places[place] = None
                details.append(f"{role} {place}")
            continue
        known = set(places)
        for value in optimizer.state.values():
            for key, item in value.items() if isinstance(value, dict) else ():
                if isinstance(item, torch.Tensor):
                    _check_class(f"{role}.state.{key}", item)
                if shards.is_distributed(item) and not known.issuperset(
                    shards.places(item.device_mesh, tuple(item.placements))
                ):
                    _note(f"{role}.state.{key}", item, places, details)
    return Identity(part, _joined(part, list(places), details))


def _joined(shard_id: str, places: list[str], details: list[str]) -> str:
    """One text of at most 64 characters. `details`: what makes it unique."""
    if not places:
        return shard_id
    if shard_id:
        places = [shard_id, *places]
        details = [*details, f"shard_id {shard_id}"]
    digest = hashlib.blake2b("\n".join(details).encode()).hexdigest()[:_DIGEST_CHARACTERS]
    return f"{'.'.join(places)[: _MAX_TEXT - _DIGEST_CHARACTERS - 1]}-{digest}"


def _note(name: str, tensor: torch.Tensor, places: dict[str, None], details: list[str]) -> None:
    """Add a tensor to what identifies the shard, if it is sharded."""
    sharding = shards.sharding_of(tensor, name)
    if sharding is not None and sharding.place:
        places.update(dict.fromkeys(shards.places(tensor.device_mesh, sharding.placements)))
        details.append(f"{name} {sharding.without_replicas()}")


def _check_class(name: str, tensor: torch.Tensor) -> None:
    """Other tensors that cannot be sent may be none that anybody needs."""
    if shards.is_of_others(tensor):
        raise StateError(f"{name} cannot be carried: it {shards.problem_of_memory(tensor)}")


def _checked(shard_id: str | int | None) -> str:
    """The text of a `shard_id`; "" for None."""
    if shard_id is None:
        return ""
    if isinstance(shard_id, bool) or not isinstance(shard_id, (str, int)):
        message = (
            "shard_id must be text or a number that is equal on the ranks that hold the "
            f"same shard, not {shard_id!r}"
        )
        raise StateError(message)
    text = str(shard_id)
    if len(text.encode()) > _MAX_TEXT:
        message = (
            f"shard_id has {len(text.encode())} bytes: at most {_MAX_TEXT} are carried; "
            "give a shorter text, or a number"
        )
        raise StateError(message)
    return text
