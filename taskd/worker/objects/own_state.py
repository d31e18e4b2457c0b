"""Optimizers that hold others, and what an optimizer keeps beside `state` and `param_groups`.

Lookahead is one: it holds the optimizer that makes its steps, a counter and slow weights. Each
optimizer within is carried as one that was registered itself: its memory by parameter. What is
left is what the outer one's own `state_dict()` gives beside that, and is carried by it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from taskd.worker.objects import shards
from taskd.worker.objects.kinds import dict_as, sequence_as
from taskd.worker.objects.memory import version_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

# Of torch's own: what is in them is no optimizer.
_OF_TORCH = frozenset({"state", "param_groups", "defaults"})
# {_KEPT: [which optimizer, which of its parameters, key]} stands for a tensor that is carried as
# memory of this optimizer, or as that parameter (key None).
_KEPT = "taskd:kept"


def unwrap_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer inside those that only pass calls on, as trainers give them to the user.

    One that keeps groups, memory or anything else of its own beside what it wraps is none of these.
    """
    seen = {id(optimizer)}
    while True:
        inner = getattr(optimizer, "optimizer", None)
        is_same = (
            isinstance(inner, torch.optim.Optimizer)
            and id(inner) not in seen
            and _shares_all(optimizer, inner)
            and (shards.is_zero(inner) or not OwnState(optimizer, [inner]).state_dict())
        )
        if not is_same:
            return optimizer
        optimizer = inner  # type: ignore[assignment]
        seen.add(id(inner))


def _shares_all(optimizer: torch.optim.Optimizer, inner: torch.optim.Optimizer) -> bool:
    return all(
        getattr(optimizer, name, None) is getattr(inner, name) for name in ("param_groups", "state")
    )


def optimizers_within(optimizer: torch.optim.Optimizer) -> dict[str, torch.optim.Optimizer]:
    """Those that it holds in its attributes, and those within them, by path; each once."""
    found: dict[str, torch.optim.Optimizer] = {}
    seen = {id(optimizer)}

    def look(outer: torch.optim.Optimizer, start: str) -> None:
        if shards.is_zero(outer):  # the one within has memory that is carried as its own
            return
        for name, value in vars(outer).items():
            if name in _OF_TORCH:
                continue
            for path, inner in _optimizers_in(value, f"{start}{name}"):
                if id(inner) not in seen:
                    seen.add(id(inner))
                    found[path] = inner
                    look(inner, f"{path}.")

    look(optimizer, "")
    return found


def _optimizers_in(value: Any, path: str) -> Iterator[tuple[str, torch.optim.Optimizer]]:
    """`value` itself, or what a list or a dict has of them."""
    if isinstance(value, torch.optim.Optimizer):
        yield path, value
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            if isinstance(item, torch.optim.Optimizer):
                yield f"{path}.{index}", item
    elif isinstance(value, dict):
        for index, (key, item) in enumerate(value.items()):
            if isinstance(item, torch.optim.Optimizer):
                yield f"{path}.{key if isinstance(key, str) else index}", item


class Look:
    """At all that an optimizer keeps besides its memory, to tell whether it changes."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        within = [*optimizers_within(optimizer).values()]
        # held on to: nothing else can get the address of a tensor in it
        self._tree = OwnState(optimizer, within).state_dict() if has_own_state(optimizer) else {}
        self._seen = _seen(self._tree)

    def is_as(self, other: Look) -> bool:
        """False also where it cannot be told."""
        return _is_equal(self._seen, other._seen)


def has_own_state(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its class, or it, gives another state_dict than torch's."""
    own = vars(optimizer).get("state_dict") or type(optimizer).state_dict
    return own is not torch.optim.Optimizer.state_dict and not shards.is_zero(optimizer)


class OwnState:
    """What an optimizer's own state_dict gives beside the memory of the optimizers in it.

    Moved, sent and saved as a state_dict is. Empty for one that gives what torch's would give.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, within: Sequence[torch.optim.Optimizer]
    ) -> None:
        self._optimizer, self._parts = optimizer, [optimizer, *within]

    def is_of_same(self, other: Any) -> bool:
        """Whether both are of one optimizer, built outside the recoverable function."""
        return isinstance(other, OwnState) and other._optimizer is self._optimizer

    def state_dict(self) -> dict[str, Any]:
        """With marks in place of the tensors that are carried elsewhere."""
        kept = self._kept()
        tree = _marked(self._optimizer.state_dict(), kept)
        return {} if self._is_usual(tree, kept) else {"own": tree}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Call this when memory and groups are in place: they are the same afterwards.

        Loading makes others in most classes. Then all who look at the ones or the others must see
        one content, as a class that shares them with the optimizer within does not always see to.
        """
        if not state:
            return
        before = [
            (part, part.state, dict(part.state), part.param_groups, list(part.param_groups))
            for part in self._parts
        ]
        self._optimizer.load_state_dict(self._unmarked(state["own"]))
        for part, memory, entries, groups, each in before:
            for one in (memory, part.state):
                one.clear()
                one.update(entries)
            for several in (groups, part.param_groups):
                several[:] = each

    def _kept(self) -> dict[int, list[Any]]:
        """The mark of each tensor that is carried elsewhere, by its identity."""
        kept: dict[int, list[Any]] = {}
        for place, part in enumerate(self._parts):
            memory = shards.memory_of(part)
            for index, parameter in enumerate(_parameters_of(part)):
                kept.setdefault(id(parameter), [place, index, None])
                entries = memory.get(parameter)
                for key, value in entries.items() if isinstance(entries, dict) else ():
                    if isinstance(value, torch.Tensor):
                        kept.setdefault(id(value), [place, index, key])
        return kept

    def _is_usual(self, tree: Any, kept: dict[int, list[Any]]) -> bool:
        """Whether it has the form of torch's, and no more than the memory of one optimizer."""
        if not isinstance(tree, dict) or tree.keys() != {"state", "param_groups"}:
            return False
        keys = [set(group) for group in tree["param_groups"]]
        for part in self._parts:
            index_of = {id(one): index for index, one in enumerate(_parameters_of(part))}
            memory = {
                index_of.get(id(key), key): _marked(entries, kept)
                for key, entries in part.state.items()
            }
            if keys == [set(group) for group in part.param_groups] and _is_equal(
                _seen(tree["state"]), _seen(memory)
            ):
                return True
        return False

    def _unmarked(self, tree: Any) -> Any:
        if isinstance(tree, dict):
            if tree.keys() == {_KEPT}:
                place, index, key = tree[_KEPT]
                part = self._parts[place]
                parameter = _parameters_of(part)[index]
                return parameter if key is None else shards.memory_of(part)[parameter][key]
            return dict_as(tree, {key: self._unmarked(value) for key, value in tree.items()})
        if isinstance(tree, (list, tuple)):
            return sequence_as(tree, (self._unmarked(value) for value in tree))
        return tree


def _parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _marked(tree: Any, kept: dict[int, list[Any]]) -> Any:
    if isinstance(tree, torch.Tensor):
        mark = kept.get(id(tree))
        return tree if mark is None else {_KEPT: mark}
    if isinstance(tree, dict):
        return dict_as(tree, {key: _marked(value, kept) for key, value in tree.items()})
    if isinstance(tree, (list, tuple)):
        return sequence_as(tree, (_marked(value, kept) for value in tree))
    return tree


def _is_equal(left: Any, right: Any) -> bool:
    """False also where it cannot be told, as of arrays."""
    try:
        return bool(left == right)
    except (TypeError, ValueError):
        return False


def _seen(tree: Any) -> Any:
    """`tree` as it is now, to be compared: tensors by identity and version."""
    if isinstance(tree, torch.Tensor):
        return id(tree), version_of(tree)
    if isinstance(tree, dict):
        return [(_seen(key), _seen(value)) for key, value in tree.items()]
    if type(tree) in (list, tuple):
        return [_seen(value) for value in tree]
    return tree
