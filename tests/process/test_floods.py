"""What strangers send without end, by a socket of their own: it costs them the connection.

ZeroMQ keeps the parts of a message until the last one is there, and bounds whole messages only.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING

import pytest

from taskd.config import LogConfig, ManagerConfig
from taskd.manager.service import Service
from taskd.transport import memory_watch, zeromq
from taskd.wire import codec, messages
from tests.process import harness
from tests.process.test_manager_attack import LIMIT_S, Client, rss_kb

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.slow

# ZMTP 3.0: https://rfc.zeromq.org/spec/23
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48)
MORE, LONG, COMMAND = 1, 2, 4
READY = b"\x05READY\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"


def frame(data: bytes, flags: int = 0) -> bytes:
    if len(data) > 255:
        return bytes([LONG | flags]) + struct.pack(">Q", len(data)) + data
    return bytes([flags, len(data)]) + data


def connect(port: int) -> socket.socket:
    """Past the handshake, as a DEALER without a name."""
    stranger = socket.create_connection(("127.0.0.1", port), timeout=LIMIT_S)
    stranger.sendall(GREETING)
    answer = b""
    while len(answer) < len(GREETING):
        answer += stranger.recv(len(GREETING) - len(answer))
    stranger.sendall(frame(READY, COMMAND))
    return stranger


def send_until_dropped(port: int, data: bytes) -> int:
    """Returns how many bytes went out before the manager hung up."""
    sent, deadline = 0, time.monotonic() + 60
    with connect(port) as stranger, contextlib.suppress(ConnectionError):
        stranger.sendall(frame(b"x"))  # else it is closed for its silence
        while True:
            assert time.monotonic() < deadline, f"{sent} bytes, and it has not hung up"
            stranger.sendall(data)
            sent += len(data)
    return sent


def await_message(client: Client, kind: type[messages.Message]) -> None:
    """It lives, and registers when it is asked to, until it is told this."""
    deadline, heard = time.monotonic() + LIMIT_S, [messages.Message()]
    while not any(isinstance(message, kind) for message in heard):
        assert time.monotonic() < deadline, heard
        client.say(messages.Heartbeat())
        client.dealer.poll(0.1)
        heard = [codec.decode(data)[1] for _, data in client.dealer.receive()]
        if client.envelope.role == "agent" and any(
            isinstance(message, messages.HeartbeatAck) and not message.known for message in heard
        ):
            client.register()


@pytest.fixture
def service(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    """A manager in a thread, with little room."""
    monkeypatch.setattr(memory_watch, "ROOM_BYTES", 32 << 20)
    config = ManagerConfig("test-job", "unused", 30.0, None, LogConfig(tmp_path / "log"))
    made = Service(config, zeromq.Router("127.0.0.1:0"))
    thread = threading.Thread(target=made.run)
    thread.start()
    yield made
    made._executor.result = True
    thread.join(LIMIT_S)
    assert not thread.is_alive()


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(frame(bytes(1_000_000), MORE), id="a message without end"),
        pytest.param(frame(b"", MORE) * 50_000, id="empty parts without end"),
        pytest.param((frame(b"", MORE) * 2000 + frame(b"")) * 25, id="thousands of parts"),
    ],
)
def test_what_does_not_end_is_dropped_and_the_agent_goes_on(service: Service, data: bytes) -> None:
    port = int(service._link.address.rpartition(":")[2])
    agent = Client(port)
    agent.register()
    assert isinstance(agent.answer(), messages.Accepted)
    send_until_dropped(port, data)
    # ZeroMQ connects again, and the manager wants to hear again what may have been lost.
    await_message(agent, messages.Accepted)
    assert service._refusals.counts["flood"] >= 1
    assert service.result is None
    agent.dealer.close()


def test_who_sends_only_what_nobody_can_read_is_hung_up_on(service: Service) -> None:
    port = int(service._link.address.rpartition(":")[2])
    agent = Client(port)
    agent.register()
    assert isinstance(agent.answer(), messages.Accepted)
    assert send_until_dropped(port, frame(b"junk") * 10) > 0
    assert 10 <= service._refusals.counts["malformed"] < 2000
    for _ in range(30):  # of its own agent no number of them is too many
        agent.dealer.send(None, b"junk")
    agent.say(messages.Heartbeat())
    await_message(agent, messages.HeartbeatAck)
    assert set(service._sessions.agents) == {agent.envelope.node_rank}
    assert not service._sessions.agents[agent.envelope.node_rank].is_doubtful
    agent.dealer.close()


def test_a_manager_s_memory_is_bounded_whatever_is_sent(tmp_path: pathlib.Path) -> None:
    with harness.job(tmp_path) as job:
        manager = job.start_manager()
        manager.wait_text("listens on", LIMIT_S)
        sent = send_until_dropped(job.port, frame(bytes(1_000_000), MORE))
        assert sent > 400e6  # a message within reason is waited for
        manager.wait_text("all connections were dropped", LIMIT_S)
        assert "set TASKD_SECRET_FILE on every node" in manager.text
        assert rss_kb(manager.process.pid) < 1500 * 1024  # at most; on the machine's own interface
        client = Client(job.port)
        client.register()
        assert isinstance(client.answer(), messages.Accepted)
        client.dealer.close()


def test_what_strangers_write_into_the_log_is_bounded(tmp_path: pathlib.Path) -> None:
    with harness.job(tmp_path) as job:
        job.start_manager().wait_text("listens on", LIMIT_S)
        text = "x" * 4000
        for rank in range(20):
            client = Client(job.port, role="worker", rank=rank, incarnation=f"a{rank}")
            for other in range(500):
                if other % 2:
                    client.say(messages.RegisterWorker(rank, other, text))
                else:  # refused, each for another reason
                    client.say(messages.RegisterWorker(rank + 1 + other, 1, text))
                client.dealer.receive()
            # what it has sent has been read when this is answered
            await_message(client, messages.HeartbeatAck)
            client.dealer.close()
        assert job.manager is not None
        job.manager.process.send_signal(signal.SIGTERM)
        finished = job.manager.wait(LIMIT_S)
        (summary,) = [line for line in finished.output.splitlines() if "refused in all" in line]
        assert "foreign 5000" in summary
        logged = (job.log_dir / "manager.log").stat().st_size
        assert logged < 200_000


def dropped(stranger: socket.socket) -> bool:
    """Whether the manager has hung up; what it says before is its greeting."""
    stranger.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        try:
            while stranger.recv(100):
                pass
        except ConnectionError:
            pass
        return True
    return False


def until(fact: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not fact():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def test_a_manager_without_a_free_descriptor_goes_on_and_frees_them(tmp_path: pathlib.Path) -> None:
    """More connections than it may have, on which nobody speaks behind the handshake.

    Some of them wait to be accepted.
    """
    command = [sys.executable, str(harness.SCRIPTS / "full_manager.py"), str(tmp_path), "30"]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as manager,
        contextlib.ExitStack() as strangers,
    ):
        strangers.callback(manager.kill)
        assert manager.stdout is not None
        port, limit = map(int, manager.stdout.readline().split())
        agent = Client(port)
        agent.register()
        assert isinstance(agent.answer(), messages.Accepted)
        held = [
            strangers.enter_context(socket.create_connection(("127.0.0.1", port), LIMIT_S))
            for _ in range(80)
        ]
        for stranger in held:
            stranger.sendall(GREETING + frame(READY, COMMAND))
        folder = f"/proc/{manager.pid}/fd"
        until(lambda: len(os.listdir(folder)) >= limit, "all descriptors are used")
        agent.ask()
        until(lambda: all(map(dropped, held)), "nobody speaks there: they are closed")
        agent.ask()
        agent.dealer.close()
        agent = Client(port)  # a new connection
        agent.register()
        await_message(agent, messages.Accepted)
        agent.dealer.close()
        manager.send_signal(signal.SIGTERM)
        assert manager.wait(LIMIT_S) == 0
