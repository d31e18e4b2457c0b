"""All ranks come to one decision, through the store of the default process group.

No tensors, no device, no collective.

Rank 0 speaks and counts. For decisions that are made once in a while: rank 0 reads a word of every
other rank.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

from torch.distributed import distributed_c10d as c10d

if TYPE_CHECKING:
    from taskd.worker.life import Life

_LOOK_S = 0.005


class Council:
    """One decision, in one or several rounds.

    Every rank makes it at the same place of the program, after `init_process_group`.
    """

    def __init__(self, life: Life, subject: str) -> None:
        generation, count = life.councils
        life.councils = (life.generation, count + 1 if generation == life.generation else 1)
        self._rank, self._world_size = life.rank, life.world_size
        self._name, self._round = f"taskd/{subject}/{life.generation}/{life.councils[1]}", 0

    def say(self, words: list[str]) -> list[str]:
        """Rank 0's words, on every rank. Waits for them; an interrupt may be raised meanwhile."""
        if self._world_size == 1:
            return words
        store, key = self._next()
        if self._rank == 0:
            store.set(key, json.dumps(words))
            return words
        heard: list[str] = json.loads(_wait_for(store, [key])[0])
        return heard

    def hear(self, word: str) -> list[str]:
        """What the ranks say that is not "", in their order, on every rank.

        Waits for all of them.
        """
        if self._world_size == 1:
            return [word] if word else []
        store, key = self._next()
        if self._rank != 0:
            store.set(f"{key}/{self._rank}", word)
            return self.say([])
        others = [
            data.decode()
            for data in _wait_for(store, [f"{key}/{rank}" for rank in range(1, self._world_size)])
        ]
        return self.say([said for said in (word, *others) if said])

    def _next(self) -> tuple[Any, str]:
        self._round += 1
        return c10d._get_default_store(), f"{self._name}/{self._round}"


def _wait_for(store: Any, keys: list[str]) -> list[bytes]:
    """The store's own waiting could not be interrupted."""
    while not store.check(keys):
        time.sleep(_LOOK_S)
    return [store.get(key) for key in keys]
