"""Objects that carry a position.

Samplers, loaders, generators, and whatever else is one rank's alone.

Owns when their states are read. What walks through data is not asked before the first step of an
entry: asking some of them starts their processes, which fetch ahead at once, before the script has
set the epoch. Until then the state that was restored, or none, stands for it.
"""

import copy
import logging
import random
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, Sampler
from torch.utils.data.sampler import (
    BatchSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

log = logging.getLogger(__name__)

# Their passes begin with the first sample, whatever a subclass says in its state_dict().
_BEGIN_ANEW = {
    kind.__iter__
    for kind in (
        DistributedSampler,
        RandomSampler,
        SequentialSampler,
        SubsetRandomSampler,
        WeightedRandomSampler,
    )
}


def walks_data(value: Any) -> bool:
    """Whether its position is one in the data.

    A loader, a sampler, anything that is iterated or holds one of these.

    Decided without asking for its state.
    """
    if _is_iterated(value):
        return True
    attributes = getattr(value, "__dict__", None) or {}
    return any(isinstance(item, (DataLoader, Sampler)) for item in attributes.values())


def _is_iterated(value: Any) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, Mapping)


def _is_of_torchdata(value: Any) -> bool:
    module = sys.modules.get("torchdata.stateful_dataloader.stateful_dataloader")
    return module is not None and isinstance(value, module.StatefulDataLoader)


def _has_begun(value: Any) -> bool:
    """Whether a pass through the data has begun, as far as can be told.

    Asking a loader of torchdata that has not begins one.
    """
    return not _is_of_torchdata(value) or getattr(value, "_iterator", True) is not None


class Positions:
    """Those of one TrainState in one entry of the function, by role."""

    def __init__(self, objects: dict[str, Any]) -> None:
        self._objects = objects
        self._restored: dict[str, Any] = {}
        # not asked in this entry so far
        self.walkers = {role for role, value in objects.items() if walks_data(value)}
        self._waiting = self.walkers

    def read(self, *, is_in_step: bool) -> dict[str, Any]:
        """The states as they are now.

        `is_in_step` False: what walks through data is not asked yet.
        """
        if not self._objects:
            return {}
        if is_in_step and self._waiting:
            self._waiting = {role for role in self._waiting if not _has_begun(self._objects[role])}
        return {
            role: self._restored[role] if role in self._waiting else read_position(value)
            for role, value in self._objects.items()
            if role not in self._waiting or role in self._restored
        }

    def of_any_world(self, positions: dict[str, Any]) -> dict[str, Any]:
        """Those that mean the same in a world of another size: none in the data."""
        return {
            role: position
            for role, position in positions.items()
            if not walks_data(self._objects.get(role))
        }

    def write(self, positions: dict[str, Any]) -> None:
        """Put states into the objects of this entry. Roles that are not there are passed over."""
        for role, position in positions.items():
            if role in self._objects:
                # it may keep what it is given, and go on with it
                self._restored[role] = copy.deepcopy(position)
                write_position(self._objects[role], position)

    def unknown_since(self, before: "Positions") -> list[str]:
        """Roles whose object was used in the entry `before`, and whose state then is not known."""
        return sorted(
            role
            for role in self._waiting - self._restored.keys()
            if before._objects.get(role) is self._objects[role] and role not in before._waiting
        )


def check_loader(label: str, value: Any) -> None:
    """Warn of a loader of torchdata that will give other samples, although it carries a position.

    It takes a sampler that has a state_dict for one that goes on where it was, and skips nothing
    itself. And it draws a seed for its workers from `generator=` when a pass begins, behind the
    order of that pass; to go on it draws that order again, and the seed not in its place: if both
    come from one generator, that of the next pass is another one.
    """
    if not _is_of_torchdata(value):
        return
    sampler = (
        value.sampler
        if value.batch_sampler is None
        else getattr(value.batch_sampler, "sampler", None)
    )
    if isinstance(sampler, BatchSampler):
        sampler = sampler.sampler
    has_state = callable(getattr(sampler, "state_dict", None)) and callable(
        getattr(sampler, "load_state_dict", None)
    )
    if has_state and getattr(type(sampler), "__iter__", None) in _BEGIN_ANEW:
        log.warning(
            "%s: its sampler %s has a state_dict(), and begins each pass with the first sample "
            "all the same: after a fault samples come twice. Take StatefulDistributedSampler of "
            "torchdata, or a sampler without state_dict() and the epoch as a plain value",
            label,
            type(sampler).__qualname__,
        )
    module = sys.modules.get("torchdata.stateful_dataloader.sampler")
    if (
        value.generator is not None
        and getattr(sampler, "generator", None) is value.generator
        and module is not None
        and getattr(type(sampler), "__iter__", None) is module.RandomSampler.__iter__
    ):
        log.warning(
            "%s: it and its %s draw from one generator: after a fault each later pass has another "
            "order than without it. Leave generator= out (torch.manual_seed() before the loader is "
            "made decides the order then), or take a DistributedSampler or a "
            "StatefulDistributedSampler",
            label,
            type(sampler).__qualname__,
        )


# ---------------------------------------------------------------- one object


def read_position(value: Any) -> Any:
    """The state of a per-rank object, whatever it calls it."""
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, random.Random):
        return value.getstate()
    if hasattr(value, "bit_generator"):  # numpy.random.Generator
        return value.bit_generator.state
    return value.state_dict()


def write_position(value: Any, position: Any) -> None:
    """Opposite of `read_position`."""
    if isinstance(value, torch.Generator):
        value.set_state(position)
    elif isinstance(value, random.Random):
        value.setstate(position)
    elif hasattr(value, "bit_generator"):
        value.bit_generator.state = position
    else:
        value.load_state_dict(position)
