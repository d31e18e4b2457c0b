"""Profiling orders of the manager on their way to the workers, and the workers' answers.

Beside the node's machine: no recovery depends on them. What is wanted and what was answered is kept
by `taskd.core.profiling.Exchange`.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from taskd.core import commands, events
from taskd.core.profiling import Exchange

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from taskd.agent.workers.host import Host
    from taskd.core.events import WorkerProfiling

log = logging.getLogger(__name__)


class ProfilingOrders:
    """See the module. `tell` passes an order to a worker."""

    def __init__(self, host: Host, tell: Callable[[commands.TellWorker], None]) -> None:
        self._host = host
        self._tell = tell
        self._exchange = Exchange()

    def order(self, command: commands.SetProfiling, generation: int) -> None:
        """The manager wants this of all workers, in the node's present generation."""
        try:
            self._exchange.ask(command.wanted)
        except ValueError as error:
            log.warning("the manager sent something that is no message: %s", error)
            return
        for rank in sorted(self._host.workers):
            self._pass_on(rank, command.wanted, command.cause, generation)

    def greet(self, rank: int, cause: str, generation: int) -> None:
        """A worker has come up: it is told what is wanted."""
        wanted = self._exchange.for_new_worker()
        if wanted is not None:
            self._pass_on(rank, wanted, cause, generation)

    def heard(self, event: WorkerProfiling) -> bool:
        """A worker answers. Whether the manager is to hear it: it makes sense."""
        try:
            self._exchange.heard(event.rank, event.incarnation, event.status)
        except ValueError as error:
            log.warning("rank %d sent something that is no message: %s", event.rank, error)
            return False
        return True

    def answers(self, now: float) -> Iterator[WorkerProfiling]:
        """What a manager that has just accepted this node is to hear."""
        for answer in self._exchange.answers():
            yield events.WorkerProfiling(now, "accepted", *answer)

    def _pass_on(self, rank: int, wanted: int, cause: str, generation: int) -> None:
        worker = self._host.workers[rank]
        if not worker.channel.closed:
            order = commands.SetProfiling(cause, generation, wanted)
            self._tell(commands.TellWorker(cause, generation, rank, worker.incarnation, order))
