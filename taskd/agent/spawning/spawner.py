"""Starts workers and tells of their ends, whatever becomes of the forkserver.

      context ──spawn──►  Spawner  ──►  forkserver ──►  worker
                             └── none to be had ─────►  worker (a fresh interpreter, our own child)

Owns the present forkserver, the requests that it has not answered, and the pidfds of workers. A
forkserver that dies, or does not answer in time, is replaced: its workers are our children from
then on, and what it was asked for is asked of the next one. What waits for one that does not come
to an end with its imports is started without. A worker begins only when its start has been told, so
that none can appear later. Every request gets one answer. How long to wait and how often to try is
decided in `taskd.core.policy.forkservers`. For one thread.
"""

from __future__ import annotations

import logging
import os
import select
import signal
from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from taskd.agent.spawning import interpreter, processes
from taskd.agent.spawning.protocol import Exited, SpawnRequest, Started, StartFailed
from taskd.core.policy.forkservers import Forkservers
from taskd.errors import ForkserverError

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable

    from taskd.agent.spawning.forkserver import Forkserver
    from taskd.agent.spawning.protocol import Imported, Reply
    from taskd.clock import Clock

log = logging.getLogger(__name__)

_END_TIMEOUT_S = 5.0  # for workers that are left at the end, after SIGKILL


@dataclass(slots=True)
class _Worker:
    """A live one, or one whose end has not been told."""

    pid: int
    pidfd: int  # -1: there was no descriptor left for it
    is_ours: bool = False  # its parent is not the forkserver
    process: subprocess.Popen[bytes] | None = None  # kept, so that nobody but us waits for it


class Spawner:
    """See the module."""

    def __init__(
        self, forkserver: Forkserver, clock: Clock, start: Callable[[], Forkserver]
    ) -> None:
        """`forkserver`: owned from now on. `start` makes another one; it may raise OSError."""
        self.forkserver = forkserver
        self._clock = clock
        self._start = start
        self._limits = Forkservers()
        self._waiting: deque[SpawnRequest] = deque()  # with descriptors of our own
        self._asked: SpawnRequest | None = None  # the one that the forkserver is busy with
        self._workers: dict[int, _Worker] = {}  # by token
        self._why_none: str | None = None  # said last
        self._is_closed = False

    @property
    def fds(self) -> list[int]:
        """Readable when `read` has something to say.

        It is to be called once a second in any case.
        """
        ours = [
            worker.pidfd
            for worker in self._workers.values()
            if worker.is_ours and worker.pidfd >= 0
        ]
        return [*([self.forkserver.fd] if self.forkserver.alive else []), *ours]

    def tell_how_started(self) -> None:
        """A line on the present forkserver. The first one is there before there is a log."""
        log.info("forkserver started by %s: %s", self.forkserver.mode, self.forkserver.reason)

    def spawn(self, request: SpawnRequest) -> None:
        """Ask for a worker. `Started` or `StartFailed` follows from `read`, whatever happens.

        Raises OSError: no descriptors.
        """
        own: dict[str, int] = {}
        try:
            for name, descriptor in request.fds.items():
                own[name] = os.dup(descriptor)
        except OSError:
            processes.close_all(own.values())
            raise
        self._waiting.append(replace(request, fds=own))
        self._hand_over()

    @property
    def imported(self) -> Imported | None:
        """What the workers of the present forkserver import; None: it is not known."""
        return self.forkserver.imported

    def preload(self, request: SpawnRequest) -> None:
        """Import what the workers of other nodes do, before there is one here.

        `request`: what those will be, without descriptors; `own`: the variables that differ;
        `worker`: {"modules": names}. No answer: without it a worker imports for itself.
        """
        try:
            self.forkserver.spawn(replace(request, kind="preload"))
        except ForkserverError as error:
            log.debug("%s", error)  # `read` sees the same, and replaces it

    def read(self) -> list[Reply]:
        """What happened since the last call; never blocks for long."""
        found = self._take(self.forkserver.read())
        if self.forkserver.alive:
            owes = self._is_owed()
            is_stopped = owes and processes.is_stopped(self.forkserver.pid)
            reason = self._limits.why_replace(
                self._clock.now(),
                owes=owes,
                is_ready=self.forkserver.is_ready,
                is_stopped=is_stopped,
            )
            if reason is not None:
                is_late = self._limits.is_late
                found += self._lost(f"{reason}: it is killed")
                if is_late:
                    found += self._start_directly(f"the forkserver {reason}")
        found += self._reap()
        self._hand_over()
        if not self.forkserver.alive and self._why_none is None:
            found += self._lost(self.forkserver.fate)
        return found if self.forkserver.alive else found + self._start_directly(self._why_none)

    def close(self) -> None:
        """End every worker that still lives, and the forkserver. Returns when they are gone."""
        if self._is_closed:
            return
        self._is_closed = True
        self.forkserver.close()
        for worker in self._workers.values():
            worker.is_ours = True
            if worker.pidfd >= 0 and not select.select([worker.pidfd], [], [], 0)[0]:
                processes.signal_group(worker.pid, signal.SIGKILL)
        deadline = self._clock.now() + _END_TIMEOUT_S
        while (fds := self.fds) and self._clock.now() < deadline:
            select.select(fds, [], [], max(0.0, deadline - self._clock.now()))
            self._reap()
        for request in (*self._waiting, *([self._asked] if self._asked else [])):
            processes.close_all(request.fds.values())

    # ------------------------------------------------------------------ the forkserver

    def _hand_over(self) -> None:
        """One request at a time: what it has not been asked yet, another one can be asked."""
        if not self.forkserver.alive and self._why_none is None:
            return  # `read` says so first: its workers have to become ours
        if not (
            self._waiting
            and self._asked is None
            and self._has_forkserver()
            and self.forkserver.is_ready
        ):
            return
        try:
            self.forkserver.spawn(self._waiting[0])
        except ForkserverError as error:
            log.debug("%s", error)  # `read` sees the same, and replaces it
            return
        self._asked = self._waiting.popleft()

    def _take(self, replies: list[Reply]) -> list[Reply]:
        for reply in replies:
            self._limits.heard()
            if isinstance(reply, Exited):
                worker = self._workers.pop(reply.token, None)
                if worker is not None:
                    processes.close_all([worker.pidfd])
                continue
            if isinstance(reply, Started):
                self._workers[reply.token] = _Worker(reply.pid, reply.pidfd)
            if self._asked is not None and self._asked.token == reply.token:
                processes.close_all(self._asked.fds.values())
                self._asked = None
        return replies

    def _is_owed(self) -> bool:
        """Whether it has to say something: the answer to a request, or the end of a worker."""
        if self._asked is not None or self._waiting:
            return True
        poll = select.poll()
        for worker in self._workers.values():
            if not worker.is_ours and worker.pidfd >= 0:
                poll.register(worker.pidfd, select.POLLIN)
        return bool(poll.poll(0))

    def _lost(self, what: str) -> list[Reply]:
        """Its workers are our children now; what it was asked for did not happen.

        It must not outlive that: it would end them when it sees that nobody listens. Returns what
        it had said before.
        """
        log.warning("the forkserver (pid %d) %s; its workers go on", self.forkserver.pid, what)
        said = self._take(self.forkserver.kill())
        for worker in self._workers.values():
            worker.is_ours = True
        if self._asked is not None:
            self._waiting.appendleft(self._asked)
            self._asked = None
        self._limits.died(self._clock.now())
        self._has_forkserver()
        return said

    def _has_forkserver(self) -> bool:
        """Whether there is one; starts one if that is worth a try."""
        if self.forkserver.alive:
            return True
        reason = self._limits.why_none(self._clock.now())
        if reason is None:
            try:
                self.forkserver = self._start()
            except OSError as error:  # no descriptors, no memory, no processes
                self._limits.died(self._clock.now())
                reason = f"another one could not be started: {error}"
            else:
                self._limits.heard()
                self.tell_how_started()
        if reason is not None and self._why_none is None:
            log.warning(
                "there is no forkserver (%s): workers are started as fresh interpreters, "
                "which takes longer",
                reason,
            )
        self._why_none = reason
        return reason is None

    # ------------------------------------------------------------------ our own children

    def _start_directly(self, why: str | None) -> list[Reply]:
        """What is waited for, without a forkserver."""
        found: list[Reply] = []
        while self._waiting:
            request = self._waiting.popleft()
            try:
                process = interpreter.start(request)
                pidfd = _pidfd_of(process.pid)
            except OSError as error:
                found.append(StartFailed(request.token, f"{why}; and no interpreter: {error}"))
            else:
                self._workers[request.token] = _Worker(
                    process.pid, pidfd, is_ours=True, process=process
                )
                found.append(Started(request.token, process.pid, pidfd, why))
            processes.close_all(request.fds.values())
        return found

    def _reap(self) -> list[Reply]:
        """The ends of our own children."""
        found: list[Reply] = []
        for token, worker in list(self._workers.items()):
            if not worker.is_ours:
                continue
            if worker.pidfd < 0:
                try:
                    worker.pidfd = os.pidfd_open(worker.pid)
                except ProcessLookupError:
                    found.append(self._ended(token, processes.UNKNOWN_STATUS))
                    continue
                except OSError:  # still none left: the next look
                    continue
            status = processes.reap_group(worker.pid, worker.pidfd)
            if status is not None:
                found.append(self._ended(token, status))
        return found

    def _ended(self, token: int, status: int) -> Exited:
        worker = self._workers.pop(token)
        processes.close_all([worker.pidfd])
        if worker.process is not None:
            worker.process.returncode = status
        return Exited(token, worker.pid, status)


def _pidfd_of(pid: int) -> int:
    """Of a child that nobody else waits for. -1: no descriptor is left; `Spawner` tries again."""
    try:
        return os.pidfd_open(pid)
    except OSError:
        return -1
