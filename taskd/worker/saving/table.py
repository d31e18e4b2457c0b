"""The tensors of one TrainState under their names, kept while its objects hold the same ones.

Finding and naming a tensor costs some microseconds, on the training thread, at every snapshot; to
see that it is still the same one costs a tenth.
"""

from __future__ import annotations

from itertools import chain
from operator import attrgetter, is_
from typing import TYPE_CHECKING, Any

import torch

from taskd.worker.objects import shards
from taskd.worker.objects.named import Named
from taskd.worker.state import flat

if TYPE_CHECKING:
    from collections.abc import Iterator

    from taskd.worker.state.holding import Holding

_shape = attrgetter("shape")


class Table:
    """Holds on to every object that it has looked at: none can get the address of another.

    `tensors`: as `flat.tensors`. `memories`: as `flat.memories`.
    """

    def __init__(self, holding: Holding) -> None:
        """Raises StateError: an optimizer that cannot be taken apart."""
        roles = holding.roles
        self._roots = list(roles.modules.values())
        self.named = Named(roles)
        self.tensors = flat.tensors(holding, self.named)
        self.memories = flat.memories(holding, self.named)
        # those of torch.jit's modules are none, but have keys() and values()
        self._dicts: list[dict[Any, Any]] = []
        for module in (part for root in self._roots for part in root.modules()):
            self._dicts += [module._parameters, module._buffers, module._modules]
        self._optimizers = list(roles.optimizers.values())
        for memory in map(shards.memory_of, self._optimizers):
            self._dicts += [
                memory,
                *(entries for entries in memory.values() if isinstance(entries, dict)),
            ]
        self._objects = list(self._objects_now())
        held = list(
            {
                id(value): value for value in self._objects if isinstance(value, torch.Tensor)
            }.values()
        )
        self._sharded = [
            (tensor, shards.local(tensor)) for tensor in held if shards.is_distributed(tensor)
        ]
        self._own = [shards.local(tensor) for tensor in held]
        self._spans = self._spans_now()

    def is_current(self) -> bool:
        """Whether all of it is as it was.

        The objects, their names, and the memory of the tensors.
        """
        for root in self._roots:
            shards.reshard(root)
        objects = list(self._objects_now())
        return (
            len(objects) == len(self._objects)
            and all(map(is_, objects, self._objects))
            and all(shards.local(tensor) is own for tensor, own in self._sharded)
            and self._spans_now() == self._spans
        )

    def _objects_now(self) -> Iterator[Any]:
        """All that has an identity to compare.

        Keys are the same objects as long as nobody has put in others.
        """
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        memories = map(shards.memory_of, self._optimizers)
        return chain(
            *(each.keys() for each in self._dicts),
            *(each.values() for each in self._dicts),
            memories,
            groups,
            *(group["params"] for group in groups),
        )

    def _spans_now(self) -> tuple[list[int], list[torch.Size]]:
        return list(map(torch.Tensor.data_ptr, self._own)), list(map(_shape, self._own))
