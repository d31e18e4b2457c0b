"""Where the nodes of a running job have met, for a torchrun that comes later.

The agent of node 0 writes it into the store beneath torch's rendezvous whenever all workers start.

    base store: taskd/store/<run>/last    a `Meeting`, as JSON
                taskd/host/<run>          the node that has this store, if one of the job's has it
"""

from __future__ import annotations

import json
import os
import socket
import uuid
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import torch
from torch.distributed import PrefixStore, TCPStore

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


def note_host(base: Store, run_id: str, node_rank: int) -> None:
    """Write down that this node has the store, if it has. For the others before they number ranks.

    torch does not say it. With c10d the torchrun that finds its own address in the endpoint has the
    store, or the first one that can open the port; its node may get any number.
    """
    if isinstance(base, TCPStore) and base.port in _listening_ports():
        base.set(_host_key(run_id), str(node_rank))


def host_of(base: Store, run_id: str) -> int | None:
    """The node that has this store; None: none of the job's. Raises RuntimeError."""
    key = _host_key(run_id)
    return int(base.get(key)) if base.check([key]) else None


def _listening_ports() -> set[int]:
    """TCP ports at which this process listens, as far as its descriptors last."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as one:
                is_tcp = one.family in (socket.AF_INET, socket.AF_INET6)
                if is_tcp and one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    found.add(int(one.getsockname()[1]))
        except OSError:  # another thread has closed it meanwhile
            continue
    return found


def _host_key(run_id: str) -> str:
    return f"taskd/host/{run_id}"


def _key(run_id: str) -> str:
    return f"taskd/store/{run_id}/last"


def _prefix(group: WorkerGroup) -> str:
    """What torch's rendezvous puts before its keys, found by looking; "": none that is known."""
    base, key = base_store(group.store), f"taskd/prefix/{uuid.uuid4().hex}"
    group.store.set(key, "")
    run_id = str(group.spec.rdzv_handler.get_run_id())
    rounds = (f"torch.rendezvous.{run_id}.{number}" for number in range(_MAX_ROUNDS))
    return next((one for one in (run_id, *rounds) if base.check([f"{one}/{key}"])), "")
