"""What the agent's loop needs of torchrun's agent, which is its launcher.

`taskd.torchrun.elastic_agent` has it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup


class Launcher(Protocol):
    """See the module."""

    generation: int
    restarts_used: int
    is_substitute: bool

    @property
    def master_host(self) -> str:
        """The host that torchrun was told to meet the others at; "": none."""

    @property
    def worker_group(self) -> WorkerGroup:
        """Ranks, world size, group rank, master address, store: torch's own object."""

    def bootstrap(
        self, local_rank: int, incarnation: int, *, gated: bool = False
    ) -> dict[str, Any]:
        """What the runtime of this worker is told.

        `generation` and `restarts_used` are those of the launcher at that time.
        """

    def open_store(self, generation: int) -> dict[str, str]:
        """What the workers of this start have in their environment: where they meet.

        Raises OSError: nowhere.
        """

    def spare_store(self) -> str:
        """Host:port of a store of this node, for when that of another node is lost; "": none.

        Raises OSError.
        """

    def first_host(self) -> int | None:
        """The node that has the store of the rendezvous; None: none of them, or nobody needs it."""

    def meet_at(self, address: str) -> None:
        """All ranks meet at this store from now on: the node of theirs was lost."""

    def await_nodes(self, count: int) -> None:
        """So many nodes are there at the end of the job, if no other is back by then; 0: all."""

    def succeeded(self) -> RunResult:
        """The result when every worker has finished."""

    def failure(self) -> str:
        """Why the job has failed, although the workers here have not; "": as far as known, not."""

    def tell_failure(self, reason: str) -> None:
        """Say that to the nodes that wait for this one at the end."""

    def failed(self, local_ranks: Iterable[int]) -> RunResult:
        """The result when the job is given up because of these workers."""

    def run_plainly(self, role: str) -> RunResult:
        """Go on as plain torchrun, with the workers as they are."""
