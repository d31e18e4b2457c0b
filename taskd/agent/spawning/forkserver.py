"""The agent's handle on its forkserver, the warm, single-threaded parent of workers.

      agent ── SpawnRequest, descriptors ──►  forkserver (`server`) ── fork ──►  worker (`child`)
            ◄── Started, StartFailed, Exited ──  (reaps workers, and their orphans as subreaper)

It is forked from the torchrun process itself, where torch is already imported, or started as a
fresh interpreter. If it dies, the workers live on: the agent is subreaper, too. Owns the start and
the end of the forkserver, and the choice between the two ways to start it.
"""

import contextlib
import logging
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Sequence

import taskd
from taskd import streams
from taskd.agent.spawning import processes, server
from taskd.agent.spawning.protocol import (
    Forked,
    Imported,
    Note,
    PreloadedLost,
    Ready,
    Reply,
    SpawnRequest,
    Wire,
    reply_from,
    request_message,
)
from taskd.errors import ForkserverError

log = logging.getLogger(__name__)

# > server.TERM_TIMEOUT_S: time for the forkserver to end workers, and to take torch down
_CLOSE_TIMEOUT_S = 10.0
_SEND_TIMEOUT_S = 10  # one that is ready reads at once
_TITLE_ROOM = 1024  # bytes of command line kept free, for the titles of workers
# How torchrun is started: as a program, or as a module by `python -m`.
_TORCHRUN = ("/torchrun", "/torch/distributed/run.py", "/torch/distributed/launch.py")
_MODULES = ("torch.distributed.run", "torch.distributed.launch", "taskd.run")
# The same taskd as the agent's, whatever else is installed; then the search path of a program that
# knows nothing of it.
_MAIN = """import sys
sys.path[0:1] = [sys.argv[2]]
from taskd.agent.spawning.server import main
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
        self.fate = "is gone"  # what became of it, once it is not alive
        self.is_ready = False  # it has imported what it is to import, and answers at once
        self.imported: Imported | None = None  # by the first worker
        self._is_reaped = False

    @classmethod
    def start(
        cls, mode: str = "auto", preload: Sequence[str] = (), *, learns: bool = False
    ) -> "Forkserver":
        """Start one; returns at once, it preloads while the caller goes on.

        Args:
            mode: "fork" this process, "exec" a fresh interpreter, or "auto": fork where that is
                safe.
            preload: modules to import in addition to torch and what it loads lazily.
            learns: import for replacements what the first worker has imported (`preloading`).
        """
        processes.become_subreaper()
        reason = "asked for"
        if mode == "auto":
            obstacle = why_not_fork()
            mode, reason = (
                ("exec", obstacle)
                if obstacle
                else ("fork", "this process is torchrun alone, has one thread and no device")
            )
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        ours.setsockopt(
            socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", _SEND_TIMEOUT_S, 0)
        )
        names = ",".join((*preload, *([server.LEARN] if learns else [])))
        if mode == "fork":
            process: subprocess.Popen[bytes] | int = _fork(ours, theirs, names)
        else:
            process = _execute(theirs, names)
        theirs.close()
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
            if not isinstance(error, BrokenPipeError | ConnectionResetError):
                self.fate = f"does not take requests ({error.strerror}): it is killed"
            self.alive = False
            raise ForkserverError(
                f"the forkserver (pid {self.pid}) does not take requests: {error}"
            ) from error

    def read(self) -> list[Reply]:
        """What happened since the last call; never blocks.

        Sets `alive` to False when the forkserver is gone.
        """
        return self._receive() if self.alive else []

    def _receive(self) -> list[Reply]:
        replies: list[Reply] = []
        while messages := self._wire.receive(wait=False):
            for reply in (reply_from(message, descriptors) for message, descriptors in messages):
                match reply:
                    case Ready():
                        self.is_ready = True
                    case Note(text=text):
                        log.info("%s", text)
                    case PreloadedLost(reason=reason):
                        log.warning(
                            "the preloaded process %s: replacements import what the script imports",
                            reason,
                        )
                    case Imported():
                        self.imported = reply
                    case Forked():
                        pass  # between the forkserver and its preloaded process
                    case _:
                        replies.append(reply)
        if messages is None:
            self.alive = False
        return replies

    def kill(self) -> list[Reply]:
        """End it alone, at once: its workers become our children.

        It may be gone. Returns what it had said before.
        """
        if self._is_reaped:
            return []
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self._await_end(_CLOSE_TIMEOUT_S)
        said = self._receive()
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
    program = _other_program()
    if program is not None:
        return f"torchrun was called by {program}, and workers must have nothing of what that did"
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


def _other_program() -> str | None:
    """The program that calls torchrun in its own process; None: this is torchrun and nothing else.

    What it has set (types, seeds), opened (temporary folders, which its end deletes) and read (RANK
    by an import, where there is none yet) would be in each worker.
    """
    main = sys.modules["__main__"]
    spec, path = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    if spec is not None:  # of `python -m`
        return None if spec.name in _MODULES else f"python -m {spec.name}"
    if path is None:
        return "a program without a file"
    return None if os.path.abspath(path).endswith(_TORCHRUN) else str(path)


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
    streams.flush()  # else the copy prints it again
    pid = os.fork()
    if pid:
        return pid
    try:
        ours.close()
        os.setsid()
        # The first entry belongs to torchrun's own start; a worker gets its script's directory
        # instead.
        entries = sys.path if getattr(sys.flags, "safe_path", False) else sys.path[1:]
        server.serve(theirs, tuple(entries), preload)
    except BaseException:  # the top of a process: torchrun's own code must not run twice
        log.exception("the forkserver failed")
    finally:
        os._exit(1)


def _execute(theirs: socket.socket, preload: str) -> subprocess.Popen[bytes]:
    """If our working directory was removed, it imports elsewhere.

    MKL (torch 2.13) ends a process that loads it there.
    """
    directory = None if processes.has_directory() else os.open(".", os.O_PATH | os.O_DIRECTORY)
    root = os.path.dirname(os.path.abspath(taskd.__path__[0]))
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
        processes.close_all(passed[1:])
