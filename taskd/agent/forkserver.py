"""The warm, single-threaded parent of workers, and the agent's handle on it.

      agent ──spawn(request, descriptors)──►  forkserver ──fork──►  worker (taskd.agent.spawn)
            ◄──started, failed, exited──────  (reaps workers, and orphans of workers: it is their subreaper)

It is forked from the torchrun process itself, where torch is already imported, or started as a
fresh interpreter. It runs no user code (but the modules named in TASKD_PRELOAD), opens no device,
starts no thread, and ends when the agent's end of the connection closes, taking the workers along.
If it dies itself, the workers live on: the agent is subreaper too.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any, NoReturn

from taskd.agent import processes, spawn
from taskd.agent.spawn_protocol import (
    Exited,
    Ready,
    Reply,
    SpawnRequest,
    Started,
    StartFailed,
    Wire,
    reply_from,
    request_from,
    request_message,
)
from taskd.clock import MonotonicClock
from taskd.errors import ForkserverError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["Exited", "Forkserver", "SpawnRequest", "StartFailed", "Started"]

log = logging.getLogger(__name__)

# What torch imports lazily at the first optimizer, DDP or FSDP: without it a recovery took 2.4 s
# instead of 0.3 s.
PRELOAD = (
    "numpy",
    "torch",
    "torch.distributed",
    "torch._dynamo",
    "torch.nn.parallel",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "torch.utils.data",
    # What each worker imports of ours: 50 ms of a recovery.
    "taskd.worker.process.runtime",
    "taskd.worker.recoverable",
    "taskd.worker.restore.parking",
    "taskd.worker.train_state",
    "taskd.worker.state.phases",
)
# > _TERM_TIMEOUT_S: time for the forkserver to end workers, and to take torch down
_CLOSE_TIMEOUT_S = 10.0
_TERM_TIMEOUT_S = 5.0  # between SIGTERM and SIGKILL, as the guard in the worker does it
_SEND_TIMEOUT_S = 10  # one that is ready reads at once
_TITLE_ROOM = 1024  # bytes of command line kept free, for the titles of workers
# The same taskd as the agent's, whatever else is installed; then the search path of a program that
# knows nothing of it.
_MAIN = """import sys
sys.path[0:1] = [sys.argv[2]]
from taskd.agent.forkserver import main
sys.path[0:1] = []
sys.path.append(sys.argv[2]) if sys.argv[2] not in sys.path else None
main(int(sys.argv[1]), sys.argv[3], int(sys.argv[4]))"""


class Forkserver:
    """The agent's handle. Not for several threads."""

    def __init__(
        self, wire: Wire, process: subprocess.Popen[bytes] | int, mode: str, reason: str
    ) -> None:
        """Use `start`. `reason` says why this mode was chosen."""
        self._wire = wire
        self._process = process
        self.mode = mode
        self.reason = reason
        self.alive = True
        self.is_ready = False  # it has imported what it is to import, and answers at once
        self._is_reaped = False

    @classmethod
    def start(cls, mode: str = "auto", preload: Sequence[str] = ()) -> Forkserver:
        """Start one; returns at once, it preloads while the caller goes on.

        Args:
            mode: "fork" this process, "exec" a fresh interpreter, or "auto": fork where that is
                safe.
            preload: modules to import in addition to torch and what it loads lazily.
        """
        processes.become_subreaper()
        reason = "asked for"
        if mode == "auto":
            obstacle = why_not_fork()
            mode, reason = (
                ("exec", obstacle)
                if obstacle
                else ("fork", "this process has one thread and no device")
            )
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        ours.setsockopt(
            socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", _SEND_TIMEOUT_S, 0)
        )
        names = ",".join(preload)
        if mode == "fork":
            process: subprocess.Popen[bytes] | int = _fork(ours, theirs, names)
        else:
            process = _execute(theirs, names)
        theirs.close()
        log.info("forkserver started by %s: %s", mode, reason)
        return cls(Wire(ours), process, mode, reason)

    @property
    def pid(self) -> int:
        """Process id of the forkserver."""
        return self._process if isinstance(self._process, int) else self._process.pid

    @property
    def fd(self) -> int:
        """Readable when `read` has something to say."""
        return self._wire.fileno()

    def spawn(self, request: SpawnRequest) -> None:
        """Ask for a worker; `Started` or `StartFailed` follows from `read`."""
        message, descriptors = request_message(request)
        try:
            self._wire.send(message, descriptors)
        except OSError as error:
            self.alive = False
            raise ForkserverError(
                f"the forkserver (pid {self.pid}) does not take requests: {error}"
            ) from error

    def read(self) -> list[Reply]:
        """What happened since the last call; never blocks.

        Sets `alive` to False when the forkserver is gone.
        """
        if not self.alive:
            return []
        replies: list[Reply] = []
        while messages := self._wire.receive(wait=False):
            for reply in (reply_from(message, descriptors) for message, descriptors in messages):
                if isinstance(reply, Ready):
                    self.is_ready = True
                else:
                    replies.append(reply)
        if messages is None:
            self.alive = False
        return replies

    def kill(self) -> list[Reply]:
        """End it alone, at once: its workers become our children.

        Returns what it had said before.
        """
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self._await_end(_CLOSE_TIMEOUT_S)
        said = self.read()
        self.close()
        return said

    def close(self) -> None:
        """End it, and with it every worker that still lives. Returns when it is gone.

        Twice is once.
        """
        self._wire.close()
        self.alive = False
        if self._is_reaped:
            return
        with contextlib.suppress(ProcessLookupError):
            # While it imports it has no workers, and does not see that we are gone. If it was
            # stopped, it has to go on for that.
            os.kill(self.pid, signal.SIGCONT if self.is_ready else signal.SIGKILL)
        self._await_end(_CLOSE_TIMEOUT_S)

    def _await_end(self, timeout_s: float) -> None:
        if self._is_reaped:
            return
        self._is_reaped = True
        if isinstance(self._process, int):
            _wait_or_kill(self._process, timeout_s)
            return
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _wait_or_kill(pid: int, timeout_s: float) -> None:
    try:
        descriptor = os.pidfd_open(pid)
        if not select.select([descriptor], [], [], timeout_s)[0]:
            os.kill(pid, signal.SIGKILL)
        os.close(descriptor)
        os.waitpid(pid, 0)
    except (ProcessLookupError, ChildProcessError):
        pass  # somebody else has reaped it: gone is gone


def why_not_fork() -> str | None:
    """Why this process must not be forked to make workers of it; None if it may."""
    options = _interpreter_options()
    if options:
        return (
            f"this interpreter runs with {' '.join(options)}, which torchrun does not hand on "
            "to workers"
        )
    devices = processes.device_files()
    if devices:
        return f"this process holds {devices[0]}"
    if threading.current_thread() is not threading.main_thread() or threading.active_count() > 1:
        return "this process has Python threads"
    threads = processes.settle_threads()
    return f"this process has {threads} threads" if threads > 1 else None


def _interpreter_options() -> list[str]:
    """Options of this interpreter's command line that change how Python behaves.

    Those from the environment are inherited.
    """
    options = []
    for argument in sys.orig_argv[1:]:
        if not argument.startswith("-") or argument[:2] in ("-m", "-c"):
            break
        if argument != "-u":
            options.append(argument)
    return options


def _fork(ours: socket.socket, theirs: socket.socket, preload: str) -> int:
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        if stream is not None:
            stream.flush()  # else the copy prints it again
    pid = os.fork()
    if pid:
        return pid
    try:
        ours.close()
        os.setsid()
        # The first entry belongs to torchrun's own start; a worker gets its script's directory
        # instead.
        entries = sys.path if getattr(sys.flags, "safe_path", False) else sys.path[1:]
        _serve(theirs, tuple(entries), preload)
    except BaseException:  # the top of a process: torchrun's own code must not run twice
        log.exception("the forkserver failed")
    finally:
        os._exit(1)


def _execute(theirs: socket.socket, preload: str) -> subprocess.Popen[bytes]:
    """If our working directory was removed, it imports elsewhere.

    MKL (torch 2.13) ends a process that loads it there.
    """
    directory = None if processes.has_directory() else os.open(".", os.O_PATH | os.O_DIRECTORY)
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    command = [
        sys.executable,
        "-u",
        "-c",
        _MAIN,
        str(theirs.fileno()),
        root,
        preload,
        str(-1 if directory is None else directory),
        "-" * _TITLE_ROOM,
    ]
    passed = [theirs.fileno(), *([] if directory is None else [directory])]
    try:
        return subprocess.Popen(
            command, pass_fds=passed, start_new_session=True, cwd=None if directory is None else "/"
        )
    finally:
        _close_all(passed[1:])


def main(descriptor: int, preload: str, directory: int) -> NoReturn:
    """Entry of a forkserver that is a fresh interpreter.

    `directory`: where it is to work, -1 if it is there.
    """
    connection = socket.socket(fileno=descriptor)
    connection.set_inheritable(False)
    _serve(connection, tuple(sys.path), preload, directory)


def _serve(
    connection: socket.socket, search_path: tuple[str, ...], preload: str, directory: int = -1
) -> NoReturn:
    server = _Server(Wire(connection), spawn.Baseline(search_path, spawn.initial_environment()))
    server.prepare([name for name in preload.split(",") if name])
    if directory >= 0:
        os.fchdir(directory)
        os.close(directory)
    server.ready()
    server.loop()
    server.end()
    os._exit(0)


class _Server:
    """The forkserver process."""

    def __init__(self, wire: Wire, baseline: spawn.Baseline) -> None:
        self._wire = wire
        self._baseline = baseline
        self._tokens: dict[int, int] = {}  # pid of a live worker -> token
        self._blas: dict[str, int] = {}  # OpenBLAS libraries and the threads that they would use
        self._cold_reason: str | None = None  # why no worker may be forked warm
        self._wake_read, self._wake_write = socket.socketpair()

    def prepare(self, extra: Iterable[str]) -> None:
        """Become a quiet process, import, and freeze what is there so that collections do not copy pages."""
        processes.become_subreaper()
        processes.set_title(["taskd-forkserver"])
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            # torchrun gets them too and decides; we end when it closes
            signal.signal(number, signal.SIG_IGN)
        for end in (self._wake_read, self._wake_write):
            end.setblocking(False)
        signal.set_wakeup_fd(self._wake_write.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        for name in (*PRELOAD, *extra):
            _preload(name)
        _warm_optimizers()
        self._blas = spawn.quiet_blas()
        threads = processes.settle_threads()
        devices = processes.device_files()
        if threads > 1 or devices:
            self._cold_reason = (
                f"after preloading, the forkserver has {threads} threads and "
                "holds "
                f"{devices or 'no device'}"
            )
            log.warning("%s: workers are started as fresh interpreters", self._cold_reason)
        gc.collect()
        gc.freeze()

    def ready(self) -> None:
        """From now on every request is answered at once."""
        self._reply({"reply": "ready"})

    def loop(self) -> None:
        """Serve until the agent is gone."""
        poll = select.poll()
        poll.register(self._wire.fileno(), select.POLLIN)
        poll.register(self._wake_read.fileno(), select.POLLIN)
        while True:
            ready = {descriptor for descriptor, _ in poll.poll()}
            if self._wake_read.fileno() in ready:
                with contextlib.suppress(BlockingIOError):
                    self._wake_read.recv(4096)
                self._reap()
            if self._wire.fileno() in ready:
                messages = self._wire.receive(wait=True)
                if messages is None:
                    return
                for message, descriptors in messages:
                    self._answer(message, descriptors)

    def _answer(self, message: dict[str, Any], descriptors: list[int]) -> None:
        """One request, one answer."""
        try:
            request = request_from(message, descriptors)
            note = self._cold_reason or spawn.why_not_warm(request, self._baseline)
            self._spawn(request, note)
        except (OSError, ForkserverError) as error:
            self._reply({"reply": "failed", "token": message["token"], "error": str(error)})
        finally:
            _close_all(descriptors)

    def _spawn(self, request: SpawnRequest, note: str | None) -> None:
        """The worker begins when its start has been told, and ends if that never happens.

        Signals that it gets before it has their dispositions wait for those.
        """
        gate_read, gate_write = os.pipe()
        try:
            former = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
            try:
                pid = os.fork()
                if pid == 0:
                    self._become(request, gate_read, gate_write, warm=note is None)
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, former)
            pidfd = os.pidfd_open(pid)
            try:
                self._reply(
                    {"reply": "started", "token": request.token, "pid": pid, "note": note}, (pidfd,)
                )
            finally:
                os.close(pidfd)
            self._tokens[pid] = request.token
            os.write(gate_write, b".")
        finally:
            _close_all((gate_read, gate_write))

    def _become(
        self, request: SpawnRequest, gate_read: int, gate_write: int, *, warm: bool
    ) -> NoReturn:
        try:
            os.setsid()
            os.close(gate_write)
            if not os.read(gate_read, 1):
                os._exit(1)  # nobody knows that we are there
            # Their numbers are closed below and may be given out again: these objects must not
            # close them later.
            self._wire.detach()
            self._wake_read.detach()
            self._wake_write.detach()
            spawn.become(request, self._baseline, self._blas, warm=warm)
        except BaseException:  # the top of a process: it must not go on as a second forkserver
            log.exception("a worker could not be started")
        finally:
            os._exit(1)

    def _reap(self) -> None:
        while True:
            try:
                found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if found is None:
                return
            token = self._tokens.pop(found.si_pid, None)
            if token is not None:
                # Before the number is free again: nothing of the worker (data loaders) may outlive
                # it.
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(found.si_pid, signal.SIGKILL)
            os.waitpid(found.si_pid, 0)
            if token is not None:
                self._reply(
                    {
                        "reply": "exited",
                        "token": token,
                        "pid": found.si_pid,
                        "status": processes.status_of(found),
                    }
                )

    def _reply(self, message: dict[str, Any], descriptors: tuple[int, ...] = ()) -> None:
        # the next read sees the end
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._wire.send(message, descriptors)

    def end(self) -> None:
        """The agent is gone: end the workers that still live."""
        clock = MonotonicClock()
        for number, timeout_s in (
            (signal.SIGTERM, _TERM_TIMEOUT_S),
            (signal.SIGKILL, _TERM_TIMEOUT_S),
        ):
            for pid in sorted(self._tokens):
                processes.signal_group(pid, number)
            deadline = clock.now() + timeout_s
            while self._tokens and clock.now() < deadline:
                select.select([self._wake_read], [], [], max(0.0, deadline - clock.now()))
                with contextlib.suppress(BlockingIOError):
                    self._wake_read.recv(4096)
                self._reap()


def _close_all(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _preload(name: str) -> None:
    try:
        importlib.import_module(name)
    except Exception as error:  # noqa: BLE001
        if name != "numpy":
            log.warning(
                "the forkserver could not preload %s: %s: %s", name, type(error).__name__, error
            )


def _warm_optimizers() -> None:
    """Take the first step of the usual optimizers.

    What they import lazily, workers find imported.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return
    for name in ("SGD", "Adam", "AdamW"):
        parameter = torch.nn.Parameter(torch.zeros(2))
        parameter.grad = torch.zeros(2)
        getattr(torch.optim, name)([parameter], lr=0.1).step()
