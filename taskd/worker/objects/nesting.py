"""Schedulers that hold others: what their state_dict() has of live objects.

`LRScheduler.state_dict()` gives every attribute but the optimizer. One that holds another scheduler
(a warmup and what comes after it) so gives that object itself, with the optimizer in it: a copy of
it would drive a copy of the optimizer. In its place goes what its own state_dict() gives.
"""

from __future__ import annotations

import io
import pickle
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from taskd.errors import StateError
from taskd.worker.objects.kinds import dict_as, is_known

if TYPE_CHECKING:
    from collections.abc import Mapping

# {_LIVE: its state} stands for a scheduler, {_LIVE: None} for an optimizer, or for a scheduler that
# stands elsewhere with its state: the object that loads it puts its own in this place.
_LIVE = "taskd:live"


class NestingScheduler:
    """A scheduler whose state_dict() has schedulers or optimizers in it.

    Remembered, moved, sent and saved as any scheduler is.
    """

    def __init__(self, label: str, scheduler: Any) -> None:
        self.scheduler = scheduler
        self._label = label
        # What was in the last state_dict(), by its place there: what was given is loaded into that.
        self.live: dict[tuple[Any, ...], Any] = {}
        self.state_dict()

    def is_of_same(self, other: Any) -> bool:
        """Whether both are of one scheduler, built outside the recoverable function."""
        return isinstance(other, NestingScheduler) and other.scheduler is self.scheduler

    def state_dict(self) -> dict[str, Any]:
        """With marks in place of live objects."""
        self.live = {}
        tree: dict[str, Any] = self._marked(self.scheduler.state_dict(), (), {id(self.scheduler)})
        return tree

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Each scheduler gets its own back, the inner ones first."""
        self.scheduler.load_state_dict(self._unmarked(state, ()))

    def _marked(self, value: Any, place: tuple[Any, ...], seen: set[int]) -> Any:
        if _is_scheduler(value) or isinstance(value, torch.optim.Optimizer):
            self.live[place] = value
            if id(value) in seen or not _is_scheduler(value):
                return {_LIVE: None}
            seen.add(id(value))
            return {_LIVE: self._marked(value.state_dict(), (*place, _LIVE), seen)}
        if is_known(value):
            items = {key: self._marked(item, (*place, key), seen) for key, item in value.items()}
            return dict_as(value, items)
        if type(value) in (list, tuple):
            return type(value)(
                self._marked(item, (*place, index), seen) for index, item in enumerate(value)
            )
        return value

    def _unmarked(self, value: Any, place: tuple[Any, ...]) -> Any:
        if is_known(value):
            if value.keys() == {_LIVE}:
                return self._told(value[_LIVE], place)
            return dict_as(
                value, {key: self._unmarked(item, (*place, key)) for key, item in value.items()}
            )
        if type(value) in (list, tuple):
            return type(value)(
                self._unmarked(item, (*place, index)) for index, item in enumerate(value)
            )
        return value

    def _told(self, state: Any, place: tuple[Any, ...]) -> Any:
        """The live object of this place, which has loaded `state`."""
        live = self.live.get(place)
        if live is None:
            where = ".".join(str(word) for word in place if word != _LIVE)
            message = (
                f"{self._label} held a scheduler or optimizer in {where}, and holds none there "
                "now: build the same scheduler, with all that it holds, in every entry"
            )
            raise StateError(message)
        if state is not None:
            live.load_state_dict(self._unmarked(state, (*place, _LIVE)))
        return live


def carried(label: str, scheduler: Any) -> Any:
    """`scheduler` itself, or what carries it, if its state_dict() has others in it.

    Raises:
        StateError: its state has what cannot be carried; the text says what to do.
    """
    nesting = NestingScheduler(label, scheduler)
    what = problem_of(nesting.state_dict())
    if what:
        message = (
            f"{label}: the state_dict() of this {type(scheduler).__qualname__} cannot be carried: "
            f"{what}. Give it a state_dict() and a load_state_dict() that leave that out: numbers, "
            "text, tensors, lists and dicts of them, and schedulers with a state_dict() of their "
            "own are carried"
        )
        raise StateError(message)
    return nesting if nesting.live else scheduler


def _is_scheduler(value: Any) -> bool:
    return isinstance(value, LRScheduler) or (
        hasattr(value, "get_last_lr")
        and callable(getattr(value, "state_dict", None))
        and callable(getattr(value, "load_state_dict", None))
    )


class _FoundError(Exception):
    """Something that a copy cannot stand for."""


class _Search(pickle.Pickler):
    """Looks at everything that a copy of a state would copy."""

    def persistent_id(self, value: Any) -> None:
        if isinstance(value, (torch.optim.Optimizer, nn.Module, nn.Parameter)) or (
            _is_scheduler(value) and not isinstance(value, type)
        ):
            raise _FoundError(type(value).__qualname__)


def problem_of(state: Any) -> str:
    """What of it cannot be carried, or ""."""
    for key, value in state.items() if isinstance(state, dict) else [("all of it", state)]:
        try:
            _Search(io.BytesIO(), 5).dump(value)
        except _FoundError as found:
            return (
                f"{key!r}, a {type(value).__qualname__}, leads to a {found}, of which only a copy "
                "would come back"
            )
        except Exception as error:  # noqa: BLE001 - whatever an object raises that is pickled
            return f"{key!r}, a {type(value).__qualname__}, cannot be pickled ({error})"
    return ""
