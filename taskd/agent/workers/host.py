"""What the agent's loop needs of torchrun: who we are, and processes.

`taskd.torchrun.host` has it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from taskd.agent.spawning.protocol import Imported, Reply
    from taskd.core import commands
    from taskd.native.arenas import Arenas
    from taskd.native.black_box import BlackBox
    from taskd.transport.channel import Channel


class Worker(Protocol):
    """One incarnation of one rank, as the host keeps it."""

    @property
    def incarnation(self) -> int:
        """Which life of the rank this is."""

    @property
    def pid(self) -> int | None:
        """None until it has been started."""

    @property
    def channel(self) -> Channel:
        """The agent's end of the link."""

    @property
    def box(self) -> BlackBox:
        """The page that outlives the process."""

    @property
    def left(self) -> BlackBox:
        """The page with what the rank leaves: its predecessor's, until it has taken that over."""

    @property
    def arenas(self) -> Arenas:
        """Its snapshots, which outlive it, too."""


class Host(Protocol):
    """What the loop needs of torchrun: who we are, and processes."""

    node_rank: int
    node_count: int
    world_size: int
    max_restarts: int
    is_substitute: bool  # for a node that was lost: no worker runs before the manager orders it

    @property
    def ranks(self) -> Sequence[int]:
        """Global ranks of this node."""

    @property
    def workers(self) -> Mapping[int, Worker]:
        """By rank; the present incarnation of each."""

    @property
    def fds(self) -> Sequence[int]:
        """Readable when `read` has something to say."""

    def read(self) -> Sequence[tuple[int, Worker, Reply]]:
        """Rank, incarnation of it, and what happened to its process; never blocks.

        Former incarnations are told of, too.
        """

    @property
    def imported(self) -> Imported | None:
        """What its workers have imported at their first step; None: it is not known."""

    def open_store(self, generation: int) -> None:
        """The store at which all workers meet that start anew in this generation.

        Hosted by node 0, on the others nothing happens. Raises OSError.
        """

    def spare_store(self) -> str:
        """Host:port of a store of this node, for when that of another node is lost; "": none.

        Opened by the first call. Raises OSError.
        """

    def first_host(self) -> int | None:
        """The node that has the store of the rendezvous; None: none of them, or nobody needs it."""

    def meet(self, order: commands.Resume | commands.RestartGroup, per_node: int) -> None:
        """Where all ranks meet from now on, and on how many nodes: each has so many of them."""

    def spawn(
        self, rank: int, incarnation: int, *, generation: int, gated: bool, restarts_used: int,
        former_agent: str = "", start: int | None = None,
    ) -> None:  # fmt: skip
        """Start a process for this incarnation; `Started` or `StartFailed` follows.

        `former_agent`: whose node memory a rank that this agent has not had may take over. `start`:
        as in `SpawnWorker`.

        Raises OSError: no descriptors, no memory, or no store to meet the others at.
        """

    def signal(self, rank: int, incarnation: int, signal_number: int) -> None:
        """Signal the process group of this incarnation, the present one or a former."""
