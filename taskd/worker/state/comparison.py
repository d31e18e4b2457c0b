"""Whether ranks that count as replicas of one shard are: the vote carries a sample of each.

DTensors of one name on two meshes beside each other look alike. They are the replicas of a
tensor-parallel model, or the stages of a pipeline that were built alike: their content tells. It is
compared in the votes 1, 2, 4, 8, ... of an entry, since stages that were seeded alike differ from
their first step on (of a warm-up with a learning rate of 0, from a later one). Knows no collective.
"""

from __future__ import annotations

import hashlib
import logging
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from taskd.errors import StateError
from taskd.worker.objects import shards
from taskd.worker.objects.roles import parameters_of

if TYPE_CHECKING:
    from taskd.worker.objects.identity import Identity
    from taskd.worker.objects.named import Named
    from taskd.worker.objects.roles import Roles

log = logging.getLogger(__name__)

_PER_TENSOR = 16  # elements of a sample: a step changes nearly all of them
_DIGEST_BYTES = 6
_HALF = 1 << 24  # the vote adds up float32, which have each integer below
_NONE = [0.0, 0.0]


class Comparison:
    """Of one TrainState in one entry. All ranks have one, and vote equally often."""

    def __init__(self, name: str, identity: Identity, roles: Roles, named: Named) -> None:
        """`name`: of the TrainState. What has a shard_id is what its script says."""
        self._name, self._identity, self._roles, self._votes = name, identity, roles, 0
        # two ranks that have no shard_id, and tensors of other names than each other
        self.other_names: tuple[int, int] | None = None
        self._names = _NONE
        if identity.shard and not identity.part:
            self._names = _digest("\n".join(sorted(named.tensors.keys() - named.caches)).encode())

    def row(self) -> list[float] | None:
        """What this rank gives to the vote that begins; None: nothing is compared in it.

        Digests of its shard's identity, of the sample, and of its names, each in two halves.
        """
        self._votes += 1
        if self._votes & (self._votes - 1):
            return None
        sample = None if self._identity.part else self._sample()
        # as ranks are told apart in a recovery: a stage may have a name of its own
        return [
            *_digest(f"{self._name}={self._identity.shard}".encode()),
            *(_NONE if sample is None else _digest(sample)),
            *self._names,
        ]

    def conclude(self, rows: list[list[float]]) -> None:
        """`rows`: of all ranks, the same on each.

        Raises:
            StateError: two of them have the same shard, and not the same content.
        """
        samples: dict[tuple[float, ...], tuple[int, list[float]]] = {}
        for rank, row in enumerate(rows):
            shard, sample = tuple(row[:2]), row[2:4]
            first, other = (
                samples.setdefault(shard, (rank, sample)) if any(sample) else (rank, sample)
            )
            if other != sample:
                message = (
                    f"TrainState({self._name!r}): rank {first} and rank {rank} would count "
                    "as replicas, as their DTensors have the same names and the same place on "
                    "meshes of one form, but their content differs: they hold parts of different "
                    "models (the stages of a pipeline). Give the TrainState a shard_id that is the "
                    "same on the ranks of one part alone, for example the number of the stage"
                )
                raise StateError(message)
        self._compare_names([(rank, row[4:]) for rank, row in enumerate(rows) if any(row[4:])])

    def _compare_names(self, names: list[tuple[int, list[float]]]) -> None:
        second = next((rank for rank, other in names if other != names[0][1]), None)
        if second is None or self.other_names is not None:
            return
        self.other_names = (names[0][0], second)
        if dist.get_rank() == 0:
            log.warning(
                "TrainState(%r): rank %d and rank %d have tensors of other names than each other: "
                "it cannot be saved. Give it a shard_id that is the same on the ranks of one part "
                "alone",
                self._name,
                *self.other_names,
            )

    def _sample(self) -> bytes | None:
        """Some elements of each parameter that lies on a part of the world; None: there is none.

        Those of optimizers: they are whole or not, but always there.
        """
        world = dist.get_world_size()
        samples: list[torch.Tensor] = []
        for optimizer in self._roles.optimizers.values():
            samples += [
                _some_of(shards.local(parameter))
                for parameter in parameters_of(optimizer)
                if shards.is_distributed(parameter) and parameter.device_mesh.size() < world
            ]
        if not samples:
            return None
        return b"".join(part.numpy().tobytes() for part in _by_device(samples))


def _some_of(own: torch.Tensor) -> torch.Tensor:
    """A few elements from the middle, without a copy of the others."""
    own = own.detach()
    if not own.numel():
        return own.new_empty(0, dtype=torch.float32)
    while own.dim() > 1:
        own = own.select(0, own.shape[0] // 2)
    own = own.reshape(-1)
    own = own[:: 1 + own.shape[0] // _PER_TENSOR]
    return (torch.view_as_real(own).reshape(-1) if own.is_complex() else own).to(torch.float32)


def _by_device(samples: list[torch.Tensor]) -> list[torch.Tensor]:
    """One for each device, so that each is waited for once."""
    groups: dict[torch.device, list[torch.Tensor]] = {}
    for sample in samples:
        groups.setdefault(sample.device, []).append(sample)
    return [torch.cat(group).cpu() for group in groups.values()]


def _digest(data: bytes) -> list[float]:
    """Two halves, never both 0."""
    number = int.from_bytes(hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest(), "big") or 1
    return [float(number // _HALF), float(number % _HALF)]
