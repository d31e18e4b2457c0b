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
_AGREED = "agreed"


class Agreement:
    """One decision, in one or several rounds.

    Every rank makes it at the same place of the program, after `init_process_group`.
    """

    def __init__(self, life: Life, subject: str) -> None:
        plan = life.plan
        plan.agreements += 1
        self._rank, self._world_size = life.world_rank, life.world_size
        self._name, self._round = f"taskd/{subject}/{plan.generation}/{plan.agreements}", 0

    def broadcast(self, texts: list[str]) -> list[str]:
        """Rank 0's texts, on every rank. Waits for them; an interrupt may be raised meanwhile."""
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

    def gather_within(self, text: str, limit_s: float) -> list[str]:
        """As `gather`; but if one has waited `limit_s` seconds in vain, all give up.

        How it ends stands in one key, which is written once: by rank 0, when all texts are there,
        or by the first whose time is over. Everybody follows what is in it, whoever comes late as
        well: a rank that went by its own watch would wait for those who have gone on without it.

        Raises:
            TimeoutError: they have given up.
        """
        if self._world_size == 1:
            return [text] if text else []
        store, key = self._next()
        store.set(f"{key}/{self._rank}", text)
        keys = [f"{key}/{rank}" for rank in range(self._world_size)]
        end, deadline = f"{key}/end", time.monotonic() + limit_s
        while not store.check([end]):
            if self._rank == 0 and store.check(keys):
                texts = [store.get(one).decode() for one in keys]
                store.set(key, json.dumps([given for given in texts if given]))
                store.compare_set(end, "", _AGREED)
            elif time.monotonic() >= deadline:
                store.compare_set(end, "", self._in_vain(store, keys, limit_s))
            else:
                time.sleep(_LOOK_S)
        how = store.get(end).decode()
        if how != _AGREED:
            raise TimeoutError(how)
        agreed: list[str] = json.loads(store.get(key))
        return agreed

    def _in_vain(self, store: Any, keys: list[str], limit_s: float) -> str:
        late = [key.rpartition("/")[2] for key in keys if not store.check([key])]
        who = f"ranks {', '.join(late)}" if late else "the word of rank 0"
        return f"rank {self._rank} has waited {limit_s:g} s for {who} ({self._name})"

    def _next(self) -> tuple[Any, str]:
        self._round += 1
        return c10d._get_default_store(), f"{self._name}/{self._round}"

    def _wait_for(self, store: Any, keys: list[str]) -> list[bytes]:
        """The store's own waiting could not be interrupted."""
        while not store.check(keys):
            time.sleep(_LOOK_S)
        return [store.get(key) for key in keys]
