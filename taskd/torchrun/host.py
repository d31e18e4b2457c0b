"""torchrun's agent and its context as the agent's loop needs them (`taskd.agent.workers.host`).

Translates global ranks to local ones and back. Decides nothing.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from taskd.core import commands

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from taskd.agent.spawning.protocol import Imported, Reply
    from taskd.torchrun.context import LocalWorker, TaskdContext
    from taskd.torchrun.launcher import Launcher


class TorchrunHost:
    """See the module."""

    def __init__(self, launcher: Launcher, context: TaskdContext) -> None:
        """After the workers' first start."""
        self._launcher = launcher
        self._context = context
        group = launcher.worker_group
        self.is_substitute = launcher.is_substitute
        self.node_rank: int = group.group_rank
        self.node_count: int = group.group_world_size
        self.world_size: int = group.workers[0].world_size
        self.max_restarts: int = group.spec.max_restarts
        self.ranks = tuple(worker.global_rank for worker in group.workers)
        self._local_ranks = {worker.global_rank: worker.local_rank for worker in group.workers}
        self._workers = {
            rank: context.workers[local_rank]
            for rank, local_rank in self._local_ranks.items()
            if local_rank in context.workers
        }
        self.workers: Mapping[int, LocalWorker] = MappingProxyType(self._workers)

    @property
    def fds(self) -> Sequence[int]:
        """Readable when `read` has something to say."""
        return self._context.fds()

    def read(self) -> Sequence[tuple[int, LocalWorker, Reply]]:
        """Starts and ends of processes. Former incarnations are told of, too."""
        ranks = [worker.global_rank for worker in self._launcher.worker_group.workers]
        return [(ranks[worker.local_rank], worker, reply) for worker, reply in self._context.read()]

    @property
    def imported(self) -> Imported | None:
        """What its workers have imported at their first step; None: it is not known."""
        return self._context.spawner.imported

    def open_store(self, generation: int) -> None:
        """The store at which all workers meet that start anew in this generation."""
        if self.node_rank == 0:
            self._launcher.open_store(generation)

    def spare_store(self) -> str:
        """Host:port of a store of this node, for when that of another node is lost; "": none."""
        return self._launcher.spare_store()

    def first_host(self) -> int | None:
        """The node that has the store of the rendezvous; None: none of them, or nobody needs it."""
        return self._launcher.first_host()

    def meet(self, order: commands.Resume | commands.RestartGroup, per_node: int) -> None:
        """Where all ranks meet from now on, and on how many nodes: each has so many of them."""
        if order.store:
            self._launcher.meet_at(order.store)
        active = order.active if isinstance(order, commands.Resume) else ()
        self._launcher.await_nodes(len(active) // per_node)

    def spawn(
        self, rank: int, incarnation: int, *, generation: int, gated: bool, restarts_used: int,
        former_agent: str = "", start: int | None = None,
    ) -> None:  # fmt: skip
        """Start a process for this incarnation; `Started` or `StartFailed` follows from `read`."""
        self._launcher.generation, self._launcher.restarts_used = generation, restarts_used
        local_rank = self._local_ranks[rank]
        environment = {"TORCHELASTIC_RESTART_COUNT": str(restarts_used)}
        if start is not None:
            environment |= self._launcher.open_store(start)
        bootstrap = self._launcher.bootstrap(local_rank, incarnation, gated=gated)
        self._workers[rank] = self._context.respawn(
            local_rank, bootstrap, environment, former_agent=former_agent,
            inherits=start is None,
        )  # fmt: skip

    def signal(self, rank: int, incarnation: int, signal_number: int) -> None:
        """Signal the process group of this incarnation, the present one or a former."""
        self._context.signal(self._local_ranks[rank], incarnation, signal_number)

    def local_ranks(self, ranks: set[int]) -> list[int]:
        """Local ranks of these ranks; of all if none of them is on this node."""
        return sorted(
            self._local_ranks[rank] for rank in ranks if rank in self._local_ranks
        ) or sorted(self._local_ranks.values())

    def close(self) -> None:
        """Close the agent's ends of the channels."""
        for worker in self._workers.values():
            worker.channel.close()
