"""Strangers who connect and say nothing get no lasting hold of the manager's descriptors.

A real manager on loopback, and an agent that goes on meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from typing import TYPE_CHECKING

import pytest

from taskd.transport import zeromq
from tests.process import harness
from tests.process.test_keys import SECRET, Agent

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Iterator

pytestmark = pytest.mark.slow

COUNT = 300
LIMIT_S = 20.0
DROPPED_S = 60.0  # some five seconds, and what manager and test may stand still meanwhile

SIGNATURE = b"\xff" + bytes(8) + b"\x7f"  # of ZMTP: https://rfc.zeromq.org/spec/23
READY = b"\x05READY\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
COMMAND = bytes([4, len(READY)]) + READY


def greeting(mechanism: bytes) -> bytes:
    return SIGNATURE + b"\x03\x00" + mechanism.ljust(20, b"\0") + bytes(32)


def hello(port: int) -> bytes:
    """What a client that knows the secret says first, as a man in between sees it."""
    size = len(greeting(b"CURVE")) + 2 + 200  # the command HELLO
    with contextlib.ExitStack() as stack:
        between = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        address = f"127.0.0.1:{between.getsockname()[1]}"
        dealer = zeromq.Dealer(address, "client", secret=SECRET)
        stack.callback(dealer.close)
        client = stack.enter_context(between.accept()[0])
        server = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        threading.Thread(target=pass_on, args=(server, client), daemon=True).start()
        said = b""
        while len(said) < size:
            data = client.recv(size - len(said))
            server.sendall(data)
            said += data
        server.shutdown(socket.SHUT_RDWR)
    return said


def pass_on(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(4096):
            target.sendall(data)


def held(pid: int, ports: set[int]) -> int:
    """How many connections with these ports the manager has; its other descriptors may change."""
    with open("/proc/net/tcp", encoding="ascii") as table:
        rows = [line.split() for line in table][1:]
    theirs = {f"socket:[{row[9]}]" for row in rows if int(row[2].rpartition(":")[2], 16) in ports}
    count = 0
    for descriptor in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            count += os.readlink(f"/proc/{pid}/fd/{descriptor}") in theirs
    return count


def is_over(stranger: socket.socket) -> bool:
    """Whether the manager has ended this connection: it had accepted it, then."""
    try:
        while stranger.recv(4096, socket.MSG_DONTWAIT):
            pass  # its greeting
    except BlockingIOError:
        return False
    except ConnectionError:
        return True
    return True


@pytest.fixture(params=[None, SECRET], ids=["open", "secret"])
def secret(request: pytest.FixtureRequest) -> bytes | None:
    return request.param


@pytest.fixture
def job(tmp_path: pathlib.Path, secret: bytes | None) -> Iterator[harness.Job]:
    env = {"MINDX_TASK_ID": "job"}
    if secret is not None:
        file = tmp_path / "secret"
        file.write_bytes(secret)
        file.chmod(0o600)
        env["TASKD_SECRET_FILE"] = str(file)
    with harness.job(tmp_path, **env) as running:
        running.start_manager().wait_text("listens on", LIMIT_S)
        yield running


@pytest.fixture
def agent(job: harness.Job, secret: bytes | None) -> Iterator[Agent]:
    made = Agent(f"127.0.0.1:{job.port}", secret)
    made.join()
    yield made
    made.connection.close()


@pytest.mark.parametrize(
    "stage", ["connected", "signature", "greeting", "half a command", "handshake", "zmtp 1"]
)
def test_connections_that_stop_on_the_way_are_gone_and_the_agent_goes_on(
    job: harness.Job, agent: Agent, secret: bytes | None, stage: str
) -> None:
    assert job.manager is not None
    pid = job.manager.process.pid
    opening = greeting(b"CURVE" if secret else b"NULL")
    said = {
        "connected": b"",
        "signature": SIGNATURE,
        "greeting": opening,
        "half a command": opening + COMMAND[:12],
        "handshake": hello(job.port) if secret else opening + COMMAND,
        "zmtp 1": b"\x01\x00",  # which has no handshake
    }[stage]
    with contextlib.ExitStack() as stack:
        strangers = [
            stack.enter_context(socket.create_connection(("127.0.0.1", job.port), LIMIT_S))
            for _ in range(COUNT)
        ]
        for stranger in strangers:
            with contextlib.suppress(ConnectionError):  # it was ended already
                stranger.sendall(said)
        began = time.monotonic()
        ports = {stranger.getsockname()[1] for stranger in strangers}
        assert len(ports) == COUNT
        while not all(map(is_over, strangers)) or held(pid, ports):
            assert time.monotonic() - began < DROPPED_S, f"{held(pid, ports)} are kept"
            assert agent.beats() == [True, True, True]
        assert agent.beats() == [True, True, True]
    assert agent.accepted == 1
