"""Functions of torch that are replaced wherever a module has them.

A module that was imported before may have taken one over by its name (`from torch.distributed
import init_process_group`): modules of torch itself have, and in a process that was forked with the
modules of its script preloaded, so have those. Knows nothing of what the functions do.
"""

from __future__ import annotations

import sys
from typing import Any

from taskd.imported import namespace


class Replaced:
    """What was replaced, until it is put back."""

    def __init__(self) -> None:
        self._former: list[tuple[dict[str, Any], str, Any]] = []  # namespace, name, function

    def put(self, wrappers: dict[Any, Any]) -> None:
        """From now on each module that has a function, by whatever name, has its wrapper.

        `wrappers`: by function.
        """
        by_id = {id(function): wrapper for function, wrapper in wrappers.items()}
        wanted = by_id.keys()
        for module in list(sys.modules.values()):
            names = namespace(module)
            # a hundred thousand in a process with torch alone: most modules have none
            if wanted.isdisjoint(map(id, tuple(names.values()))):
                continue
            for name, value in list(names.items()):
                if id(value) in by_id:
                    names[name] = by_id[id(value)]
                    self._former.append((names, name, value))

    def put_back(self) -> None:
        """Every module that had a function has it again."""
        for names, name, function in self._former:
            names[name] = function
        self._former.clear()
