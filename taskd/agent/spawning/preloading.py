"""The preloaded process: a fork of the forkserver that has imported what the script imports, too.

      worker ── its modules, after its first step ──►  forkserver ── fork ──►  preloaded process
                                                           ├── fork of me ──►    └── trial (thrown
      replacement  ◄── fork, as a child of the forkserver ─┘                          away)

Owns that process, both ends of the connection to it, and what it imports: everything that a worker
had imported at its first optimizer step, but not the script's own modules, nor what may not be
imported for others (`taskd.agent.spawning.trial`). The forkserver itself stays as it is. It asks
here for workers once all is imported, is the parent of what comes, and forks them itself if nothing
does. So the preloaded process may crash, hang or be killed at any time: a start takes longer then.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import itertools
import json
import logging
import os
import select
import signal
import socket
import struct
import sys
import types
import zlib
from dataclasses import dataclass, replace
from fcntl import F_SETPIPE_SZ, fcntl
from typing import TYPE_CHECKING, Any, NoReturn

from taskd.agent.spawning import child, libraries, processes, program, warmth
from taskd.agent.spawning.protocol import (
    Forked,
    Imported,
    Note,
    Ready,
    SpawnRequest,
    StartFailed,
    Wire,
    packed,
    reply_from,
    reply_message,
    request_from,
    request_message,
    unpacked,
)
from taskd.agent.spawning.standby import Standbys, fork_for_parent
from taskd.agent.spawning.trial import Own, Trial, change_of_torch
from taskd.clock import MonotonicClock

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger(__name__)

# What no import needs, and a hung one has exceeded: it costs nobody anything meanwhile.
TRIAL_S = 300.0
# A tenth of the processor time of a training process that wants the same core (sched(7)).
_TRIAL_NICENESS = 10
# An import that trains nobody must not take a core from those who do: the process rests three times
# as long as it has worked. (A niceness would go on to the workers, which may not lower it.)
_REST = 3.0
_RECOVERY_S = 1.0  # after a worker was needed: until the next one is forked beforehand
_AGAIN_S = 600.0  # after none could be
_ANSWER_S = 3.0  # a fork takes milliseconds; then the forkserver does it itself
_PIPE_BYTES = 1 << 20  # what an unprivileged process may ask for; a report has some 30 KB
_LENGTH = struct.Struct(">I")
_SHOWN = 20  # modules that a log line names
_TOLD_CHARACTERS = 100_000  # of names: 4,000 modules; a message may have 256 KiB


class Report:
    """The forkserver's end of the pipe on which the first worker says what it has imported."""

    def __init__(self, request: SpawnRequest) -> None:
        """`request`: of that worker, which gets `writer`."""
        self.request = request
        self.fd, self.writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        with contextlib.suppress(OSError):
            fcntl(self.writer, F_SETPIPE_SZ, _PIPE_BYTES)
        self._data = bytearray()

    def read(self) -> dict[str, Any] | None:
        """What it said, empty if it ended before; None: it has not said all yet.

        Raises ValueError if that makes no sense.
        """
        data = os.read(self.fd, _PIPE_BYTES)
        self._data += data
        if len(self._data) >= _LENGTH.size:
            length = _LENGTH.unpack_from(self._data)[0]
            if len(self._data) >= _LENGTH.size + length:
                try:
                    text = zlib.decompress(self._data[_LENGTH.size : _LENGTH.size + length])
                except zlib.error as error:
                    raise ValueError(str(error)) from error
                found: dict[str, Any] = json.loads(text)
                return found
        return None if data else {}

    def hand_over(self) -> None:
        """The worker has the other end. Twice is once."""
        processes.close_all([self.writer])
        self.writer = -1

    def close(self) -> None:
        """Twice is once."""
        processes.close_all((self.fd, self.writer))
        self.fd = self.writer = -1


@dataclass(frozen=True)
class Setting:
    """What the preloaded process has of the forkserver."""

    search_path: tuple[str, ...]
    environment: dict[str, str]  # as the forkserver was executed with
    blas: dict[str, int]


class Preloaded:
    """The forkserver's handle on it."""

    def __init__(self, request: SpawnRequest, report: dict[str, Any], setting: Setting) -> None:
        """Fork it. Raises OSError."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self.is_ready = False
        try:
            self.pid = os.fork()
        except OSError:
            ours.close()
            theirs.close()
            raise
        if self.pid == 0:
            try:
                _Process(theirs, request, report, setting).run()
            except BaseException:  # the top of a process
                log.exception("the preloaded process failed")
            finally:
                os._exit(1)
        theirs.close()
        self._wire = Wire(ours)

    @property
    def fd(self) -> int:
        """Readable when `read` has something to say."""
        return self._wire.fileno()

    def read(self) -> list[Note] | None:
        """What is to be logged; None: it is gone."""
        messages = self._wire.receive(wait=False)
        if messages is None:
            return None
        replies = [reply_from(*message) for message in messages]
        self.is_ready = self.is_ready or any(isinstance(reply, Ready) for reply in replies)
        return [reply for reply in replies if isinstance(reply, Note)]

    def fork(self, request: SpawnRequest, gate: int, note: Callable[[Note], object]) -> int | str:
        """The process id of a worker, which is the caller's child and waits at `gate`.

        Or why there is none; it is the caller's turn then. `note` gets what is to be logged, which
        the process may have said just before. Raises OSError or `TimeoutError`: this process is of
        no use any more, and may have forked a worker that waits at `gate`.
        """
        message, descriptors = request_message(replace(request, fds={**request.fds, "gate": gate}))
        self._wire.send(message, descriptors)
        clock = MonotonicClock()
        until = clock.now() + _ANSWER_S
        found: int | str | None = None
        while found is None:
            if not select.select([self.fd], [], [], max(0.0, until - clock.now()))[0]:
                raise TimeoutError(f"has not answered for {_ANSWER_S:.0f} s")
            answers = self._wire.receive(wait=True)
            if answers is None:
                raise ConnectionResetError("has ended")
            for answer in answers:
                match reply_from(*answer):
                    case Forked(token=request.token, pid=pid):
                        found = pid
                    case StartFailed(token=request.token, error=error):
                        found = error
                    case Note() as said:
                        note(said)
        return found

    def close(self) -> int:
        """End it, if it has not ended; its forks live on. Returns its status."""
        self._wire.close()
        os.kill(self.pid, signal.SIGKILL)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


class _Process:
    """The preloaded process itself."""

    def __init__(
        self,
        connection: socket.socket,
        request: SpawnRequest,
        report: dict[str, Any],
        setting: Setting,
    ) -> None:
        processes.end_with_parent()
        processes.set_title(["taskd-preloaded"])
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        child.keep_only((connection.fileno(),))
        self._wire = Wire(connection)
        self._setting = setting
        self._clock = MonotonicClock()
        self._report = report
        self._blas = setting.blas
        parsed = program.parse(request.argv)
        assert parsed is not None  # it was started by a fork
        self._program = parsed
        self._folder = program.folder_of(parsed)
        self._threads_wanted = request.env.get("OMP_NUM_THREADS")
        self._own = frozenset(request.own)
        self._left_out: dict[str, str] = {}
        self._standbys = Standbys(int(request.env.get("LOCAL_WORLD_SIZE", "1")), self._become)

    def run(self) -> NoReturn:
        """Import, then fork for the forkserver until that is gone."""
        began, names = self._clock.now(), self._wanted()
        if names:
            with self._as_in_a_worker():
                count = self._import_all(names)
            self._become_quiet()
            self._tell(count, self._clock.now() - began)
            self._serve()
        os._exit(0)

    def _wanted(self) -> list[str]:
        """In the order of the worker, each package before its modules: it is judged by itself."""
        names = [
            ".".join(name.split(".")[:depth])
            for name in foreign_modules(self._program, self._report)
            for depth in range(1, name.count(".") + 2)
        ]
        return [name for name in dict.fromkeys(names) if name not in sys.modules]

    @contextlib.contextmanager
    def _as_in_a_worker(self) -> Any:
        """Search path, arguments, environment as a worker's; output goes nowhere."""
        saved = [os.dup(number) for number in (1, 2)]
        with open(os.devnull, "wb") as nowhere:
            for number in (1, 2):
                os.dup2(nowhere.fileno(), number)
        child.fresh_streams()
        path, argv, main = list(sys.path), list(sys.argv), sys.modules["__main__"]
        sys.path[:] = self._report["path"]
        sys.argv[:] = [self._program.target, *self._program.arguments]
        stand_in = types.ModuleType("__main__")
        stand_in.__file__ = os.path.abspath(self._program.target)
        sys.modules["__main__"] = stand_in
        if self._threads_wanted is not None:
            os.environ["OMP_NUM_THREADS"] = self._threads_wanted
        try:
            yield
        finally:
            sys.path[:], sys.argv[:], sys.modules["__main__"] = path, argv, main
            for number, former in zip((1, 2), saved, strict=True):
                os.dup2(former, number)
            processes.close_all(saved)

    def _import_all(self, names: list[str]) -> int:
        """What a trial has shown to be harmless. Returns how many modules that are."""
        before = len(sys.modules)
        while names:
            tried, reason = _throw_away(len(names), functools.partial(self._try, names))
            for name in names[:tried]:
                self._import(name)
            if reason is not None and self._is_end(names[tried], reason):
                break
            names = [name for name in names[tried + 1 :] if self._may_be_tried(name)]
        return len(sys.modules) - before

    def _is_end(self, name: str, reason: str) -> bool:
        """Note what is left out. Whether it changes torch: later modules may take that over."""
        self._left_out[name] = reason
        _, change = _throw_away(1, functools.partial(self._look_at, name))
        if change is not None:
            self._left_out[name] += f" and {change}: what comes behind it is left out"
        return change is not None

    def _try(self, names: list[str], connection: socket.socket) -> NoReturn:
        theirs, ours = self._report["environment"], dict(os.environ)
        differing = {name for name in theirs.keys() | ours if theirs.get(name) != ours.get(name)}
        # torchrun's own environment may have a RANK, that of its pod, and rank 0 has the same
        Trial(connection, differing | self._own, Own(self._folder)).run(names)

    def _look_at(self, name: str, connection: socket.socket) -> None:
        os.environ.update(self._report["environment"])
        connection.send(packed([1, change_of_torch(name)]))

    def _may_be_tried(self, name: str) -> bool:
        parents = name.split(".")
        return name not in sys.modules and not any(
            ".".join(parents[:count]) in self._left_out for count in range(1, len(parents))
        )

    def _import(self, name: str) -> None:
        """One that fails has failed in the trial, too: it cannot be imported alone."""
        began = self._clock.now()
        with contextlib.suppress(Exception):
            importlib.import_module(name)
        select.select([self._wire], [], [], _REST * (self._clock.now() - began))

    def _become_quiet(self) -> None:
        self._blas = {**libraries.quiet_blas(), **self._setting.blas}
        threads = processes.settle_threads()
        if threads > 1:
            raise RuntimeError(f"{threads} threads after the imports, though none in the trial")
        libraries.free_what_is_counted()
        libraries.keep_operators()
        program.prepare_forks()
        gc.collect()
        gc.freeze()

    def _tell(self, count: int, elapsed_s: float) -> None:
        reasons = [f"{name} {reason}" for name, reason in self._left_out.items()]
        more = f" and {len(reasons) - _SHOWN} more" if len(reasons) > _SHOWN else ""
        left_out = f"; left out: {', '.join(reasons[:_SHOWN])}{more}" if reasons else ""
        self._say(Ready())  # before the line that promises it
        self._say(
            Note(
                f"{count} modules of {self._program.target} are preloaded after {elapsed_s:.1f} s, "
                f"replacements start with them{left_out}"
            )
        )

    def _say(self, reply: Note | Ready | Forked | StartFailed) -> None:
        self._wire.send(*reply_message(reply))

    def _serve(self) -> None:
        """Recoveries have the processors first: a fork takes its time from those who train."""
        rest_s = 0.0
        while True:
            wait_s = None if self._standbys.is_full else rest_s
            if not select.select([self._wire], [], [], wait_s)[0]:
                rest_s = self._fork_beforehand()
                continue
            messages = self._wire.receive(wait=True)
            if messages is None:
                return
            for message, descriptors in messages:
                self._answer(request_from(message, descriptors))
            rest_s = _RECOVERY_S

    def _fork_beforehand(self) -> float:
        """One more. Returns after how many seconds the next one may be."""
        began = self._clock.now()
        try:
            self._standbys.add()
        except (
            OSError
        ) as error:  # no process, no descriptor, no memory: they are forked when needed
            self._say(Note(f"no process can be forked beforehand: {error}"))
            return _AGAIN_S
        return _REST * (self._clock.now() - began)

    def _answer(self, request: SpawnRequest) -> None:
        gate = request.fds.pop("gate")
        try:
            reason = warmth.why_not_warm(request, self._setting.environment)
            if reason is not None:
                self._say(StartFailed(request.token, reason))
                return
            pid = self._standbys.start(request, gate)
            if pid is None:
                pid = fork_for_parent(lambda: self._begin(request, gate))
            self._say(Forked(request.token, pid))
        except OSError as error:
            self._say(StartFailed(request.token, str(error)))
        finally:
            processes.close_all((gate, *request.fds.values()))

    def _begin(self, request: SpawnRequest, gate: int) -> NoReturn:
        if os.read(gate, 1):
            self._become(request)
        os._exit(1)

    def _become(self, request: SpawnRequest) -> NoReturn:
        self._wire.detach()  # closed by its number
        self._standbys.leave()
        child.become(request, self._setting.search_path, self._blas, warm=True)


def foreign_modules(parsed: program.Program, report: dict[str, Any]) -> list[str]:
    """What a worker has imported and this process has not, without the script's own modules."""
    own = Own(program.folder_of(parsed))
    package = parsed.target.partition(".")[0] if parsed.is_module else None
    return [
        name
        for name, place in report["modules"]
        # the path last: to look at those of all modules of torch takes 0.1 s
        if name not in sys.modules
        and name != "__mp_main__"
        and name.partition(".")[0] != package
        and not own.has(place)
    ]


def imported(request: SpawnRequest, report: dict[str, Any]) -> Imported:
    """What others may be told of this report: names alone."""
    parsed = program.parse(request.argv)
    assert parsed is not None  # it was started by a fork
    theirs, ours = report["environment"], dict(os.environ)
    differing = {name for name in theirs.keys() | ours if theirs.get(name) != ours.get(name)}
    names = foreign_modules(parsed, report)
    lengths = itertools.accumulate(len(name) for name in names)
    count = sum(length <= _TOLD_CHARACTERS for length in lengths)
    return Imported(names[:count], sorted(differing | set(request.own)))


def told(request: SpawnRequest, search_path: tuple[str, ...]) -> dict[str, Any] | None:
    """A report from what another node has told (`imported`); None: no use can be made of it."""
    parsed, names = program.parse(request.argv), (request.worker or {}).get("modules", [])
    names = [name for name in names if all(part.isidentifier() for part in name.split("."))]
    if parsed is None or not names:
        return None
    return {
        "modules": [(name, None) for name in names],
        "path": program.path_of(parsed, search_path),
        "environment": request.env,
    }


def _throw_away(count: int, tell: Callable[[socket.socket], None]) -> tuple[int, str | None]:
    """Fork a process that tells of `count` imports, and ends.

    Returns how many are harmless, and why the next one is not (None: it is the end).
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        try:
            os.setsid()  # what it starts ends with it
            processes.end_with_parent()
            os.nice(_TRIAL_NICENESS)
            ours.close()
            tell(theirs)
        finally:
            os._exit(1)
    theirs.close()
    with ours:
        position, reason = _outcome(ours, count)
    processes.signal_group(pid, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if reason == "":
        reason = f"ends its process ({processes.describe_status(status)})"
    return position, reason


def _outcome(connection: socket.socket, count: int) -> tuple[int, str | None]:
    """Of a trial: how many imports are harmless, and what the next one does.

    The text is empty if it has ended the process.
    """
    position = 0
    while True:
        if not select.select([connection], [], [], TRIAL_S)[0]:
            return position, f"takes more than {TRIAL_S:.0f} s"
        data = connection.recv(1 << 16)
        if not data:
            return position, "" if position < count else None
        position, reason = unpacked(data)
        if reason is not None:
            return position, reason
