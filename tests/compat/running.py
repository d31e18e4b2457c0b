"""A manager in a thread, and what tests of the ten functions wait for."""

from __future__ import annotations

import dataclasses
import socket
import threading
import time

from taskd.config import LogConfig, ManagerConfig
from taskd.core import events
from taskd.manager.service import Service
from taskd.transport import zeromq
from taskd.wire import codec, translate

LIMIT_S = 20.0


def await_fact(fact, what: str) -> None:
    """Waits on an event that nobody sets: a wait with a deadline, not a sleep."""
    deadline, pause = time.monotonic() + LIMIT_S, threading.Event()
    while not fact():
        assert time.monotonic() < deadline, what
        pause.wait(0.01)


def free_port() -> str:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


class RunningManager:
    """A manager in a thread of this process."""

    def __init__(self, tmp_path) -> None:
        self.router = zeromq.Router("127.0.0.1:0")
        self.address = self.router.address
        self.port = self.address.rpartition(":")[2]
        self.service = Service(
            ManagerConfig("default_job", self.address, 30.0, None, LogConfig(tmp_path / "log")),
            self.router,
        )
        self.thread = threading.Thread(target=self.service.run)

    def end(self) -> None:
        """Tell it, over the wire, that its job is over."""
        envelope = codec.Envelope("default_job", "agent", 0, None, "end", 0, 0, "end")
        dealer = zeromq.Dealer(self.address, "end")
        registration = events.AgentRegistered(
            0.0, "", 0, "end", 1, 1, 0, 0, 0, (events.WorkerReport(0, 0, "running"),)
        )
        for number, event in enumerate(
            (registration, events.AgentLeft(0.0, "", 0, "failed", "")), 1
        ):
            message = translate.event_to_message(event)
            dealer.send(None, codec.encode(dataclasses.replace(envelope, sequence=number), message))
        self.thread.join(LIMIT_S)
        assert not self.thread.is_alive()
        dealer.close()
