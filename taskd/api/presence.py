"""A training process that no agent of ours started makes itself known to the manager.

One background thread.
"""

from __future__ import annotations

import os
import socket
import threading
import uuid
from typing import TYPE_CHECKING

from taskd.agent.upstream import Upstream
from taskd.clock import MonotonicClock
from taskd.config import DEFAULT_FAULT_TIMEOUT_S
from taskd.wire import codec, messages

if TYPE_CHECKING:
    from taskd.config import WorkerConfig


class Presence:
    """Registers and gives signs of life until `close`.

    Never in the way of the training: a missing manager is no error.
    """

    def __init__(self, config: WorkerConfig) -> None:
        """Starts at once."""
        self._pid = os.getpid()
        envelope = codec.Envelope(
            job_id=config.job_id,
            role="worker",
            node_rank=config.node_rank,
            rank=config.rank,
            incarnation=uuid.uuid4().hex,
            generation=0,
            sequence=0,
            cause="",
        )
        registration = messages.RegisterWorker(config.rank, self._pid, config.framework)
        self._upstream = Upstream(
            config.upstream_address,
            config.secret,
            MonotonicClock(),
            envelope=envelope,
            registration=lambda: registration,
            fault_timeout_s=DEFAULT_FAULT_TIMEOUT_S,
        )
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="taskd-presence", daemon=True)
        self._thread.start()

    @property
    def has_joined(self) -> bool:
        """Whether the manager knows this process."""
        return self._upstream.has_joined

    @property
    def refusal(self) -> str | None:
        """Why the manager does not want it."""
        return self._upstream.refusal

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
        while not self._upstream.poll(fds=[self._wake_reader.fileno()]):
            self._upstream.turn()
        self._upstream.close()
