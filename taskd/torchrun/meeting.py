"""Where the nodes of a running job have met, for a torchrun that comes later.

The agent of node 0 writes it into the store beneath torch's rendezvous whenever all workers start.

    base store: taskd/store/<run>/last    a `Meeting`, as JSON
"""

from __future__ import annotations

import json
import uuid
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import torch
from torch.distributed import PrefixStore

import taskd

if TYPE_CHECKING:
    from torch.distributed import Store
    from torch.distributed.elastic.agent.server import WorkerSpec
    from torch.distributed.elastic.agent.server.api import WorkerGroup

_MAX_ROUNDS = 1000  # of torch's rendezvous that are tried: each costs a round trip


@dataclass(frozen=True, slots=True)
class Meeting:
    """`generation`: of the last start of all workers. `prefix`: of torch's keys in the base store.

    `master_host`, `master_port`: what torchrun told the workers of the first start.
    """

    generation: int
    prefix: str
    node_count: int
    local_world_size: int
    master_host: str
    master_port: int
    torch_version: str
    taskd_version: str

    @classmethod
    def of(cls, group: WorkerGroup, generation: int) -> Meeting:
        """That of this agent, whose workers start. Raises RuntimeError: its store is lost."""
        return cls(
            generation,
            _prefix(group),
            group.group_world_size,
            group.spec.local_world_size,
            str(group.master_addr),
            int(group.master_port),
            torch.__version__,
            taskd.__version__,
        )

    @classmethod
    def read(cls, base: Store, run_id: str) -> Meeting | None:
        """What is written there; None: nobody has met yet. Raises RuntimeError, ValueError."""
        if not base.check([_key(run_id)]):
            return None
        try:
            return cls(**json.loads(base.get(_key(run_id))))
        except TypeError as error:
            raise ValueError(f"written by another version of taskd: {error}") from error

    def write(self, base: Store, run_id: str) -> None:
        """Raises RuntimeError."""
        base.set(_key(run_id), json.dumps(asdict(self)))

    def objection(self, spec: WorkerSpec) -> str | None:
        """Why a torchrun with these workers does not fit in; None: it does."""
        for what, theirs, ours in (
            ("torch", self.torch_version, torch.__version__),
            ("taskd", self.taskd_version, taskd.__version__),
            ("--nproc-per-node", self.local_world_size, spec.local_world_size),
        ):
            if theirs != ours:
                return f"it has {what} {ours}, the job has {theirs}"
        return None


def base_store(store: Store) -> Store:
    """The store beneath torch's prefixes."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


def _key(run_id: str) -> str:
    return f"taskd/store/{run_id}/last"


def _prefix(group: WorkerGroup) -> str:
    """What torch's rendezvous puts before its keys, found by looking; "": none that is known."""
    base, key = base_store(group.store), f"taskd/prefix/{uuid.uuid4().hex}"
    group.store.set(key, "")
    run_id = str(group.spec.rdzv_handler.get_run_id())
    rounds = (f"torch.rendezvous.{run_id}.{number}" for number in range(_MAX_ROUNDS))
    return next((one for one in (run_id, *rounds) if base.check([f"{one}/{key}"])), "")
