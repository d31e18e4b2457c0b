"""What this process tells its agent: the sending end of the channel."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

from taskd.wire import codec, translate

if TYPE_CHECKING:
    from taskd.core.events import WorkerEvent
    from taskd.transport.channel import Channel
    from taskd.worker.life import Life
    from taskd.worker.process.orders import Orders

log = logging.getLogger(__name__)


class Uplink:
    """One per runtime; any thread may use it."""

    def __init__(self, channel: Channel, life: Life, orders: Orders, node_rank: int) -> None:
        self._channel, self._life, self._orders = channel, life, orders
        self._node_rank, self._sequence = node_rank, 0

    def tell(self, kind: type[WorkerEvent], cause: str, **fields: Any) -> None:
        """Report an event. `cause`: why; `fields`: what the event has beside its identity.

        Never raises: a lost agent ends this process by other means (the life pipe).
        """
        life, now = self._life, time.monotonic()
        event = kind(
            now=now,
            cause=f"{cause}:{life.rank}.{life.incarnation}:{now:.6f}",
            rank=life.rank,
            incarnation=life.incarnation,
            **fields,
        )
        with self._orders.condition:
            self._sequence += 1
            envelope = codec.Envelope(
                job_id=life.job_id,
                role="worker",
                node_rank=self._node_rank,
                rank=life.rank,
                incarnation=life.incarnation,
                generation=self._orders.generation,
                sequence=self._sequence,
                cause=event.cause,
            )
            sent = self._channel.send(codec.encode(envelope, translate.event_to_message(event)))
        if not sent:
            log.warning(
                "rank %d: the agent did not take %s: its end of the channel is closed",
                life.rank,
                kind.__name__,
            )
