"""Processes that were forked before they are needed: each waits to become one worker.

To fork a process that has imported torch takes 10 ms while others train, and twice that where the
fork is to be a child of the forkserver: no recovery has to wait for it. Such a process shares all
memory with the one that it was forked from, and ends with it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
from dataclasses import replace
from typing import TYPE_CHECKING, NoReturn

from taskd.agent.spawning import child, processes
from taskd.agent.spawning.protocol import SpawnRequest, Wire, request_from, request_message

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger(__name__)


class Standbys:
    """Those of this process. Owns its ends of their connections."""

    def __init__(self, count: int, become: Callable[[SpawnRequest], NoReturn]) -> None:
        """At most `count` wait at a time; `become` turns the calling process into the worker."""
        self._count = count
        self._become = become
        self._waiting: list[tuple[int, Wire]] = []

    @property
    def is_full(self) -> bool:
        """Nothing is to be added."""
        return len(self._waiting) >= self._count

    def add(self) -> None:
        """Fork one. Raises OSError."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            try:
                pid = fork_for_parent(lambda: self._wait(ours, theirs))
            except OSError:
                ours.close()
                raise
        self._waiting.append((pid, Wire(ours)))

    def start(self, request: SpawnRequest, gate: int) -> int | None:
        """The process id of one that becomes this worker when `gate` says so; None: there is none.

        The descriptors of the request are copied.
        """
        message, descriptors = request_message(replace(request, fds={**request.fds, "gate": gate}))
        while self._waiting:
            pid, wire = self._waiting.pop(0)
            with contextlib.closing(wire), contextlib.suppress(OSError):  # it was killed
                wire.send(message, descriptors)
                return pid
        return None

    def leave(self) -> None:
        """This is a fork: the connections are not its own, and their numbers will be closed."""
        for _, wire in self._waiting:
            wire.detach()
        self._waiting = []

    def _wait(self, others_end: socket.socket, connection: socket.socket) -> NoReturn:
        """Such a process itself."""
        processes.set_title(["taskd-standby"])
        others_end.close()
        child.keep_only((connection.fileno(),))
        wire = Wire(connection)
        while (messages := wire.receive(wait=True)) == []:
            pass
        if messages:
            request = request_from(*messages[0])
            gate = request.fds.pop("gate")
            wire.detach()  # closed by its number
            if os.read(gate, 1):
                self._become(request)
        os._exit(1)


def fork_for_parent(become: Callable[[], NoReturn]) -> int:
    """A process in a session of its own, whose parent is the nearest subreaper, the forkserver.

    All signals are blocked in it. Raises OSError.
    """
    former = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        return _fork_twice(become)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, former)


def _fork_twice(become: Callable[[], NoReturn]) -> int:
    reader, writer = os.pipe()
    try:
        middle = os.fork()
    except OSError:
        processes.close_all((reader, writer))
        raise
    if middle == 0:
        try:
            pid = os.fork()
            if pid == 0:
                _run(become)
            os.write(writer, str(pid).encode())
        finally:
            os._exit(0)
    os.close(writer)
    text = os.read(reader, 32)
    os.close(reader)
    os.waitpid(middle, 0)
    if not text:
        raise OSError("no process could be forked")
    return int(text)


def _run(become: Callable[[], NoReturn]) -> NoReturn:
    try:
        os.setsid()
        become()
    except BaseException:  # the top of a process
        log.exception("a worker could not be started")
    finally:
        os._exit(1)
