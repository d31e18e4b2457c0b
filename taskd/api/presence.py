"""A training process that no agent of ours started makes itself known to the manager.

Owns one background thread.
"""

from __future__ import annotations

import os
import socket
import threading
import uuid
from typing import TYPE_CHECKING

from taskd.agent.link.connection import ManagerConnection
from taskd.clock import MonotonicClock
from taskd.core import events
from taskd.core.timeouts import Timeouts
from taskd.wire import messages

if TYPE_CHECKING:
    from taskd.config import WorkerConfig


class Presence:
    """Registers and gives signs of life until `close`.

    Never in the way of the training: a missing manager is no error.
    """

    def __init__(self, config: WorkerConfig) -> None:
        """Starts at once."""
        self._pid = os.getpid()
        registration = messages.RegisterWorker(config.rank, self._pid, config.framework)
        self._manager = ManagerConnection(
            config.upstream_address,
            config.secret,
            MonotonicClock(),
            Timeouts.derive(),
            job_id=config.job_id,
            role="worker",
            node_rank=config.node_rank,
            rank=config.rank,
            incarnation=uuid.uuid4().hex,
            register=lambda: self._manager.send(registration, "registration"),
        )
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="taskd-presence", daemon=True)
        self._thread.start()

    @property
    def has_joined(self) -> bool:
        """Whether the manager knows this process."""
        return self._manager.session.is_registered

    def close(self) -> None:
        """Leave.

        In a forked child, which has neither the thread nor the right to the socket, nothing
        happens.
        """
        if os.getpid() != self._pid:
            return
        self._wake_writer.send(b"x")
        self._thread.join()
        self._wake_reader.close()
        self._wake_writer.close()

    def _run(self) -> None:
        while not self._manager.poll(fds=[self._wake_reader.fileno()]):
            for event in self._manager.turn():
                if isinstance(event, events.ManagerJoined):
                    self._manager.generation = event.generation
        self._manager.close()
