"""torch's process context over the spawner: the workers of one node, restartable one by one.

Owns the node's worker processes, their channels and black boxes, in one table by local rank
(`workers`). Both the agent's loop (`read`, `respawn`, `signal`) and torch's own monitoring
(`_poll`, `_close`) work on that table. Decides nothing.
"""

from __future__ import annotations

import itertools
import logging
import os
import select
import socket
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from signal import SIG_BLOCK, SIGKILL, SIGTERM, Signals, pthread_sigmask
from typing import TYPE_CHECKING, Any

from torch.distributed.elastic.multiprocessing.api import PContext, RunProcsResult
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from taskd.agent.spawning import processes
from taskd.agent.spawning.protocol import Exited, SpawnRequest, Started, StartFailed
from taskd.clock import MonotonicClock
from taskd.config.secret import without_secret
from taskd.errors import ForkserverError
from taskd.native.black_box import BlackBox
from taskd.native.box_payloads import TAKEN_OVER
from taskd.torchrun import binding
from taskd.transport.channel import Channel

if TYPE_CHECKING:
    from taskd.agent.spawning.protocol import Reply
    from taskd.agent.spawning.spawner import Spawner
    from taskd.agent.workers.memory_folder import MemoryFolder
    from taskd.native.arenas import Arenas

log = logging.getLogger(__name__)

_START_TRIES = 2
_LOOK_S = 1.0  # between two looks at least: the spawner watches its forkserver by them
# former lives per rank whose black box stays mapped: a death alarm may still watch it
_KEPT_LIVES = 4
_TOKENS = itertools.count(1)  # unique over all contexts of the process: they share the spawner


@dataclass(slots=True)
class LocalWorker:
    """One life of one worker.

    `status` is None while the process lives: exit code or minus the signal number.
    """

    local_rank: int
    incarnation: int
    token: int
    bootstrap: dict[str, Any]
    box: BlackBox
    arenas: Arenas  # the same in all lives of the rank
    channel: Channel  # the agent's end
    previous: BlackBox | None  # from which this life takes over what was the rank's alone
    pid: int | None = None
    status: int | None = None
    error: str | None = None

    @property
    def is_over(self) -> bool:
        """No process, and there will be none."""
        return self.status is not None or self.error is not None

    @property
    def left(self) -> BlackBox:
        """The black box that has what the rank leaves: not this life's until it has taken over.

        Nothing can be taken over from one that is not known as a black box any more.
        """
        if self.previous is None or not self.previous.can_be_attached:
            return self.box
        extras, layout = self.previous.read_extras(), self.previous.read_layout()
        has_extras = len(self.box.read_extras()) >= min(TAKEN_OVER, len(extras))
        has_layout = layout is None or self.box.read_layout() is not None
        return self.box if has_extras and has_layout else self.previous


class TaskdContext(PContext):
    """See the module."""

    def __init__(
        self,
        *,
        spawner: Spawner,
        bootstraps: dict[int, dict[str, Any]],
        life_fd: int,
        memory: MemoryFolder,
        waits_for_orders: bool = False,
        numa_options: Any = None,
        entrypoint: str,
        **torch_arguments: Any,
    ) -> None:
        """`bootstraps`: for each local rank what the runtime needs.

        `life_fd`: read end of the agent's life pipe. `memory`: where arenas are, the context's from
        now on. `waits_for_orders`: `start` starts nobody. `numa_options`: torch's own.
        """
        super().__init__(entrypoint=entrypoint, **torch_arguments)
        self.spawner = spawner
        self.workers: dict[int, LocalWorker] = {}
        self._by_token: dict[int, LocalWorker] = {}
        self._arenas: dict[int, Arenas] = {}  # by local rank
        self._queued: list[tuple[LocalWorker, Reply]] = []  # read while somebody else waited
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._bootstraps = bootstraps
        self._life_fd = life_fd
        self._memory = memory
        self._waits_for_orders = waits_for_orders
        self._prefixes = [binding.prefix_of(rank, numa_options) for rank in range(self.nprocs)]
        self._clock = MonotonicClock()

    # ------------------------------------------------------------------ for the agent's loop

    def fds(self) -> list[int]:
        """What to wait on for `read`, which is to be called once a second in any case."""
        return [self._wake, *self.spawner.fds]

    def read(self) -> list[tuple[LocalWorker, Reply]]:
        """Bring the table up to date and tell what changed; never blocks.

        Events of former lives come too.
        """
        found = [
            event for reply in self.spawner.read() if (event := self._apply(reply)) is not None
        ]
        self._memory.give_sign()
        found[:0] = self._queued
        self._queued = []
        if self._wake >= 0:
            with suppress(BlockingIOError):
                os.eventfd_read(self._wake)
        return found

    def _keep(self, found: list[tuple[LocalWorker, Reply]]) -> None:
        """For the next `read`, which `fds` announces."""
        self._queued.extend(found)
        if found and self._wake >= 0:
            os.eventfd_write(self._wake, 1)

    def _apply(self, reply: Reply) -> tuple[LocalWorker, Reply] | None:
        worker = self._by_token.get(reply.token)
        if worker is None:
            # asked for by a context that was closed before it started
            if isinstance(reply, Started):
                processes.signal_group(reply.pid, SIGKILL)
            return None
        if isinstance(reply, Started):
            worker.pid = reply.pid
            if reply.note is not None:
                log.warning(
                    "local rank %d is not forked from the warm process: %s",
                    worker.local_rank,
                    reply.note,
                )
            return worker, reply
        if isinstance(reply, StartFailed):
            worker.error = reply.error
        elif isinstance(reply, Exited):
            worker.status = reply.status
        return worker, reply

    def respawn(
        self,
        local_rank: int,
        bootstrap: dict[str, Any],
        env_updates: dict[str, str] | None = None,
        *,
        former_agent: str = "",
        inherits: bool,
    ) -> LocalWorker:
        """Start the next life of a rank; returns at once, `read` reports.

        The former life gets no signal from here.

        Its log files are continued, a stale error file is removed, and the new life can read the
        black box of the former if it `inherits`. `former_agent`: whose node memory a rank without a
        former life may take over.
        """
        self.envs[local_rank].update(env_updates or {})
        with suppress(FileNotFoundError):
            if self.error_files[local_rank] != os.devnull:
                os.unlink(self.error_files[local_rank])
        return self._spawn(local_rank, bootstrap, former_agent, inherits=inherits)

    def signal(self, local_rank: int, incarnation: int, signum: int) -> bool:
        """Signal this life and its process group. False: it is gone, or not there yet."""
        life = (local_rank, incarnation)
        lives = self._by_token.values()
        found = (one for one in lives if (one.local_rank, one.incarnation) == life)
        return any(_signal(worker, signum) for worker in found)

    def failure(self, local_rank: int) -> ProcessFailure:
        """What torchrun reports about a worker that ended, or was stopped."""
        worker = self.workers[local_rank]
        return ProcessFailure(
            local_rank=local_rank,
            pid=worker.pid or 0,
            error_file=self.error_files[local_rank],
            exitcode=1 if worker.status is None else worker.status,
        )

    # ------------------------------------------------------------------ starting

    def _start(self) -> None:
        """Start all; returns when each has a process id, because torch wants to know them.

        However long the forkserver imports: the spawner gives each of them an answer.
        """
        for local_rank in () if self._waits_for_orders else range(self.nprocs):
            self._spawn(local_rank, self._bootstraps[local_rank])
        tries = dict.fromkeys(range(self.nprocs), 1)
        while any(worker.pid is None for worker in self.workers.values()):
            self._wait(_LOOK_S)
            for local_rank, worker in self.workers.items():
                if worker.error is None:
                    continue
                if tries[local_rank] == _START_TRIES:
                    raise ForkserverError(
                        f"local rank {local_rank} could not be started: {worker.error}"
                    )
                tries[local_rank] += 1
                self._spawn(local_rank, self._bootstraps[local_rank])

    def _wait(self, at_most_s: float) -> None:
        fds = [fd for fd in self.fds() if fd != self._wake]
        select.select(fds, [], [], at_most_s)
        self._keep(self.read())

    def _spawn(
        self,
        local_rank: int,
        bootstrap: dict[str, Any],
        former_agent: str = "",
        *,
        inherits: bool = False,
    ) -> LocalWorker:
        """Raises OSError, and has changed nothing then: no descriptors, no memory."""
        former = self.workers.get(local_rank)
        previous = former.left if former is not None and inherits else None
        # all start anew, and what was is not to be believed
        if not inherits and local_rank in self._arenas:
            self._arenas.pop(local_rank).close()
            self._memory.discard(local_rank)
        takes_over = False
        if local_rank not in self._arenas:
            found, takes_over = self._memory.arenas(local_rank, former_agent)
            self._arenas[local_rank] = found
        bootstrap = {**bootstrap, "takes_over": takes_over}
        arenas = self._arenas[local_rank]
        with ExitStack() as undo:
            box = BlackBox.create()
            undo.callback(box.close)
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            channel = Channel(ours.detach())
            undo.callback(channel.close)
            with theirs:
                worker = LocalWorker(
                    local_rank,
                    bootstrap["incarnation"],
                    next(_TOKENS),
                    bootstrap,
                    box,
                    arenas,
                    channel,
                    previous,
                )
                self.spawner.spawn(self._request(worker, theirs.fileno()))
            undo.pop_all()
        self.workers[local_rank] = self._by_token[worker.token] = worker
        if former is not None:
            self._retire(former)
        return worker

    def _request(self, worker: LocalWorker, channel: int) -> SpawnRequest:
        local_rank = worker.local_rank
        descriptors = {"channel": channel, "life": self._life_fd, "box": worker.box.fd}
        if worker.previous is not None:
            descriptors["previous"] = worker.previous.fd
        descriptors.update(
            (f"arena{number}", descriptor)
            for number, descriptor in enumerate(worker.arenas.descriptors)
        )
        return SpawnRequest(
            token=worker.token,
            argv=tuple(str(argument) for argument in self.args[local_rank]),
            env={**without_secret(), **self.envs[local_rank]},
            own=tuple(self.envs[local_rank]),
            stdout=self.stdouts[local_rank] or None,
            stderr=self.stderrs[local_rank] or None,
            fds=descriptors,
            worker=worker.bootstrap,
            ignored=processes.ignored_signals(),
            blocked=tuple(sorted(pthread_sigmask(SIG_BLOCK, ()))),
            prefix=self._prefixes[local_rank],
        )

    def _retire(self, worker: LocalWorker) -> None:
        """Keep a former life while somebody may still look at it; free the oldest that is over."""
        worker.channel.close()
        lives = [life for life in self._by_token.values() if life.local_rank == worker.local_rank]
        needed = self.workers[worker.local_rank].previous
        for life in lives[: -_KEPT_LIVES - 1]:
            if life.is_over and life.box is not needed:
                del self._by_token[life.token]
                life.box.close()

    # ------------------------------------------------------------------ for torch's own loop

    def pids(self) -> dict[int, int]:
        """Process ids by local rank; 0: there is no process yet, or could not be one."""
        return {local_rank: worker.pid or 0 for local_rank, worker in self.workers.items()}

    def _poll(self) -> RunProcsResult | None:
        """All ended well, or one did not: then the others are closed and the failures told.

        None: still running.
        """
        self._keep(self.read())
        workers = self.workers.values()
        if not any(worker.error or worker.status for worker in workers) and any(
            worker.status is None for worker in workers
        ):
            return None
        failed_first = [worker.local_rank for worker in workers if worker.error or worker.status]
        self.close()
        failures = {local_rank: self.failure(local_rank) for local_rank in failed_first}
        failures.update(
            (worker.local_rank, self.failure(worker.local_rank))
            for worker in workers
            if worker.status and worker.local_rank not in failures
        )
        result = RunProcsResult(failures=failures, stdouts=self.stdouts, stderrs=self.stderrs)
        if not failures:
            result.return_values = dict.fromkeys(range(self.nprocs))
        for local_rank in failed_first:
            worker = self.workers[local_rank]
            log.error(
                "local rank %d (pid %s) failed: %s",
                local_rank,
                worker.pid,
                worker.error or processes.describe_status(worker.status or 0),
            )
        return result

    def _close(self, death_sig: Signals, timeout: int = 30) -> None:
        """End what lives, politely first; then free what the context holds. May be called twice."""
        for number in (death_sig, SIGKILL):
            for worker in self._alive():
                log.info(
                    "sending %s to local rank %d (pid %d)",
                    number.name,
                    worker.local_rank,
                    worker.pid,
                )
                _signal(worker, number)
            deadline = self._clock.now() + timeout
            while self._alive() and (left_s := deadline - self._clock.now()) > 0:
                self._wait(min(_LOOK_S, left_s))
        for worker in self._alive():
            log.error(
                "local rank %d (pid %d) does not end even by SIGKILL: it hangs in the "
                "kernel; going on without it",
                worker.local_rank,
                worker.pid,
            )
        for worker in self._by_token.values():
            worker.channel.close()
            worker.box.close()
        for arenas in self._arenas.values():
            arenas.close()
        self._arenas = {}
        self._memory.close()
        self._by_token = {
            token: worker for token, worker in self._by_token.items() if not worker.is_over
        }
        if self._wake >= 0:
            os.close(self._wake)
            self._wake = -1

    def _alive(self) -> list[LocalWorker]:
        return [
            worker
            for worker in self._by_token.values()
            if worker.pid is not None and not worker.is_over
        ]


def _signal(worker: LocalWorker, signum: int) -> bool:
    if worker.pid is None or worker.is_over:
        return False
    is_there = processes.signal_group(worker.pid, signum)
    if signum == SIGTERM and worker.bootstrap.get("grace_s") is not None:
        worker.channel.hang_up()  # so it knows that the signal is ours
    return is_there
