"""The tensors of one TrainState by name: derived once, and handed on to whoever needs them."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from taskd.worker.objects.roles import Roles


class Named:
    """What `Roles.named_tensors` gave. Valid while the objects hold the same tensors."""

    def __init__(self, roles: Roles) -> None:
        self._roles = roles
        self.tensors = roles.named_tensors()

    @cached_property
    def distinct(self) -> dict[str, torch.Tensor]:
        """Each tensor once, under its first name."""
        first: dict[int, str] = {}
        for name, tensor in self.tensors.items():
            first.setdefault(id(tensor), name)
        return {name: self.tensors[name] for name in first.values()}

    @cached_property
    def names(self) -> dict[int, str]:
        """The first name of each tensor, by identity."""
        return {id(tensor): name for name, tensor in self.distinct.items()}

    @cached_property
    def caches(self) -> set[str]:
        """Names of buffers that are no part of a state_dict: moved where they fit, else left."""
        return {
            ".".join(word for word in (role, path, key) if word)
            for role, module in self._roles.modules.items()
            for path, part in module.named_modules()
            for key in part._non_persistent_buffers_set
        }

    @cached_property
    def optional(self) -> set[str]:
        """Of `distinct`, what is a cache and nothing else under another name."""
        needed = {id(tensor) for name, tensor in self.tensors.items() if name not in self.caches}
        return {name for name, tensor in self.distinct.items() if id(tensor) not in needed}
