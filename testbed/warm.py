"""A parent that has imported torch once, and forks a process of a job for whoever asks.

Importing torch and what it loads lazily takes 3 to 5 s of processor time; a job under test takes
one. The child becomes what a fresh interpreter would be (arguments, environment, folder, output,
session) and then runs the module or script as `__main__`, to the natural end of the interpreter.
Tests of the start itself, of `LD_PRELOAD` and of limits start fresh interpreters instead.

    pytest ──request (argv, env, cwd, output)──►  warm parent ──fork──►  python -m taskd.run …
           ◄──pidfd, pid; later its status──────  (its parent: reaps it)
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import pathlib
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, NoReturn

if __name__ == "__main__":
    sys.path.insert(1, str(pathlib.Path(__file__).resolve().parents[1]))

from taskd.agent.spawning import libraries, warmth
from testbed import hosts
from testbed.proc import MARK_ENV, stat_of

if TYPE_CHECKING:
    from testbed.hosts import Host

MARK_ROOM = 48  # bytes kept in the parent's initial environment for the mark of a job
_OF_A_MANAGER = ("taskd.api", "taskd.manager.service", "taskd.log")
_OF_A_TORCHRUN = (
    "torch.distributed.launcher.api",
    "torch.distributed.elastic.agent.server.local_elastic_agent",
    "torch.distributed.elastic.rendezvous.static_tcp_rendezvous",
    "torch.distributed.elastic.multiprocessing.subprocess_handler",
    "torch.distributed.elastic.rendezvous.c10d_rendezvous_backend",
    "taskd.torchrun.loop",
    "taskd.torchrun.context",
    "taskd.torchrun.elastic_agent",
    "taskd.torchrun.deferred",
    "taskd.torchrun.rendezvous",
    "taskd.agent.spawning.server",
    "taskd.agent.spawning.spawner",
    "taskd.extras",
    "taskd.worker.state.data_order",
    # of the scripts under test; the first one compiles TorchScript for 0.3 s
    "torch.distributed.optim",
    "torch.distributed.tensor.parallel",
)
_START_S = 120  # torch from a cold disk on a loaded machine


class WarmProcess:
    """A process that the warm parent has forked; what tests use of subprocess.Popen."""

    def __init__(self, connection: socket.socket) -> None:
        message, descriptors, _, _ = socket.recv_fds(connection, 64, 1)
        if not descriptors:
            raise RuntimeError("the warm parent has ended")
        self.pid, (self.pidfd,) = int(message), descriptors
        self.returncode: int | None = None
        self._connection = connection

    def send_signal(self, number: int) -> None:
        """Signal it, unless it has ended."""
        if self.poll() is None:
            signal.pidfd_send_signal(self.pidfd, number)

    def wait(self, timeout: float | None = None) -> int:
        """The exit status, as Popen gives it."""
        if self.returncode is None:
            self._connection.settimeout(timeout)
            try:
                status = self._connection.recv(64)
            except TimeoutError:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0) from None
            if not status:
                raise RuntimeError("the warm parent has ended")
            self.returncode = int(status)
            self._connection.close()
        return self.returncode

    def poll(self) -> int | None:
        """The exit status if it has ended."""
        if self.returncode is None and select.select([self._connection], [], [], 0)[0]:
            self.wait()
        return self.returncode


class WarmParent:
    """The handle of the test process. Started at the first `start`."""

    def __init__(self, environment: dict[str, str], kind: str = "torchrun") -> None:
        """`environment`: of the parent. `kind`: "torchrun", or "manager", which has no torch."""
        self._base, self._kind = environment, kind
        self._process: subprocess.Popen[bytes] | None = None
        self._address = ""
        self._lock = threading.Lock()

    def start(
        self,
        arguments: list[str],
        env: dict[str, str],
        out: pathlib.Path,
        cwd: pathlib.Path,
        host: Host | None = None,
    ) -> WarmProcess:
        """Fork a process. `arguments`: of Python, `-m module …` or `script …`."""
        with self._lock:
            if self._process is None:
                self._launch()
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.settimeout(_START_S)
        connection.connect(self._address)
        request = {
            "arguments": arguments,
            "env": env,
            "out": str(out),
            "cwd": str(cwd),
            "host": None if host is None else [str(host.namespace), str(host.boot_id)],
        }
        connection.send(json.dumps(request).encode())
        return WarmProcess(connection)

    def can_start(self, env: dict[str, str]) -> bool:
        """Whether a fork sees what a fresh interpreter sees.

        Interpreter and libraries read these once, at their start.
        """
        return all(
            self._base.get(name) == env.get(name)
            for name in self._base.keys() | env.keys()
            if name.startswith(warmth.READ_AT_START) and not name.startswith("TORCHELASTIC")
        )

    def close(self) -> None:
        """End it. Processes that it has started are ended by those who asked for them."""
        if self._process is not None:
            self._life.close()
            self._process.wait(_START_S)
            self._process = None

    def _launch(self) -> None:
        self._address = f"\0taskd-test-{os.getpid()}-{id(self)}"
        ours, theirs = socket.socketpair()
        name = self._address[1:]
        command = [sys.executable, "-u", __file__, str(theirs.fileno()), name, self._kind]
        self._process = subprocess.Popen(
            [*command, "-" * 1024],
            env=self._base | {MARK_ENV: "-" * MARK_ROOM},
            pass_fds=[theirs.fileno()],
            start_new_session=True,
            stdin=subprocess.DEVNULL,
        )
        theirs.close()
        ours.settimeout(_START_S)
        assert ours.recv(16) == b"ready"
        atexit.register(self.close)
        self._life = ours  # when it closes, with this process at the latest, the parent ends


def _serve(descriptor: int, name: str) -> dict:
    """Answer requests until the tests have ended; returns in each child, with its request."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind("\0" + name)
    listener.listen(16)
    life = socket.socket(fileno=descriptor)
    life.send(b"ready")
    poll = select.poll()
    poll.register(life, select.POLLIN)
    poll.register(listener, select.POLLIN)
    children: dict[int, tuple[int, socket.socket]] = {}  # pidfd -> pid, who asked
    while True:
        for number, _ in poll.poll():
            if number == life.fileno():
                sys.exit(0)
            if number == listener.fileno():
                connection, _ = listener.accept()
                request = json.loads(connection.recv(1 << 20))
                pid = os.fork()
                if pid == 0:
                    life.close()
                    listener.close()
                    connection.close()
                    for pidfd, (_, other) in children.items():
                        os.close(pidfd)
                        other.close()
                    return request
                pidfd = os.pidfd_open(pid)
                socket.send_fds(connection, [str(pid).encode()], [pidfd])
                children[pidfd] = (pid, connection)
                poll.register(pidfd, select.POLLIN)
            else:
                pid, connection = children.pop(number)
                poll.unregister(number)
                os.close(number)
                status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                with contextlib.suppress(OSError):  # who asked has gone: nobody wants to know
                    connection.send(str(status).encode())
                connection.close()


def _become(request: dict) -> NoReturn:
    """Turn this fork into the process that was asked for."""
    os.setsid()
    if request["host"] is not None:
        hosts.enter(*request["host"])
    out = os.open(request["out"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.close(out)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    _write_mark(request["env"].get(MARK_ENV, "none"))
    libraries.free_what_is_counted()
    libraries.skip_inherited_destructors()
    arguments = request["arguments"]
    sys.orig_argv[:] = [sys.executable, "-u", *arguments]
    if arguments[0] == "-m":
        sys.argv[:] = arguments[1:]
        sys.path[0] = request["cwd"]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv[:] = arguments
        sys.path[0] = str(pathlib.Path(arguments[0]).parent)
        runpy.run_path(arguments[0], run_name="__main__")
    sys.exit(0)


def _write_mark(mark: str) -> None:
    """Put the mark of a job where /proc/PID/environ of this process and of its forks shows it."""
    wanted = mark.encode()
    assert len(wanted) <= MARK_ROOM, mark
    needle = f"{MARK_ENV}={'-' * MARK_ROOM}".encode()
    fields = stat_of(os.getpid())
    start, end = int(fields[47]), int(fields[48])  # env_start, env_end: fields 50 and 51 of proc(5)
    block = ctypes.string_at(start, end - start)
    place = block.index(needle) + len(MARK_ENV) + 1
    ctypes.memmove(start + place, wanted + b"\0" * (MARK_ROOM - len(wanted)), MARK_ROOM)


def _main() -> None:
    gc.disable()  # nearly all that imports make stays
    is_for_managers = sys.argv[3] == "manager"
    modules = _OF_A_MANAGER if is_for_managers else (*libraries.PRELOAD, *_OF_A_TORCHRUN)
    for name in modules:
        importlib.import_module(name)
    libraries.warm_optimizers()
    libraries.keep_operators()
    gc.collect()
    gc.freeze()  # collections in the children copy no pages then
    gc.enable()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    request = _serve(int(sys.argv[1]), sys.argv[2])
    _become(request)


if __name__ == "__main__":
    _main()
