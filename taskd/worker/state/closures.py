"""Closures of optimizers.

`optimizer.step(closure)` runs forward and backward before it writes anything.

Owns what is known of an optimizer that was given a closure: whether it has written before it calls
it. While it has not, the state is whole, and interrupts get through. A second call in one step
(LBFGS) comes after a write, as far as is known here.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch

from taskd.worker.life import current
from taskd.worker.objects import memory, shards
from taskd.worker.objects.own_state import Look, optimizers_within
from taskd.worker.objects.roles import parameters_of
from taskd.worker.state.step import begin_update

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from taskd.worker.state.holding import Holding


def is_known(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it is torch's: those call closures before they write, and raise version counters."""
    if shards.is_zero(optimizer) and not is_known(optimizer.optim):
        return False
    return inspect.unwrap(type(optimizer).step).__module__.startswith("torch.")


class Unwritten:
    """What an optimizer may write, as it is now."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._is_known = is_known(optimizer)
        self._before = self._look()

    def is_still_so(self) -> bool:
        """Whether nothing has been written since.

        No copies for torch's optimizers; others may write past the version counters.
        """
        now = self._look()
        return (
            now[0] == self._before[0]
            and not memory.changed(self._before[1], now[1])
            and (now[2] is None or now[2].is_as(self._before[2]))
        )

    def _look(self) -> tuple[list[tuple[int, int]], list[torch.Tensor | None], Any]:
        parameters = [shards.local(parameter) for parameter in parameters_of(self._optimizer)]
        if self._is_known:
            return [(id(tensor), memory.version_of(tensor)) for tensor in parameters], [], None
        written = (*parameters, *self._memory())
        versions = [(id(tensor), memory.version_of(tensor)) for tensor in written]
        samples = [memory.sample_of(tensor) for tensor in parameters]
        return versions, samples, Look(self._optimizer)

    def _memory(self) -> Iterator[torch.Tensor]:
        for optimizer in (self._optimizer, *optimizers_within(self._optimizer).values()):
            for entries in shards.memory_of(optimizer).values():
                for value in entries.values() if isinstance(entries, dict) else ():
                    if isinstance(value, torch.Tensor):
                        yield shards.local(value)


class Closure:
    """Takes the place of the user's closure in one call of `step`."""

    def __init__(
        self, function: Callable[..., Any], holding: Holding, unwritten: Unwritten
    ) -> None:
        self._function, self._holding = function, holding
        self._unwritten: Unwritten | None = unwritten  # until the first call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The first call ends with the beginning of the update, and with the vote if any."""
        life, unwritten = current(), self._unwritten
        self._unwritten = None
        if life is None or unwritten is None:
            return self._function(*args, **kwargs)
        if unwritten.is_still_so():
            self._holding.is_half_way = False
            life.interrupts.release()
        result = self._function(*args, **kwargs)
        if (life := current()) is not None:
            begin_update(life, self._holding, is_ours=True)
        return result


def find(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any] | None:
    """The closure among the arguments of `step`, the first of which is the optimizer."""
    given = kwargs.get("closure", args[1] if len(args) > 1 else None)
    return given if callable(given) else None


def replaced(
    args: tuple[Any, ...], kwargs: dict[str, Any], closure: Closure
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same arguments with another closure."""
    if "closure" in kwargs:
        return args, {**kwargs, "closure": closure}
    return (args[0], closure, *args[2:]), kwargs
