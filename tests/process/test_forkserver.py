"""The forkserver's own duties.

Descriptors, exit reports, orphans, its own death and its agent's, when not to fork.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from taskd.agent.spawning import forkserver, processes
from taskd.agent.spawning.forkserver import Forkserver
from taskd.agent.spawning.protocol import Exited, SpawnRequest, Started
from taskd.errors import ForkserverError

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 60.0


class Client:
    """A forkserver with a folder for scripts, and everything that it has replied."""

    def __init__(self, server: Forkserver, folder: Path) -> None:
        self.server = server
        self.folder = folder
        self.replies: list[Any] = []
        self._token = 0

    def spawn(self, source: str, **options: Any) -> int:
        self._token += 1
        script = self.folder / f"script{self._token}.py"
        script.write_text(source, encoding="utf-8")
        argv = options.pop("argv", ("-u", script.name))
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **options.pop("env", {})}
        self.server.spawn(
            SpawnRequest(
                token=self._token,
                argv=argv,
                env=environment,
                cwd=str(self.folder),
                stdout=str(self.folder / f"out{self._token}"),
                **options,
            )
        )
        return self._token

    def await_reply(self, kind: type, token: int) -> Any:
        deadline = time.monotonic() + DEADLINE_S
        while True:
            for reply in self.replies:
                if isinstance(reply, kind) and reply.token == token:
                    return reply
            assert select.select([self.server.fd], [], [], max(0.0, deadline - time.monotonic()))[
                0
            ], "no answer"
            self.replies += self.server.read()

    def output(self, token: int) -> str:
        return (self.folder / f"out{token}").read_text(encoding="utf-8")

    def await_output(self, token: int) -> str:
        """The first line, once it is there; written by a live worker."""
        deadline = time.monotonic() + DEADLINE_S
        path = self.folder / f"out{token}"
        while not path.exists() or "\n" not in path.read_text(encoding="utf-8"):
            assert time.monotonic() < deadline, "no output"
            select.select([self.server.fd] if self.server.alive else [], [], [], 0.01)
        return path.read_text(encoding="utf-8").splitlines()[0]

    def close(self) -> None:
        self.server.close()
        for reply in self.replies:
            if isinstance(reply, Started):
                os.close(reply.pidfd)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    client = Client(Forkserver.start("exec"), tmp_path_factory.mktemp("shared"))
    yield client
    client.close()


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Client]:
    client = Client(Forkserver.start("exec"), tmp_path)
    yield client
    client.close()


def await_end(pid: int) -> None:
    """Wait until no process has this number, or it is a zombie that somebody will reap."""
    deadline = time.monotonic() + DEADLINE_S
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    assert select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))[0], (
        f"{pid} lives"
    )
    os.close(descriptor)


def test_workers_draw_different_random_numbers(shared: Client) -> None:
    source = (
        "import random, numpy, torch, os\nprint(random.random(), numpy.random.rand(), "
        "torch.rand(1).item(), os.urandom(4).hex())"
    )
    tokens = [shared.spawn(source) for _ in range(2)]
    for token in tokens:
        assert shared.await_reply(Exited, token).status == 0
    first, second = (shared.output(token).split() for token in tokens)
    assert all(a != b for a, b in zip(first, second, strict=True))


def test_only_passed_descriptors_are_open(shared: Client) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    token = shared.spawn(
        "import os, socket\n"
        "fds = sorted(int(n) for n in os.listdir('/proc/self/fd') if "
        "os.path.exists(f'/proc/self/fd/{n}'))\n"
        "extra = [n for n in fds if n > 2]\n"
        "socket.socket(fileno=extra[0]).send(repr([len(extra), "
        "os.get_inheritable(extra[0])]).encode())\n",
        fds={"channel": theirs.fileno()},
    )
    theirs.close()
    assert shared.await_reply(Exited, token).status == 0
    assert ours.recv(100) == b"[1, False]"
    ours.close()


def test_fresh_interpreter_gets_the_bootstrap(shared: Client) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    token = shared.spawn(
        "import json, os, socket\nworker = json.loads(os.environ['TASKD_WORKER'])\n"
        "assert worker['pid'] == os.getpid() and worker['previous_fd'] is None and worker['rank'] "
        "== 5\n"
        "socket.socket(fileno=worker['channel_fd']).send(b'here')\n",
        kind="exec",
        fds={"channel": theirs.fileno()},
        worker={"rank": 5},
    )
    theirs.close()
    assert shared.await_reply(Started, token).note == "asked for"
    assert shared.await_reply(Exited, token).status == 0
    assert ours.recv(100) == b"here"
    ours.close()


def test_nothing_of_a_dead_worker_outlives_it(shared: Client) -> None:
    token = shared.spawn(
        "import os, time\npid = os.fork()\nif pid == 0:\n    "
        "time.sleep(600)\nprint(pid)\ntime.sleep(600)\n"
    )
    child = int(shared.await_output(token))
    os.kill(shared.await_reply(Started, token).pid, signal.SIGKILL)
    assert shared.await_reply(Exited, token).status == -signal.SIGKILL
    await_end(child)


def test_pidfd_tells_the_end(shared: Client) -> None:
    token = shared.spawn("import time\nprint()\ntime.sleep(600)\n")
    shared.await_output(token)
    started = shared.await_reply(Started, token)
    assert not select.select([started.pidfd], [], [], 0)[0]
    assert processes.signal_group(started.pid, signal.SIGTERM)
    assert select.select([started.pidfd], [], [], DEADLINE_S)[0]
    assert shared.await_reply(Exited, token).status == -signal.SIGTERM
    assert not processes.signal_group(started.pid, signal.SIGTERM)


def test_workers_outlive_the_forkserver(own: Client) -> None:
    token = own.spawn(
        "import os, sys, time\nprint('up')\nwhile os.path.exists('wait'):\n    "
        "time.sleep(0.01)\nsys.exit(7)\n"
    )
    (own.folder / "wait").touch()
    own.await_output(token)
    started = own.await_reply(Started, token)
    os.kill(own.server.pid, signal.SIGKILL)
    assert select.select([own.server.fd], [], [], DEADLINE_S)[0]
    assert own.server.read() == []
    assert not own.server.alive
    assert processes.reap_group(started.pid, started.pidfd) is None
    (own.folder / "wait").unlink()
    assert select.select([started.pidfd], [], [], DEADLINE_S)[0]
    assert processes.reap_group(started.pid, started.pidfd) == 7
    with pytest.raises(ForkserverError, match="does not take requests"):
        own.spawn("pass")


def test_close_ends_live_workers(own: Client) -> None:
    token = own.spawn("import time\nprint()\ntime.sleep(600)\n")
    own.await_output(token)
    pid = own.await_reply(Started, token).pid
    own.server.close()
    await_end(pid)
    await_end(own.server.pid)


@pytest.mark.parametrize("mode", ["fork", "exec"])
def test_loss_of_the_agent_ends_workers(tmp_path: Path, mode: str) -> None:
    """A worker that ignores SIGTERM too; the agent is killed and can do nothing about it."""
    (tmp_path / "work.py").write_text(
        "import os, signal, time\nsignal.signal(signal.SIGTERM, "
        "signal.SIG_IGN)\nprint(os.getpid(), os.getppid())\n"
        "time.sleep(600)\n",
        encoding="utf-8",
    )
    agent = (
        "import os, signal, time\n"
        "from taskd.agent.spawning.forkserver import Forkserver\n"
        "from taskd.agent.spawning.protocol import SpawnRequest\n"
        f"server = Forkserver.start({mode!r})\n"
        "server.spawn(SpawnRequest(token=1, argv=('-u', 'work.py'), env=dict(os.environ), "
        "cwd=os.getcwd()))\n"
        "time.sleep(600)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, "-c", agent], cwd=tmp_path, env=environment, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert select.select([process.stdout], [], [], DEADLINE_S)[0]
        pids = [int(word) for word in process.stdout.readline().split()]
        process.kill()
    for pid in pids:
        await_end(pid)


def test_preloaded_thread_makes_workers_cold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "starts_a_thread.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), "
        "daemon=True).start()\n",
        encoding="utf-8",
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))
    client = Client(Forkserver.start("exec", ["starts_a_thread"]), tmp_path)
    try:
        token = client.spawn("import sys\nprint('starts_a_thread' in sys.modules)")
        assert "2 threads" in client.await_reply(Started, token).note
        assert client.await_reply(Exited, token).status == 0
        assert client.output(token) == "False\n"
    finally:
        client.close()


def test_missing_preload_is_survived(tmp_path: Path) -> None:
    client = Client(Forkserver.start("exec", ["no_such_module_anywhere"]), tmp_path)
    try:
        token = client.spawn("print(1)")
        assert client.await_reply(Started, token).note is None
        assert client.await_reply(Exited, token).status == 0
    finally:
        client.close()


def test_title_and_fields_of_a_worker(shared: Client) -> None:
    token = shared.spawn(
        "print(open('/proc/self/cmdline').read().rstrip(chr(0)).split(chr(0))[-1])"
    )
    assert shared.await_reply(Exited, token).status == 0
    assert shared.output(token) == f"script{token}.py\n"
    title = Path(f"/proc/{shared.server.pid}/cmdline").read_text(encoding="utf-8").rstrip("\0")
    assert title == "taskd-forkserver"


@pytest.fixture
def is_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    """The program of this process is torchrun's, as far as anybody can see."""
    main = types.ModuleType("__main__")
    main.__file__ = "/usr/bin/torchrun"
    monkeypatch.setitem(sys.modules, "__main__", main)


@pytest.mark.usefixtures("is_torchrun")
def test_a_process_with_threads_is_not_forked() -> None:
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    try:
        assert "threads" in (forkserver.why_not_fork() or "")
    finally:
        stop.set()
        thread.join()


def as_torchrun(folder: Path, code: str) -> str:
    """Its console script, with other content."""
    path = folder / "torchrun"
    path.write_text(code, encoding="utf-8")
    return str(path)


def said_by(command: list[str], folder: Path, **env: str) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        check=True,
        timeout=DEADLINE_S,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": f"{folder}:{ROOT}", **env},
    )
    return done.stdout.strip()


ASKS = "from taskd.agent.spawning.forkserver import why_not_fork\nprint(why_not_fork())\n"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], None),
        (["-u"], None),
        (["-W", "ignore"], "-W"),
        (["-X", "dev"], "-X"),
        (["-E"], "-E"),
    ],
)
def test_options_of_the_interpreter(
    tmp_path: Path, options: list[str], expected: str | None
) -> None:
    torchrun = as_torchrun(tmp_path, f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n{ASKS}")
    said = said_by([*options, torchrun], tmp_path)
    assert said == "None" if expected is None else expected in said


BY_RUNPY = """import runpy
runpy.run_module("torch.distributed.run", run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize(
    ("command", "program"),
    [
        pytest.param(["-m", "torch.distributed.run"], None, id="torch"),
        pytest.param(["torch/distributed/run.py"], None, id="file"),
        pytest.param(["-c", BY_RUNPY], None, id="runpy"),
        pytest.param(["-c", ASKS], "a program without a file", id="command"),
        pytest.param(["other.py"], "{}/other.py", id="script"),
        pytest.param(["-m", "other"], "python -m other", id="module"),
    ],
)
def test_programs_that_call_torchrun_are_not_forked(
    tmp_path: Path, command: list[str], program: str | None
) -> None:
    """But torchrun itself is. These stand in the place of torch, and import nothing of it."""
    folder = tmp_path / "torch" / "distributed"
    folder.mkdir(parents=True)
    for path in (folder.parent, folder):
        (path / "__init__.py").touch()
    for path in (folder / "run.py", tmp_path / "other.py"):
        path.write_text(ASKS, encoding="utf-8")
    said = said_by(command, tmp_path)
    assert said.partition(",")[0] == (
        f"torchrun was called by {program.format(tmp_path)}" if program else "None"
    )


@pytest.mark.usefixtures("is_torchrun")
def test_a_process_with_a_device_is_not_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_HARMLESS_DEVICES", ())  # so that /dev/null counts as a device
    with open("/dev/null", "rb"):
        assert processes.device_files()
        assert "/dev/null" in (forkserver.why_not_fork() or "")


def test_numpy_pool_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenBLAS ends its threads before a fork; a process that has only those may be forked."""
    code = (
        "import numpy, json\nfrom taskd.agent.spawning import forkserver, processes\n"
        "before = processes.thread_count()\nprint(json.dumps([before, "
        "forkserver.why_not_fork(), processes.thread_count()]))"
    )
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    said = said_by([as_torchrun(tmp_path, code)], tmp_path, OPENBLAS_NUM_THREADS="2")
    before, reason, after = json.loads(said)
    assert (before, reason, after) == (min(2, os.cpu_count() or 1), None, 1)
