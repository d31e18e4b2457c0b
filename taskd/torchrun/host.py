"""torchrun's agent and its context as the agent's loop needs them (`taskd.agent.workers.host`).

Translates local ranks to global ones and slots to workers. Decides nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from taskd.agent.spawning.protocol import Exited, Started
from taskd.agent.workers.host import ProcessEvent
from taskd.transport.channel import Channel

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from taskd.native.arenas import Arenas
    from taskd.native.black_box import BlackBox
    from taskd.torchrun.context import Slot, TaskdContext
    from taskd.torchrun.launcher import Launcher


@dataclass(frozen=True, slots=True)
class HostWorker:
    """One incarnation of one rank."""

    rank: int
    incarnation: int
    channel: Channel
    slot: Slot

    @property
    def pid(self) -> int | None:
        """None until the forkserver has answered."""
        return self.slot.pid

    @property
    def box(self) -> BlackBox:
        """The page that outlives the process."""
        return self.slot.box

    @property
    def arenas(self) -> Arenas:
        """The node memory that outlives it, too."""
        return self.slot.arenas


class TorchrunHost:
    """See the module."""

    def __init__(self, launcher: Launcher, context: TaskdContext) -> None:
        """After the workers' first start."""
        self._launcher = launcher
        self._context = context
        group = launcher.worker_group
        self.node_rank: int = group.group_rank
        self.node_count: int = group.group_world_size
        self.world_size: int = group.workers[0].world_size
        self.max_restarts: int = group.spec.max_restarts
        self.ranks = tuple(worker.global_rank for worker in group.workers)
        self._local_ranks = {worker.global_rank: worker.local_rank for worker in group.workers}
        self._workers = {
            rank: self._worker(rank, context.slots[local])
            for rank, local in self._local_ranks.items()
        }
        self.workers: Mapping[int, HostWorker] = MappingProxyType(self._workers)

    @staticmethod
    def _worker(rank: int, slot: Slot) -> HostWorker:
        return HostWorker(rank, slot.incarnation, Channel(slot.channel.detach()), slot)

    @property
    def fds(self) -> Sequence[int]:
        """Readable when `read` has something to say."""
        return self._context.fds()

    def read(self) -> Sequence[ProcessEvent]:
        """Starts and ends of processes. Former lives are told too."""
        workers, found = self._launcher.worker_group.workers, []
        for event in self._context.read():
            slot, reply = event.slot, event.reply
            life = (workers[slot.local_rank].global_rank, slot.incarnation)
            if isinstance(reply, Started):
                found.append(
                    ProcessEvent(*life, "started", slot.box, pid=reply.pid, note=reply.note or "")
                )
            elif isinstance(reply, Exited):
                found.append(
                    ProcessEvent(
                        *life,
                        "exited",
                        slot.box,
                        status=reply.status,
                        snapshots=slot.arenas.versions(),
                    )
                )
            else:
                found.append(
                    ProcessEvent(
                        *life,
                        "failed",
                        slot.box,
                        error=reply.error,
                        snapshots=slot.arenas.versions(),
                    )
                )
        return found

    def spawn(
        self, rank: int, incarnation: int, *, generation: int, gated: bool, restarts_used: int
    ) -> None:
        """Start a process for this incarnation; `Started` or `StartFailed` follows from `read`."""
        self._launcher.generation, self._launcher.restarts_used = generation, restarts_used
        local_rank = self._local_ranks[rank]
        bootstrap = self._launcher.bootstrap(local_rank, incarnation, gated=gated)
        former = self._workers[rank]
        slot = self._context.respawn(
            local_rank, bootstrap, {"TORCHELASTIC_RESTART_COUNT": str(restarts_used)}
        )
        self._workers[rank] = self._worker(rank, slot)
        former.channel.close()

    def signal(self, rank: int, incarnation: int, signal_number: int) -> None:
        """Signal the process group of this incarnation, if it is the present one."""
        if self._workers[rank].incarnation == incarnation:
            self._context.signal(self._local_ranks[rank], signal_number)

    def local_ranks(self, ranks: set[int]) -> list[int]:
        """Local ranks of these ranks; of all if none of them is on this node."""
        return sorted(
            self._local_ranks[rank] for rank in ranks if rank in self._local_ranks
        ) or sorted(self._local_ranks.values())

    def close(self) -> None:
        """Close the agent's ends of the channels."""
        for worker in self._workers.values():
            worker.channel.close()
