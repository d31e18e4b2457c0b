"""The tensors of one TrainState by name: derived once, and handed on to whoever needs them."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from taskd.worker.objects import shards

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Mapping

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

    @property
    def shared(self) -> dict[str, str]:
        """The further names of tensors that have several, with the first one of each."""
        return {
            name: self.names[id(tensor)]
            for name, tensor in self.tensors.items()
            if name not in self.distinct
        }

    def align(self, others: Mapping[str, Hashable]) -> str:
        """Make buffers one tensor where they are one elsewhere, and several where they are several.

        A module may begin with one tensor for two buffers, and put other ones in its place; or have
        one buffer take the place of another. Parameters, and what has another form, stay several.

        Args:
            others: what stands elsewhere for the tensor of each name; equal if it is one there.

        Returns:
            What cannot be: a parameter is one tensor here under names that are several there.
            Nothing is changed then. Else "".
        """
        wrong = self._unlike(others)
        places = self._places_of(wrong, others)
        first: dict[int, str] = {}
        for name, tensor in self.tensors.items():
            if name in others:
                before = first.setdefault(id(tensor), name)
                if others[before] != others[name] and name not in places:
                    return f"{before} and {name} are one tensor"
        self._put(wrong & places.keys(), others, places)
        return ""

    def unfold(self) -> None:
        """Give buffers memory for each of their elements, so that they can be written to.

        Those that an expand() made have one for several.
        """
        folded = {name: id(one) for name, one in self.tensors.items() if _is_folded(one)}
        made: dict[int, torch.Tensor] = {}
        for name, (part, attribute) in self._places_of(folded, folded).items():
            key = folded[name]
            if key not in made:
                made[key] = self.tensors[name].detach().contiguous()
            part._buffers[attribute] = self.tensors[name] = made[key]
        if folded:
            self._forget()

    def _forget(self) -> None:
        """The tensors are other ones now."""
        vars(self).pop("distinct", None)
        vars(self).pop("names", None)

    def _unlike(self, others: Mapping[str, Hashable]) -> set[str]:
        """Names whose tensor has another first name here than elsewhere."""
        here: dict[int, str] = {}
        there: dict[Hashable, str] = {}
        return {
            name
            for name, tensor in self.tensors.items()
            if name in others
            and here.setdefault(id(tensor), name) != there.setdefault(others[name], name)
        }

    def _places_of(
        self, names: Collection[str], others: Mapping[str, Hashable]
    ) -> dict[str, tuple[torch.nn.Module, str]]:
        """The module and the attribute of those that are buffers.

        Without buffers of a module that has several names, and other tensors elsewhere.
        """
        found: dict[str, tuple[torch.nn.Module, str]] = {}
        keys: dict[tuple[int, str], set[Hashable]] = {}
        for role, module in self._roles.modules.items() if names else ():
            for path, part in module.named_modules(remove_duplicate=False):
                for attribute in part._buffers.keys():  # noqa: SIM118  # those of torch.jit: no dict
                    name = ".".join(word for word in (role, path, attribute) if word)
                    if name in others:
                        found[name] = part, attribute
                        keys.setdefault((id(part), attribute), set()).add(others[name])
        return {
            name: (part, attribute)
            for name, (part, attribute) in found.items()
            if len(keys[id(part), attribute]) == 1
        }

    def _put(
        self,
        names: Collection[str],
        others: Mapping[str, Hashable],
        places: Mapping[str, tuple[torch.nn.Module, str]],
    ) -> None:
        made: dict[Hashable, torch.Tensor] = {}
        for name, tensor in self.tensors.items():
            if name in others and name not in names:
                made.setdefault(others[name], tensor)
        for name in [name for name in self.tensors if name in names]:
            own, (part, attribute) = self.tensors[name], places[name]
            other = made.get(others[name])
            if other is None:
                other = made[others[name]] = own.detach().clone()
            if (other.shape, other.dtype, other.device) == (own.shape, own.dtype, own.device):
                part._buffers[attribute] = self.tensors[name] = other
        if names:
            self._forget()

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


def _is_folded(tensor: torch.Tensor) -> bool:
    """Whether one element in memory is several of the tensor."""
    return not shards.is_distributed(tensor) and any(
        size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
