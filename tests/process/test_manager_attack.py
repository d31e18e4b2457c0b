"""A real manager on loopback meets strangers, liars and floods.

Afterwards it still serves the one who behaves.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import random
import signal
import socket
import time

import msgpack
import pytest

from taskd.core import events
from taskd.transport import zeromq
from taskd.transport.base import MAX_FRAME_BYTES
from taskd.wire import codec, messages, translate
from tests.process import harness
from tests.unit import fuzz_manager

pytestmark = pytest.mark.slow

LIMIT_S = 20.0
MAX_RSS_KB = 60 * 1024


READABLE = 10  # messages that are none: a stranger who sends many more is hung up on


class Client:
    """A dealer that says what it is told to say."""

    def __init__(
        self,
        port: int,
        *,
        role: str = "agent",
        job_id: str = "test-job",
        incarnation: str = "a0",
        node_rank: int = 0,
        rank: int | None = None,
    ) -> None:
        self.dealer = zeromq.Dealer(f"127.0.0.1:{port}", f"{role}-{node_rank}-{rank}-{incarnation}")
        self.envelope = codec.Envelope(job_id, role, node_rank, rank, incarnation, 0, 0, "test")

    def say(self, message: messages.Message) -> None:
        self.envelope = dataclasses.replace(self.envelope, sequence=self.envelope.sequence + 1)
        self.dealer.send(None, codec.encode(self.envelope, message))

    def register(self) -> None:
        workers = (events.WorkerReport(0, 0, "running"),)
        incarnation = self.envelope.incarnation
        self.say(
            messages.AgentRegistered(self.envelope.node_rank, incarnation, 1, 1, 0, 0, 0, workers)
        )

    def answer(self) -> messages.Message:
        """The next message of the manager."""
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            self.dealer.poll(0.2)
            for _, data in self.dealer.receive():
                return codec.decode(data)[1]
        raise AssertionError("the manager does not answer")

    def ask(self) -> messages.HeartbeatAck:
        self.say(messages.Heartbeat())
        answer = self.answer()
        assert isinstance(answer, messages.HeartbeatAck), answer
        return answer


@pytest.fixture
def job(tmp_path: pathlib.Path):
    with harness.job(tmp_path) as running:
        manager = running.start_manager()
        manager.wait_text("listens on", LIMIT_S)
        yield running


@pytest.fixture
def agent(job: harness.Job):
    client = Client(job.port)
    client.register()
    assert isinstance(client.answer(), messages.Accepted)
    yield client
    client.dealer.close()


def rss_kb(pid: int) -> int:
    status = pathlib.Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0])


def shout(port: int, data: bytes) -> None:
    """Send raw bytes over TCP, and read until the manager closes or says nothing more."""
    with socket.create_connection(("127.0.0.1", port), timeout=LIMIT_S) as connection:
        try:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(4096):
                pass
        except OSError:
            pass  # it hung up on us: that is fine


def test_the_manager_survives_everything_that_can_be_sent_to_its_port(
    job: harness.Job, agent: Client
) -> None:
    rng = random.Random(7)
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48)
    for data in (
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\xff" * 1000,
        greeting + rng.randbytes(500),
        greeting[:30],
        b"",
        *(rng.randbytes(rng.randrange(1, 3000)) for _ in range(20)),
    ):
        shout(job.port, data)

    stranger = Client(job.port, incarnation="stranger", node_rank=5)
    valid = msgpack.unpackb(codec.encode(stranger.envelope, messages.Heartbeat()))
    for _ in range(READABLE):
        stranger.dealer.send(None, rng.randbytes(rng.randrange(0, 400)))
    stranger.dealer.send(None, msgpack.packb(valid | {"version": 0}))
    stranger.dealer.send(None, msgpack.packb(valid | {"version": 99}))
    stranger.dealer.send(None, msgpack.packb(valid | {"type": 9999}))
    stranger.dealer.send(None, bytes(MAX_FRAME_BYTES + 1))
    stranger.dealer._send([b"two", b"frames"])
    assert stranger.answer() == messages.Unsupported(9999)
    noisy = [Client(job.port, incarnation=f"noisy{n}", node_rank=7 + n) for n in range(14)]
    for client in noisy:
        for _ in range(READABLE):
            client.dealer.send(None, rng.randbytes(rng.randrange(0, 400)))
        client.say(messages.Heartbeat())
        assert client.answer() == messages.HeartbeatAck(
            agent.ask().manager_incarnation, known=False, generation=0
        )
    monster = Client(job.port, incarnation="monster", node_rank=6)
    monster.dealer.send(None, bytes(20 * MAX_FRAME_BYTES))

    rival = Client(job.port, incarnation="a1")
    rival.register()
    refused = rival.answer()
    assert isinstance(refused, messages.Refused)
    assert "taken" in refused.reason
    for role in ("agent", "worker"):
        foreigner = Client(job.port, role=role, job_id="other-job", incarnation=f"f-{role}", rank=0)
        foreigner.say(messages.RegisterWorker(0, 1, "pt"))
        answer = foreigner.answer()
        assert isinstance(answer, messages.Refused)
        assert "other-job" in answer.reason
        foreigner.dealer.close()
    liar = Client(job.port, incarnation="liar", node_rank=0)
    liar.say(translate.event_to_message(events.AgentLeft(0.0, "", 0, "failed", "I say so")))
    assert liar.answer() == messages.HeartbeatAck(
        agent.ask().manager_incarnation, known=False, generation=0
    )

    assert job.manager is not None
    agent.ask()
    assert rss_kb(job.manager.process.pid) <= MAX_RSS_KB
    for client in (stranger, monster, rival, liar, *noisy):
        client.dealer.close()

    agent.register()  # connections broke around it, so it may have been asked to
    assert isinstance(agent.answer(), messages.Accepted)
    agent.say(messages.WorkerFinished(0, 0))
    agent.say(messages.AgentLeft(0, "succeeded", ""))
    finished = job.manager.wait(LIMIT_S)
    assert finished.returncode == 0, finished.output
    (summary,) = [line for line in finished.output.splitlines() if "refused in all" in line]
    counts = {
        words.rsplit(" ", 1)[0].strip(): int(words.rsplit(" ", 1)[1])
        for words in summary.split("refused in all:")[1].split(",")
    }
    assert counts["malformed"] >= 140
    assert {name: counts[name] for name in ("version", "unknown type", "size", "refused")} == {
        "version": 2,
        "unknown type": 1,
        "size": 1,
        "refused": 1,
    }
    assert counts["foreign"] >= 3
    assert counts["connection"] >= 3
    assert "Traceback" not in finished.output
    assert finished.output.count("refused a message of agent-5-None-stranger: malformed") == 1


@pytest.mark.extended(
    "tests/unit/manager/test_bad_input.py: test_odd_values_in_messages_of_every_type_*, without a "
    "socket"
)
def test_odd_values_in_messages_of_every_type_are_refused_and_the_job_goes_on(
    job: harness.Job, agent: Client, tmp_path: pathlib.Path
) -> None:
    dice, model = random.Random(7), fuzz_manager.Job(tmp_path / "model")
    for number in range(30):
        odd = Client(job.port, incarnation=f"odd{number}", node_rank=1)
        who = {"job_id": "test-job", "incarnation": f"odd{number}"}
        for _ in range(READABLE):
            frame = msgpack.unpackb(fuzz_manager.odd(dice, model.agents[1], model))
            odd.dealer.send(None, msgpack.packb(frame | who))
        odd.say(messages.Heartbeat())
        while not isinstance(odd.answer(), messages.HeartbeatAck):
            pass
        odd.dealer.close()
    assert agent.ask().known
    agent.say(messages.AgentLeft(0, "succeeded", ""))
    assert job.manager is not None
    finished = job.manager.wait(LIMIT_S)
    assert finished.returncode == 0, finished.output
    assert "a bug in taskd" not in finished.output
    (summary,) = [line for line in finished.output.splitlines() if "refused in all" in line]
    assert "malformed" in summary


def test_a_taken_port_ends_a_second_manager_with_code_2_and_says_where_to_look(
    job: harness.Job,
) -> None:
    first = job.manager
    starting = job.start_manager()
    second = starting.wait(LIMIT_S)
    starting.end()
    job.manager = first
    assert second.returncode == 2
    assert f"ss -ltnp 'sport = :{job.port}'" in second.output


def test_a_wrong_setting_ends_the_manager_with_code_2(tmp_path: pathlib.Path) -> None:
    with harness.job(tmp_path, TASKD_FAULT_TIMEOUT="never") as job:
        finished = job.start_manager().wait(LIMIT_S)
    assert finished.returncode == 2
    assert "TASKD_FAULT_TIMEOUT='never'" in finished.output


def test_sigterm_ends_the_manager_in_order_and_a_new_one_takes_over(
    job: harness.Job, agent: Client
) -> None:
    first = job.manager
    assert first is not None
    first.process.send_signal(signal.SIGTERM)
    finished = first.wait(LIMIT_S)
    assert finished.returncode == 0, finished.output
    assert "SIGTERM: the manager ends; training goes on without it" in finished.output
    first.end()
    job.start_manager().wait_text("listens on", LIMIT_S)
    assert not agent.ask().known
    agent.register()
    assert isinstance(agent.answer(), messages.Accepted)
    agent.say(messages.AgentLeft(0, "failed", "exit 1"))
    assert job.manager.wait(LIMIT_S).returncode == 1


def test_promises_on_the_command_line_are_held_against_registrations(
    tmp_path: pathlib.Path,
) -> None:
    with harness.job(tmp_path) as job:
        job.start_manager("--nnodes", "2", "--nproc-per-node", "8").wait_text("listens on", LIMIT_S)
        client = Client(job.port)
        client.register()
        answer = client.answer()
        assert isinstance(answer, messages.Refused)
        assert "2 nodes" in answer.reason
        client.dealer.close()


def test_the_manager_is_small_loads_no_torch_and_sleeps_while_nothing_happens(
    job: harness.Job,
) -> None:
    assert job.manager is not None
    pid = job.manager.process.pid
    assert "torch" not in pathlib.Path(f"/proc/{pid}/maps").read_text()
    assert rss_kb(pid) <= MAX_RSS_KB
    # Asleep without a timeout: its main thread waits in poll(2) with -1, so that nothing but a
    # message wakes it.
    deadline = time.monotonic() + LIMIT_S
    while True:
        call = (
            pathlib.Path(f"/proc/{pid}/syscall").read_text().split()
            if os.access(f"/proc/{pid}/syscall", os.R_OK)
            else []
        )
        if not call or call[0] == "running" or time.monotonic() > deadline:
            break
        if call[0] == "7" and call[3] in ("0xffffffff", "0xffffffffffffffff"):
            break
    if call and call[0] == "7":
        assert call[3] in ("0xffffffff", "0xffffffffffffffff"), call
