"""The channels to the workers of this node: what they say, and what is said to them.

Owns the check that a worker speaks for itself. An order that arrives too late is logged and
forgotten: the worker's end is reported by its process.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from taskd.agent.workers.left_memory import with_left_memory
from taskd.core import commands, events
from taskd.errors import RemoteProtocolError
from taskd.wire import codec, translate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from taskd.agent.workers.host import Host
    from taskd.clock import Clock
    from taskd.wire.messages import Message

log = logging.getLogger(__name__)


class WorkerChannels:
    """See the module.

    `encode(message, cause)` gives the bytes of a message of this agent. `find_mirror(rank,
    version)`: the descriptor of memory that mirrors a rank of another node.
    """

    def __init__(
        self,
        host: Host,
        clock: Clock,
        *,
        encode: Callable[[Message, str], bytes],
        find_mirror: Callable[[int, int], int | None],
    ) -> None:
        self._host = host
        self._clock = clock
        self._encode = encode
        self._find_mirror = find_mirror

    @property
    def fds(self) -> list[int]:
        """Readable when a worker has said something."""
        channels = (worker.channel for worker in self._host.workers.values())
        return [channel.fd for channel in channels if not channel.closed]

    def read(self, rank: int) -> Iterator[events.WorkerEvent]:
        """What the present life of this rank has said; never blocks."""
        worker = self._host.workers[rank]
        for data in worker.channel.receive():
            try:
                envelope, message = codec.decode(data)
                event = translate.message_to_event(envelope.cause, message, self._clock.now())
            except RemoteProtocolError as error:
                log.warning("rank %d sent something that is no message: %s", rank, error)
                continue
            if isinstance(event, events.WorkerEvent) and (event.rank, event.incarnation) == (
                rank,
                worker.incarnation,
            ):
                yield event
            else:
                log.warning("rank %d spoke for somebody else: %s", rank, type(event).__name__)

    def tell(self, order: commands.TellWorker) -> None:
        """Pass a command on, if this life is still the present one of its rank."""
        worker = self._host.workers.get(order.rank)
        if worker is None or worker.incarnation != order.incarnation:
            return
        command = order.command
        if isinstance(command, commands.Dump):
            command = with_left_memory(command, order.rank, self._host.workers, self._find_mirror)
        data = self._encode(translate.command_to_message(command), order.cause)
        if not worker.channel.send(data):
            log.info(
                "rank %d: %s came too late, the worker has closed its channel",
                order.rank,
                type(order.command).__name__,
            )
