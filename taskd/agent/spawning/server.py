"""The forkserver process: forks workers, reaps them, and tells the agent.

Owns the warm, single-threaded process itself. It runs no user code (but the modules named in
TASKD_PRELOAD), opens no device, starts no thread, and ends when the agent's end of the connection
closes, taking the workers along. `taskd.agent.spawning.forkserver` starts it.
"""

import contextlib
import gc
import logging
import os
import select
import signal
import socket
import sys
from collections.abc import Iterable
from typing import Any, NoReturn

from taskd.agent.spawning import child, libraries, processes, program, warmth
from taskd.agent.spawning.preloading import Preloaded, Report, Setting, imported, told
from taskd.agent.spawning.protocol import (
    Exited,
    Imported,
    Note,
    PreloadedLost,
    Ready,
    SpawnRequest,
    Started,
    StartFailed,
    Wire,
    Word,
    reply_message,
    request_from,
)
from taskd.clock import MonotonicClock
from taskd.errors import ForkserverError

log = logging.getLogger(__name__)

LEARN = "*"  # among the names of modules: import for replacements what the first worker imports
_ENDED_S = 1.0  # for processes that waited to become workers, and end by themselves
TERM_TIMEOUT_S = 5.0  # between SIGTERM and SIGKILL, as the guard in the worker does it


def main(descriptor: int, preload: str, directory: int) -> NoReturn:
    """Be a forkserver in a fresh interpreter: `descriptor` is its connection, see `serve`."""
    connection = socket.socket(fileno=descriptor)
    connection.set_inheritable(False)
    serve(connection, tuple(sys.path), preload, directory)


def serve(
    connection: socket.socket, search_path: tuple[str, ...], preload: str, directory: int = -1
) -> NoReturn:
    """Be the forkserver until the agent is gone. Never returns.

    Args:
        connection: to the agent.
        search_path: `sys.path` of its workers, behind the entry of their script's directory.
        preload: modules to import besides the usual, separated by commas; LEARN.
        directory: descriptor of the directory to work in, -1: this process is in it.
    """
    server = _Server(Wire(connection), search_path)
    names = [name for name in preload.split(",") if name]
    server.learns = LEARN in names
    server.prepare([name for name in names if name != LEARN])
    if directory >= 0:
        os.fchdir(directory)
        os.close(directory)
    server.ready()
    server.loop()
    server.end()
    os._exit(0)


class _Server:
    """The forkserver process."""

    def __init__(self, wire: Wire, search_path: tuple[str, ...]) -> None:
        self._wire = wire
        self._search_path = search_path
        self._environment = warmth.initial_environment()
        self._tokens: dict[int, int] = {}  # pid of a live worker -> token
        self._blas: dict[str, int] = {}  # OpenBLAS libraries and the threads that they would use
        self._cold_reason: str | None = None  # why no worker may be forked warm
        self._wake_read, self._wake_write = socket.socketpair()
        self.learns = False
        self._report: Report | None = None  # awaited
        self._preloaded: Preloaded | None = None

    def prepare(self, extra: Iterable[str]) -> None:
        """Become a quiet process, import, and freeze what is there.

        What is frozen is left alone by collections, which would copy its pages in each worker.
        """
        processes.become_subreaper()
        processes.set_title(["taskd-forkserver"])
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            # torchrun gets them too and decides; we end when it closes
            signal.signal(number, signal.SIG_IGN)
        for end in (self._wake_read, self._wake_write):
            end.setblocking(False)
        signal.set_wakeup_fd(self._wake_write.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        libraries.preload(extra)
        self._blas = libraries.quiet_blas()
        threads = processes.settle_threads()
        devices = processes.device_files()
        if threads > 1 or devices:
            self._cold_reason = (
                f"after preloading, the forkserver has {threads} threads and holds "
                f"{devices or 'no device'}"
            )
            log.warning("%s: workers are started as fresh interpreters", self._cold_reason)
        libraries.free_what_is_counted()
        libraries.keep_operators()
        program.prepare_forks()
        gc.collect()
        gc.freeze()

    def ready(self) -> None:
        """From now on every request is answered at once."""
        self._reply(Ready())

    def loop(self) -> None:
        """Serve until the agent is gone."""
        while True:
            poll = select.poll()
            for source in (self._wire.fileno(), self._wake_read.fileno(), *self._preload_fds()):
                poll.register(source, select.POLLIN)
            ready = {descriptor for descriptor, _ in poll.poll()}
            if self._wake_read.fileno() in ready:
                self._reap()
            if not ready.isdisjoint(self._preload_fds()):
                self._follow_preloading()
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
            if request.kind == "preload":
                self._preload_as_told(request)
                return
            note = self._cold_reason or warmth.why_not_warm(request, self._environment)
            if self.learns and note is None and request.worker and not request.worker.get("plain"):
                self._ask_for_report(request)
            self._spawn(request, note)
        except (OSError, ForkserverError) as error:
            self._reply(StartFailed(message["token"], str(error)))
        finally:
            processes.close_all(descriptors)
            if self._report is not None:
                self._report.hand_over()

    def _spawn(self, request: SpawnRequest, note: str | None) -> None:
        """The worker begins when its start has been told, and ends if that never happens.

        Signals that it gets before it has their dispositions wait for those.
        """
        found = self._fork_preloaded(request) if note is None else None
        pid, gate = found or self._fork(request, warm=note is None)
        try:
            pidfd = os.pidfd_open(pid)
            try:
                self._reply(Started(request.token, pid, pidfd, note))
            finally:
                os.close(pidfd)
            self._tokens[pid] = request.token
            os.write(gate, b".")
        finally:
            os.close(gate)

    def _fork(self, request: SpawnRequest, *, warm: bool) -> tuple[int, int]:
        """The process id, and the end of its gate at which it is told to begin. Raises OSError."""
        gate_read, gate_write = os.pipe()
        former = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            pid = os.fork()
            if pid == 0:
                self._become(request, gate_read, gate_write, warm=warm)
        except OSError:
            os.close(gate_write)
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, former)
            os.close(gate_read)
        return pid, gate_write

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
            child.become(request, self._search_path, self._blas, warm=warm)
        except BaseException:  # the top of a process: it must not go on as a second forkserver
            log.exception("a worker could not be started")
        finally:
            os._exit(1)

    def _reap(self) -> bool:
        """Take what woke us, and every child that has ended. Whether there are others."""
        with contextlib.suppress(BlockingIOError):
            self._wake_read.recv(4096)
        while True:
            try:
                found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return False
            if found is None:
                return True
            token = self._tokens.pop(found.si_pid, None)
            if token is not None:
                # Before the number is free again: nothing of the worker (data loaders) may outlive
                # it.
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(found.si_pid, signal.SIGKILL)
            if self._preloaded is not None and found.si_pid == self._preloaded.pid:
                self._lose_preloaded()
                continue
            os.waitpid(found.si_pid, 0)
            if token is not None:
                self._reply(Exited(token, found.si_pid, processes.status_of(found)))

    # ------------------------------------------------------------------ the preloaded process

    def _preload_fds(self) -> list[int]:
        return [part.fd for part in (self._report, self._preloaded) if part is not None]

    def _ask_for_report(self, request: SpawnRequest) -> None:
        """The worker says later what it has imported, if nobody has yet."""
        if self._report is None and self._preloaded is None:
            with contextlib.suppress(OSError):  # no descriptors are left: it starts all the same
                self._report = Report(request)
                request.fds["imports"] = self._report.writer

    def _follow_preloading(self) -> None:
        if self._preloaded is not None:
            notes = self._preloaded.read()
            if notes is None:
                self._lose_preloaded()
            for note in notes or ():
                self._reply(note)
        elif self._report is not None:
            try:
                self._begin_preloading(self._report)
            except (OSError, ValueError) as error:
                self.learns = False
                self._forget_report()
                self._reply(PreloadedLost(f"could not be started ({error})"))

    def _begin_preloading(self, report: Report) -> None:
        found = report.read()
        if found is None:
            return
        self._forget_report()
        if found:  # else the worker ended too early: the next one is asked
            self._preloaded = Preloaded(report.request, found, self._setting)
            self._reply(imported(report.request, found))

    @property
    def _setting(self) -> Setting:
        return Setting(self._search_path, self._environment, self._blas)

    def _preload_as_told(self, request: SpawnRequest) -> None:
        """By what a worker of another node has imported: this one has none yet. Raises OSError."""
        is_begun = self._report is not None or self._preloaded is not None
        report = told(request, self._search_path)
        if report is None or is_begun or not self.learns or self._cold_reason is not None:
            return
        self._preloaded = Preloaded(request, report, self._setting)
        names = [name for name, _ in report["modules"]]
        self._reply(Imported(names, list(request.own)))  # another manager may not know it

    def _forget_report(self) -> None:
        if self._report is not None:
            self._report.close()
        self._report = None

    def _fork_preloaded(self, request: SpawnRequest) -> tuple[int, int] | None:
        """As `_fork`. None: there is no such process, or it cannot.

        The gate is of no other use then: one that it forked, and could not tell of, may wait there,
        and ends as nobody will tell it to begin.
        """
        if self._preloaded is None or not self._preloaded.is_ready:
            return None
        gate_read, gate_write = os.pipe()
        found: int | str | None = None
        try:
            found = self._preloaded.fork(request, gate_read, self._reply)
        except OSError as error:
            self._lose_preloaded(str(error))
        finally:
            os.close(gate_read)
            if not isinstance(found, int):
                os.close(gate_write)
        if isinstance(found, int):
            return found, gate_write
        if found is not None:
            self._reply(Note(f"a replacement is not forked from the preloaded process: {found}"))
        return None

    def _lose_preloaded(self, reason: str | None = None) -> None:
        """It has ended, or is of no use. Once is enough: there is no other one."""
        assert self._preloaded is not None
        status = self._preloaded.close()
        self._preloaded, self.learns = None, False
        if status != 0:
            ended = f"has ended ({processes.describe_status(status)})"
            self._reply(PreloadedLost(reason or ended))

    def _reply(self, reply: Word) -> None:
        # the next read sees the end
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._wire.send(*reply_message(reply))

    def end(self) -> None:
        """The agent is gone: end the workers that still live."""
        if self._preloaded is not None:
            self._preloaded.close()
        clock = MonotonicClock()
        for number in (signal.SIGTERM, signal.SIGKILL):
            for pid in sorted(self._tokens):
                processes.signal_group(pid, number)
            deadline = clock.now() + TERM_TIMEOUT_S
            while self._tokens and clock.now() < deadline:
                self._await_child(deadline - clock.now())
                self._reap()
        deadline = clock.now() + _ENDED_S
        while self._reap() and clock.now() < deadline:
            self._await_child(deadline - clock.now())

    def _await_child(self, timeout_s: float) -> None:
        select.select([self._wake_read], [], [], max(0.0, timeout_s))
