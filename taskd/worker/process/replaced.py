"""Functions of torch that are replaced wherever a module has them.

A module that was imported before may have taken one over by its name (`from torch.distributed
import init_process_group`): modules of torch itself have, and in a process that was forked with the
modules of its script preloaded, so have those. Knows nothing of what the functions do.

To look through all modules writes to each object that is looked at (its count of references). In a
fork that copies the pages of all of them, 11,000 with torch, a fifth of a recovery. So the process
that is to be forked looks ahead.
"""

from __future__ import annotations

import itertools
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from taskd.imported import namespace

if TYPE_CHECKING:
    from collections.abc import Iterable

Place = tuple[dict[str, Any], str, Any]  # a namespace, a name in it, the function of this name


@dataclass(frozen=True)
class _Ahead:
    """What a process has found before its forks need it."""

    functions: dict[int, Any]  # by id
    places: list[Place]
    newest_module: str


_ahead: _Ahead | None = None


def look_ahead(functions: Iterable[Any]) -> None:
    """Find what `Replaced.put` will look for, the first time in this process and in each fork.

    Until then modules may be imported, and nothing else may be done to those that are there.
    """
    global _ahead  # noqa: PLW0603
    by_id = {id(function): function for function in functions}
    _ahead = _Ahead(
        by_id, _places(frozenset(by_id), list(sys.modules.values())), next(reversed(sys.modules))
    )


def _places(wanted: frozenset[int], modules: Iterable[Any]) -> list[Place]:
    """Where these modules have a function whose id is wanted."""
    found: list[Place] = []
    for names in map(namespace, modules):
        # a hundred thousand in a process with torch alone: most modules have none
        if wanted.isdisjoint(map(id, tuple(names.values()))):
            continue
        items = list(names.items())
        found += [(names, name, value) for name, value in items if id(value) in wanted]
    return found


def _all_places(wanted: frozenset[int]) -> list[Place]:
    global _ahead
    ahead, _ahead = _ahead, None
    if ahead is None or not wanted <= ahead.functions.keys():
        return _places(wanted, list(sys.modules.values()))
    newer = list(itertools.takewhile(ahead.newest_module.__ne__, reversed(sys.modules)))
    return [*ahead.places, *_places(wanted, [sys.modules[name] for name in newer])]


class Replaced:
    """What was replaced, until it is put back."""

    def __init__(self) -> None:
        self._former: list[Place] = []

    def put(self, wrappers: dict[Any, Any]) -> None:
        """From now on each module that has a function, by whatever name, has its wrapper.

        `wrappers`: by function.
        """
        by_id = {id(function): wrapper for function, wrapper in wrappers.items()}
        for names, name, function in _all_places(frozenset(by_id)):
            if id(function) in by_id:
                names[name] = by_id[id(function)]
                self._former.append((names, name, function))

    def put_back(self) -> None:
        """Every module that had a function has it again."""
        for names, name, function in self._former:
            names[name] = function
        self._former.clear()
