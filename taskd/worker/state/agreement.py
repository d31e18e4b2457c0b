"""All ranks come to one decision, through the store of the default process group.

No tensors, no device, no collective. For decisions that are made once in a while: rank 0 reads a
text of every other rank.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

from torch.distributed import distributed_c10d as c10d

if TYPE_CHECKING:
    from taskd.worker.life import Life

_LOOK_S = 0.005


class Agreement:
    """One decision, in one or several rounds.

    Every rank makes it at the same place of the program, after `init_process_group`.
    """

    def __init__(self, life: Life, subject: str, *, within_s: float | None = None) -> None:
        """`within_s`: how long one round waits for the other ranks; None: for ever."""
        self._within_s = within_s
        plan = life.plan
        plan.agreements += 1
        self._rank, self._world_size = life.world_rank, life.world_size
        self._name, self._round = f"taskd/{subject}/{plan.generation}/{plan.agreements}", 0

    def broadcast(self, texts: list[str]) -> list[str]:
        """Rank 0's texts, on every rank. Waits for them; an interrupt may be raised meanwhile.

        Raises:
            TimeoutError: they have not come in time.
        """
        if self._world_size == 1:
            return texts
        store, key = self._next()
        if self._rank == 0:
            store.set(key, json.dumps(texts))
            return texts
        received: list[str] = json.loads(self._wait_for(store, [key])[0])
        return received

    def gather(self, text: str) -> list[str]:
        """The ranks' texts that are not "", in their order, on every rank.

        Waits for all of them.

        Raises:
            TimeoutError: they have not come in time.
        """
        if self._world_size == 1:
            return [text] if text else []
        store, key = self._next()
        if self._rank != 0:
            store.set(f"{key}/{self._rank}", text)
            return self.broadcast([])
        others = [
            data.decode()
            for data in self._wait_for(
                store, [f"{key}/{rank}" for rank in range(1, self._world_size)]
            )
        ]
        return self.broadcast([given for given in (text, *others) if given])

    def _next(self) -> tuple[Any, str]:
        self._round += 1
        return c10d._get_default_store(), f"{self._name}/{self._round}"

    def _wait_for(self, store: Any, keys: list[str]) -> list[bytes]:
        """The store's own waiting could not be interrupted."""
        limit_s = self._within_s
        deadline = None if limit_s is None else time.monotonic() + limit_s
        while not store.check(keys):
            if deadline is not None and time.monotonic() >= deadline:
                late = [key.rpartition("/")[2] for key in keys if not store.check([key])]
                who = f"ranks {', '.join(late)}" if self._rank == 0 else "rank 0"
                message = f"rank {self._rank} has waited {limit_s:g} s for {who} ({self._name})"
                raise TimeoutError(message)
            time.sleep(_LOOK_S)
        return [store.get(key) for key in keys]
