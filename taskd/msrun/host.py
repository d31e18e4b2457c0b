"""msrun's workers as the agent's loop needs them (`taskd.agent.workers.host`).

msrun starts all workers of a node at once, so a start that is ordered rank by rank waits here until
it was ordered for each of them, or is called off. Each life has a black box and a channel of its
own, which the process fetches at the door; the snapshots of a rank outlive its processes. Owns all
of these, and the descriptors by which ends are noticed. Decides nothing.

How a process ended is asked of the kernel before msrun reaps it, which is when the next group is
started: of one that failed MONITOR says only "gone".
"""

from __future__ import annotations

import itertools
import logging
import os
import signal
import socket
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from taskd.agent.spawning import processes
from taskd.agent.spawning.protocol import Exited, Started, StartFailed
from taskd.msrun.door import Door, Parcel
from taskd.msrun.scheduler import Scheduler
from taskd.native.arenas import Arenas
from taskd.native.black_box import BlackBox
from taskd.transport.channel import Channel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from taskd.agent.spawning.protocol import Imported, Reply
    from taskd.core import commands
    from taskd.msrun.callbacks import Callbacks

log = logging.getLogger(__name__)

# former lives of a rank whose black box stays mapped: a death alarm may still watch it
_KEPT_LIVES = 4
_TOKENS = itertools.count(1)


@dataclass(slots=True)
class MsrunWorker:
    """One life of one rank."""

    rank: int
    incarnation: int
    generation: int
    restarts_used: int
    token: int
    box: BlackBox
    arenas: Arenas  # the same in all lives of the rank
    channel: Channel  # the agent's end
    theirs: socket.socket  # the worker's end, until it has fetched it
    pid: int | None = None
    pidfd: int = -1
    status: int | None = None
    log_path: str = ""  # where it writes what it says; "": to no file, or it was kept already
    is_served: bool = False  # it has fetched what is its own

    @property
    def left(self) -> BlackBox:
        """A group that starts anew leaves nothing but snapshots."""
        return self.box

    @property
    def is_over(self) -> bool:
        """Its process has ended, or there will be none."""
        return self.status is not None

    @property
    def is_waiting(self) -> bool:
        """Its start was ordered, and waits for that of the others."""
        return self.pid is None and not self.is_over


class MsrunHost:
    """See the module."""

    is_substitute = False
    imported: Imported | None = None

    def __init__(
        self, callbacks: Callbacks, *, job_id: str, world_size: int, node_rank: int | None,
        max_restarts: int, grace_s: float,
    ) -> None:  # fmt: skip
        """Before anything runs. Raises ConfigError, OSError: no descriptors, no memory."""
        self._callbacks = callbacks
        self._local_ranks = {seen.rank: local for local, seen in callbacks.look().items()}
        self.ranks = tuple(sorted(self._local_ranks))
        self.world_size, self.max_restarts = world_size, max_restarts
        self.node_count = max(1, world_size // len(self.ranks))
        by_ranks = self.ranks[0] // len(self.ranks)
        self.node_rank = by_ranks if node_rank is None or self.node_count == 1 else node_rank
        self._told = {"job_id": job_id, "world_size": world_size, "grace_s": grace_s}
        self.workers: dict[int, MsrunWorker] = {}
        self._lives: list[MsrunWorker] = []  # former ones, too
        self._queued: list[tuple[int, MsrunWorker, Reply]] = []
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        # Readable end: in every worker. At its end of file the agent is gone.
        self._life_fd, self._life_write_fd = os.pipe2(os.O_CLOEXEC)
        self._door = Door(self._find)
        self._arenas = {rank: Arenas.create() for rank in self.ranks}
        self.scheduler = Scheduler(callbacks.start_scheduler)
        self._met_for = 0  # the generation whose scheduler is the present or next one

    # ------------------------------------------------------------------ what the loop asks

    @property
    def door_name(self) -> str:
        """Where workers fetch what is their own."""
        return self._door.name

    @property
    def fds(self) -> Sequence[int]:
        """Readable when `read` has something to say."""
        lives = [life.pidfd for life in self._lives if life.pidfd >= 0]
        return [self._wake, *self._door.fds, *lives]

    def read(self) -> Sequence[tuple[int, MsrunWorker, Reply]]:
        """Starts and ends of processes. Former incarnations are told of, too."""
        self._door.serve()
        for life in self.workers.values():
            if life.is_served:
                life.theirs.close()  # the worker has its own copy
        with suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        found, self._queued = self._queued, []
        ended = [life for life in self._lives if not life.is_over and _has_ended(life)]
        for life in ended:
            found.append((life.rank, life, Exited(life.token, life.pid or 0, life.status or 0)))
        return found

    def open_store(self, generation: int) -> None:
        """Nothing: the scheduler of the next generation is started with its workers."""

    def spare_store(self) -> str:
        """None."""
        return ""

    def first_host(self) -> int | None:
        """Nobody needs it."""
        return None

    def meet(
        self,
        order: commands.Resume | commands.RestartGroup,
        per_node: int,  # noqa: ARG002 - nodes that leave are none of msrun's abilities
    ) -> None:
        """At another scheduler: that of the generation before is not to be found any more."""
        if order.generation > self._met_for:  # an order may be said again
            self._met_for = order.generation
            self.scheduler.stop()

    def spawn(
        self, rank: int, incarnation: int, *, generation: int, gated: bool, restarts_used: int,
        former_agent: str = "",  # noqa: ARG002  no node is replaced here
        start: int | None = None,  # noqa: ARG002  there is no other start
    ) -> None:  # fmt: skip
        """Start a process for this incarnation, together with the others of the node.

        Raises OSError: no descriptors, no memory.
        """
        if gated:
            raise OSError("msrun starts all its workers anew, and none alone")
        for life in self._lives:
            if life.is_waiting and life.generation < generation:
                self._call_off(life, f"generation {generation} is started instead")
        self._put(rank, incarnation, generation, restarts_used)
        lives = self.workers.values()
        if all(life.is_waiting and life.generation == generation for life in lives):
            self._start_all()

    def signal(self, rank: int, incarnation: int, signal_number: int) -> None:
        """Signal the process group of this incarnation, the present one or a former.

        One whose start waits for the others is not started: they may never be ordered.
        """
        for life in self._lives:
            if (life.rank, life.incarnation) != (rank, incarnation) or life.is_over:
                continue
            if life.is_waiting:
                self._call_off(life, "it was to end before it was started")
            else:
                _signal(life, signal_number)

    # ------------------------------------------------------------------ beginning and end

    def start(self) -> None:
        """The first start of all workers. Raises what START_ALL_WORKER raises, and OSError."""
        for rank in self.ranks:
            self._put(rank, 0, 0, 0)
        self._run_all()

    def versions(self) -> dict[int, tuple[int, ...]]:
        """By rank: the steps that are whole in node memory."""
        return {rank: arenas.versions() for rank, arenas in self._arenas.items()}

    def arenas(self, rank: int) -> Arenas:
        """The snapshots of this rank."""
        return self._arenas[rank]

    def end(self) -> None:
        """Kill whatever still runs, and see it end."""
        for life in self._lives:
            if not life.is_over:
                life.channel.hang_up()
                _signal(life, signal.SIGKILL)
        self._callbacks.kill_all()

    def close(self) -> None:
        """Free everything; nothing runs any more."""
        self._door.close()
        for life in self._lives:
            life.channel.close()
            life.theirs.close()
            life.box.close()
            processes.close_all([life.pidfd])
        for arenas in self._arenas.values():
            arenas.close()
        processes.close_all([self._wake, self._life_fd, self._life_write_fd])

    # ------------------------------------------------------------------ starting

    def _put(self, rank: int, incarnation: int, generation: int, restarts_used: int) -> None:
        former = self.workers.get(rank)
        box = BlackBox.create()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        life = self.workers[rank] = MsrunWorker(
            rank, incarnation, generation, restarts_used, next(_TOKENS), box, self._arenas[rank],
            Channel(ours.detach()), theirs,
        )  # fmt: skip
        self._lives.append(life)
        if former is not None:
            self._retire(former)

    def _retire(self, former: MsrunWorker) -> None:
        former.channel.close()
        former.theirs.close()
        lives = [life for life in self._lives if life.rank == former.rank]
        for life in lives[: -_KEPT_LIVES - 1]:
            if life.is_over:
                self._lives.remove(life)
                life.box.close()

    def _start_all(self) -> None:
        """The start of a later generation: what goes wrong is told as of each rank."""
        try:
            self._callbacks.kill_all()  # all have ended: msrun forgets them, and what shows logs
            for life in self._lives:
                _keep_log(life)
            self.scheduler.start()
            self._run_all()
        except Exception as error:  # msrun's own code: whatever it is, the job's manager decides
            log.exception("msrun could not start the workers of this node")
            for rank in self.ranks:
                self._fail(self.workers[rank], f"msrun: {error}")
        os.eventfd_write(self._wake, 1)

    def _run_all(self) -> None:
        self._callbacks.start_all()
        for seen in self._callbacks.look().values():
            life = self.workers[seen.rank]
            if seen.pid is None:
                self._fail(life, "msrun has started no process for it")
                continue
            life.pid, life.log_path = seen.pid, _output_of(seen.pid)
            try:
                life.pidfd = os.pidfd_open(seen.pid)
            except ProcessLookupError:  # ended, and reaped by msrun's look
                self._queued.append((life.rank, life, Started(life.token, seen.pid, -1, None)))
                life.status = processes.UNKNOWN_STATUS
                ended = Exited(life.token, seen.pid, life.status)
                self._queued.append((life.rank, life, ended))
            else:
                started = Started(life.token, seen.pid, life.pidfd, None)
                self._queued.append((life.rank, life, started))

    def _call_off(self, life: MsrunWorker, why: str) -> None:
        self._fail(life, why)
        os.eventfd_write(self._wake, 1)

    def _fail(self, life: MsrunWorker, why: str) -> None:
        life.status = processes.UNKNOWN_STATUS
        self._queued.append((life.rank, life, StartFailed(life.token, why)))

    # ------------------------------------------------------------------ the door

    def _find(self, rank: int, line: list[int]) -> Parcel | str:
        life = self.workers.get(rank)
        if life is None or life.pid is None or life.pid not in line:
            return f"it is not the process that msrun has started as rank {rank}"
        if life.is_served:
            return f"rank {rank} has fetched its own already"
        life.is_served = True
        values = {
            **self._told, "rank": rank, "local_rank": self._local_ranks[rank],
            "node_rank": self.node_rank, "incarnation": life.incarnation,
            "generation": life.generation, "restarts_used": life.restarts_used,
        }  # fmt: skip
        descriptors = {"channel": life.theirs.fileno(), "box": life.box.fd, "life": self._life_fd}
        descriptors.update(
            (f"arena{number}", descriptor)
            for number, descriptor in enumerate(life.arenas.descriptors)
        )
        return Parcel(values, descriptors)


def _output_of(pid: int) -> str:
    try:
        path = os.readlink(f"/proc/{pid}/fd/1")
    except OSError:
        return ""
    return path if os.path.isfile(path) and not path.startswith("/dev/") else ""


def _keep_log(life: MsrunWorker) -> None:
    """Msrun writes the log of the next life over that of this one."""
    if life.log_path:
        with suppress(OSError):
            os.rename(life.log_path, f"{life.log_path}.{life.incarnation}")
        life.log_path = ""


def _signal(life: MsrunWorker, number: int) -> None:
    if life.pid is None:
        return
    if number == signal.SIGTERM:
        life.channel.hang_up()  # so it knows that the signal is ours, and ends
    processes.signal_group(life.pid, number)


def _has_ended(life: MsrunWorker) -> bool:
    """Whether its process has ended; what it has started ends with it. Not reaped: see above."""
    if life.pidfd < 0 or life.pid is None:
        return False
    status = processes.ending(life.pid, life.pidfd)
    if status is None:
        return False
    life.status = status
    processes.close_all([life.pidfd])
    life.pidfd = -1
    return True
