"""Workers start, and their ends are told, whatever becomes of the forkserver.

It is stopped, killed, again and again.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import socket
import struct
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from taskd.agent.spawning import forkserver, processes, spawner
from taskd.agent.spawning.forkserver import Forkserver
from taskd.agent.spawning.protocol import Exited, SpawnRequest, Started, StartFailed
from taskd.agent.spawning.spawner import Spawner
from taskd.clock import MonotonicClock
from taskd.core.policy import forkservers
from tests.descriptors import none_free
from tests.process import harness

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 60.0
# Says that it runs, and ends as it is told to by a file.
WAITS = """
import os, sys, time
with open("runs", "a") as file:
    print(os.getpid(), file=file)
while not os.path.exists("end"):
    time.sleep(0.01)
sys.exit(7)
"""


class Workshop:
    """A spawner with a folder for the script, and everything that it has replied."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.script = folder / "main.py"
        self.script.write_text(WAITS, encoding="utf-8")
        self.spawner = Spawner(
            Forkserver.start("exec"), MonotonicClock(), lambda: Forkserver.start("exec")
        )
        self.replies: list[Any] = []
        self._token = 0

    @property
    def pid(self) -> int:
        return self.spawner.forkserver.pid

    def spawn(self, **options: Any) -> int:
        self._token += 1
        options = {"cwd": str(self.folder), "argv": ("-u", str(self.script))} | options
        self.spawner.spawn(SpawnRequest(token=self._token, env=dict(os.environ), **options))
        return self._token

    def wait_until(self, is_true: Any, what: str) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not is_true():
            assert time.monotonic() < deadline, f"not within {DEADLINE_S} s: {what}; {self.replies}"
            select.select(self.spawner.fds, [], [], 0.05)
            self.replies += self.spawner.read()

    def await_ready(self) -> None:
        self.wait_until(lambda: self.spawner.forkserver.is_ready, "a forkserver that is ready")

    def await_reply(self, kind: type, token: int) -> Any:
        self.wait_until(lambda: self.of(kind, token), f"{kind.__name__} {token}")
        return self.of(kind, token)[0]

    def of(self, kind: type, token: int) -> list[Any]:
        return [reply for reply in self.replies if isinstance(reply, kind) and reply.token == token]

    def runs(self) -> list[int]:
        """Process ids of all that have begun the script."""
        path = self.folder / "runs"
        return (
            [int(line) for line in path.read_text(encoding="utf-8").splitlines()]
            if path.exists()
            else []
        )

    def kill_forkserver(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)

    def stop_forkserver(self) -> int:
        pid = self.pid
        os.kill(pid, signal.SIGSTOP)
        os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)
        assert processes.is_stopped(pid)
        return pid


def hide_torch(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forkservers that begin from now on find none, so that they are ready at once."""
    folder.mkdir()
    (folder / "torch.py").write_text("raise ImportError('none here')", encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), str(ROOT)]))


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Workshop]:
    """Its forkservers find no torch."""
    hide_torch(tmp_path / "without", monkeypatch)
    folder = tmp_path / "job"
    folder.mkdir()
    made = Workshop(folder)
    yield made
    made.spawner.close()
    assert not harness.descendants(os.getpid()) & {made.pid, *made.runs()}


def test_a_stopped_forkserver_is_replaced_and_no_worker_of_its_comes_late(
    shop: Workshop, caplog: pytest.LogCaptureFixture
) -> None:
    """After a time that tests/unit/core/test_forkservers.py measures, on a clock of its own."""
    first = shop.spawn()
    shop.wait_until(shop.runs, "the first worker")
    stopped = shop.stop_forkserver()
    token = shop.spawn()
    started = shop.await_reply(Started, token)
    assert f"has been stopped for {forkservers.STOPPED_S:g} s: it is killed" in caplog.text
    assert shop.pid != stopped
    assert stopped not in harness.descendants(os.getpid())
    shop.wait_until(lambda: len(shop.runs()) == 2, "the second worker")
    (shop.folder / "end").touch()
    for ended in (first, token):  # one of a forkserver that is gone, one of the present one
        assert shop.await_reply(Exited, ended).status == 7
    assert shop.runs() == [shop.await_reply(Started, first).pid, started.pid]
    assert not [reply for reply in shop.replies if isinstance(reply, StartFailed)]


@pytest.mark.parametrize("is_answer_read", [True, False])
def test_one_that_takes_no_request_is_killed_and_its_workers_go_on(
    shop: Workshop, caplog: pytest.LogCaptureFixture, is_answer_read: bool
) -> None:
    """Stopped while it is asked for a worker whose arguments are more than the connection holds.

    Or as soon as its answer to the request before that has been read.
    """
    shop.await_ready()
    first = shop.spawn()
    deadline = time.monotonic() + DEADLINE_S
    while not shop.runs():
        assert time.monotonic() < deadline
        time.sleep(0.01)  # between two looks
    if is_answer_read:
        shop.await_reply(Started, first)
    with socket.socket(fileno=os.dup(shop.spawner.forkserver.fd)) as same:
        same.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 0, 100_000))
    stopped = shop.stop_forkserver()
    second = shop.spawn(argv=("-u", str(shop.script), *["a" * 100] * 10_000))
    third = shop.spawn()
    for token in (second, third):
        assert shop.await_reply(Started, token).note is None
    assert shop.pid != stopped
    worker = shop.of(Started, first)[0].pid
    assert stopped not in harness.descendants(os.getpid())
    assert not shop.of(Exited, first)
    assert worker in harness.descendants(os.getpid())
    assert f"(pid {stopped}) does not take requests" in caplog.text
    (shop.folder / "end").touch()
    assert shop.await_reply(Exited, first).status == 7


def test_what_one_had_said_before_it_took_no_request_is_not_lost(shop: Workshop) -> None:
    first = shop.spawn()
    shop.wait_until(shop.runs, "the first worker")
    (pidfd,) = [started.pidfd for started in shop.of(Started, first)]
    (shop.folder / "end").touch()
    select.select([pidfd], [], [], DEADLINE_S)
    select.select([shop.spawner.forkserver.fd], [], [], DEADLINE_S)  # it tells the end
    shop.spawner.forkserver.alive = False  # as when the next request was not taken
    assert shop.await_reply(Exited, first).status == 7


def test_the_end_of_a_worker_is_told_though_the_forkserver_is_stopped(shop: Workshop) -> None:
    token = shop.spawn()
    shop.wait_until(shop.runs, "the worker")
    stopped = shop.stop_forkserver()
    (shop.folder / "end").touch()
    assert shop.await_reply(Exited, token).status == 7
    assert shop.pid != stopped


def test_a_forkserver_that_waits_and_owes_nothing_is_left_alone(shop: Workshop) -> None:
    shop.spawn()
    shop.wait_until(shop.runs, "the worker")
    stopped = shop.stop_forkserver()
    until = time.monotonic() + 2 * forkservers.STOPPED_S
    shop.wait_until(lambda: time.monotonic() > until, "time")
    assert shop.pid == stopped


def test_what_a_dying_forkserver_was_asked_for_is_asked_of_the_next_one(shop: Workshop) -> None:
    shop.await_ready()
    shop.stop_forkserver()
    token = shop.spawn()  # it has been sent, and is not answered
    shop.kill_forkserver()
    assert shop.await_reply(Started, token).note is None
    shop.wait_until(shop.runs, "the worker")
    shop.kill_forkserver()
    token = shop.spawn()  # nobody is there to be asked
    assert shop.await_reply(Started, token).note is None
    shop.wait_until(lambda: len(shop.runs()) == 2, "the second worker")
    assert not [reply for reply in shop.replies if isinstance(reply, StartFailed)]


def test_where_no_forkserver_lives_workers_are_started_as_torchrun_starts_them(
    shop: Workshop,
) -> None:
    killed = set()
    for _ in range(forkservers.DEATHS + 1):
        killed.add(shop.pid)
        shop.kill_forkserver()
        shop.wait_until(
            lambda: shop.pid not in killed or not shop.spawner.forkserver.alive, "its end"
        )
    assert len(killed) == forkservers.DEATHS + 1
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    shop.script.write_text(
        """
import json, os, socket
worker = json.loads(os.environ["TASKD_WORKER"])
assert worker["pid"] == os.getpid() and worker["rank"] == 5 and worker["previous_fd"] is None
said = repr([os.getsid(0) == os.getpid(), os.getcwd()]).encode()
socket.socket(fileno=worker["channel_fd"]).send(said)
print("said")
raise SystemExit(3)
""",
        encoding="utf-8",
    )
    with ours, theirs:
        token = shop.spawn(
            fds={"channel": theirs.fileno()}, worker={"rank": 5}, stdout=str(shop.folder / "out")
        )
        assert "forkservers were lost" in shop.await_reply(Started, token).note
        assert shop.await_reply(Exited, token).status == 3
        assert ours.recv(1000).decode() == repr([True, str(shop.folder)])
    assert (shop.folder / "out").read_text(encoding="utf-8") == "said\n"


def test_closing_ends_the_present_forkserver_at_once_and_workers_of_former_ones(
    shop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forkserver, "_CLOSE_TIMEOUT_S", DEADLINE_S)
    monkeypatch.setattr(spawner, "_END_TIMEOUT_S", DEADLINE_S)
    shop.spawn()
    shop.wait_until(shop.runs, "the worker")
    first = shop.pid
    shop.kill_forkserver()
    shop.wait_until(lambda: shop.pid != first, "another forkserver")
    assert not shop.spawner.forkserver.is_ready
    began = time.monotonic()
    shop.spawner.close()
    assert not harness.descendants(os.getpid()) & {shop.pid, *shop.runs()}
    assert time.monotonic() - began < DEADLINE_S


@pytest.mark.parametrize(
    "torch",
    ["none", pytest.param("real", marks=pytest.mark.extended("[none]; test_surroundings.py"))],
)
def test_a_removed_working_directory_is_what_workers_get(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, torch: str
) -> None:
    """Real torch cannot be loaded there."""
    if torch == "none":
        hide_torch(tmp_path / "without", monkeypatch)
    folder = tmp_path / "removed"
    folder.mkdir()
    with monkeypatch.context() as context:
        context.chdir(folder)
        shop = Workshop(tmp_path)
        shop.script.write_text(
            "import os, sys\ntry:\n    os.getcwd()\nexcept FileNotFoundError:\n    "
            "print('removed', 'numpy' in sys.modules)\n",
            encoding="utf-8",
        )
        try:
            shop.await_ready()
            shutil.rmtree(folder)
            for kind in ("python", "exec", "python"):
                token = shop.spawn(cwd=None, kind=kind, stdout=str(tmp_path / "out"))
                assert (shop.await_reply(Started, token).note is None) == (kind == "python")
                assert shop.await_reply(Exited, token).status == 0
                if kind == "exec":
                    shop.kill_forkserver()  # the next one begins there
        finally:
            shop.spawner.close()
    assert (tmp_path / "out").read_text(encoding="utf-8") == (
        "removed True\nremoved False\nremoved True\n"
    )


def test_without_descriptors_a_start_fails_with_the_reason_and_succeeds_when_they_are_back(
    shop: Workshop,
) -> None:
    shop.await_ready()
    theirs, ours = socket.socketpair()
    with theirs, ours:
        with none_free(), pytest.raises(OSError, match="Too many open files"):
            shop.spawn(fds={"channel": theirs.fileno()})
        token = shop.spawn(fds={"channel": theirs.fileno()})
        assert shop.await_reply(Started, token).note is None


def test_a_start_is_told_though_its_descriptor_does_not_fit(shop: Workshop) -> None:
    shop.await_ready()
    with none_free():
        token = shop.spawn()
        started = shop.await_reply(Started, token)
        assert started.pidfd == -1
    shop.wait_until(shop.runs, "the worker")
    shop.kill_forkserver()
    (shop.folder / "end").touch()
    assert shop.await_reply(Exited, token).status == 7


def test_without_descriptors_and_without_a_forkserver_a_start_fails_with_the_reason(
    shop: Workshop,
) -> None:
    shop.await_ready()
    with none_free():
        shop.kill_forkserver()
        token = shop.spawn()
        failed = shop.await_reply(StartFailed, token)
        assert "Too many open files" in failed.error
    token = shop.spawn()
    assert shop.await_reply(Started, token).note is None
