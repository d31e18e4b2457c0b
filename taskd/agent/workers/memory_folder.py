"""The folder in which the arenas of this node outlive its agent (`TASKD_NODE_MEMORY`).

    DIR                         a tmpfs: /dev/shm, or a volume in memory that outlives a container
      taskd-<job>-<node rank>     0700, ours: a place of the job
        <agent incarnation>       0700, locked (flock) by the agent as long as it lives
          <local rank>-<start>-<number>   0600, an arena's file, locked by the agent and its workers

Without such a folder arenas are memfds, and vanish with the agent.

Who lives is told by locks alone, across containers, too: the kernel drops a lock with the last
process that has the descriptor. That of a folder is the agent's. That of a file goes with its
descriptor to the workers, so it is held while any of them may still write.

An agent takes over the folder of exactly that agent which the manager names, the one that was lost
in its place, by giving it its own name. Other folders of dead agents are removed: those of the same
place at once, as nobody may use them; those of other places when their job does not wait for the
node any more: each agent writes down until when that is, as the time of its folder (on the host's
monotonic clock), and moves it on as long as it lives. What belongs to a living agent, or to another
user, is never touched.

Whatever fails here costs what would outlive the agent, and nothing else.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import re
import stat
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from taskd.native import node_memory
from taskd.native.arenas import FILES, Arenas

if TYPE_CHECKING:
    from collections.abc import Iterator

    from taskd.clock import Clock

log = logging.getLogger(__name__)

_SIGN_S = 60.0  # between two signs of life
_LONGEST_S = 10 * 86400.0  # a later time is of another clock
_PREFIX = "taskd-"
_NAME = re.compile(r"[0-9A-Za-z]+")  # of an agent: what the manager says comes from the network
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_TRIES = 10  # others may remove an empty folder at the moment at which it is found
# For workers that outlive their agent for a moment: its life pipe ends them within milliseconds. In
# all: the agent's loop stands meanwhile.
_LOCK_S = 2.0
_LOOK_S = 0.02


class _UnfitError(Exception):
    """The folder cannot be used, for the reason in the text."""


class MemoryFolder:
    """See the module. One of each agent; `close` at the end."""

    def __init__(
        self, directory: str, job_id: str, node_rank: int, incarnation: str, clock: Clock,
        kept_s: float,
    ) -> None:  # fmt: skip
        """`directory`: "": there is none. Nothing is made before the first `arenas`.

        `kept_s`: for so long it may be of use when this agent is dead.
        """
        digest = hashlib.sha256(job_id.encode()).hexdigest()[:16]
        self._directory, self._node_rank, self._clock = directory, node_rank, clock
        self._kept_s = kept_s
        self._place, self._incarnation = f"{_PREFIX}{digest}-{node_rank}", incarnation
        self._place_fd = self._own_fd = -1
        self._is_unfit = not directory
        self._sweeper: threading.Thread | None = None
        self._found: set[str] = set()  # names of files that the lost agent has left
        self._starts = 0
        self._sign_at = self._patient_until = 0.0

    # ------------------------------------------------------------------ arenas

    def arenas(self, local_rank: int, former_agent: str) -> tuple[Arenas, bool]:
        """Files for a rank that has none yet, and whether the lost agent has left them.

        `former_agent`: its incarnation; "": nothing that was left may be used. Raises OSError: no
        descriptor is left.
        """
        former_agent = former_agent if _NAME.fullmatch(former_agent) else ""
        if self._open(former_agent):
            left = self._take_over(local_rank) if former_agent else []
            if left:
                return Arenas(left), True
            with contextlib.suppress(_UnfitError):
                return Arenas(self._make(local_rank)), False
        return Arenas.create(), False

    def discard(self, local_rank: int) -> None:
        """The files of a rank have no name any more; those who have them open keep them."""
        with contextlib.suppress(OSError):
            for name in self._names(local_rank):
                os.unlink(name, dir_fd=self._own_fd)
            self._sign()

    def give_sign(self) -> None:
        """To be called every few seconds: this agent lives."""
        if self._own_fd >= 0 and self._clock.now() >= self._sign_at:
            self._sign()

    def _sign(self) -> None:
        self._sign_at = self._clock.now() + _SIGN_S
        with contextlib.suppress(OSError):
            os.utime(self._own_fd, (0, self._sign_at + self._kept_s))

    def close(self) -> None:
        """Remove everything; twice is once. Nobody needs it any more."""
        if self._sweeper is not None:
            self._sweeper.join()
        if self._own_fd >= 0:
            _remove(self._place_fd, self._incarnation, self._own_fd)
            with contextlib.suppress(OSError):  # another agent of this place has its folder there
                os.rmdir(os.path.join(self._directory, self._place))
            os.close(self._own_fd)
            os.close(self._place_fd)
        self._own_fd = self._place_fd = -1
        self._found.clear()

    def _names(self, local_rank: int) -> list[str]:
        if self._own_fd < 0:
            return []
        return sorted(
            name for name in os.listdir(self._own_fd) if name.startswith(f"{local_rank}-")
        )

    def _make(self, local_rank: int) -> list[int]:
        """Empty files. Raises _UnfitError, and has said so."""
        self._starts += 1
        made: list[int] = []
        try:
            for number in range(FILES):
                name = f"{local_rank}-{self._starts}-{number}"
                flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
                made.append(os.open(name, flags, 0o600, dir_fd=self._own_fd))
                fcntl.flock(made[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            for descriptor in made:
                os.close(descriptor)
            self._say_unfit(f"no file can be made there: {error.strerror}")
            raise _UnfitError from error
        self._sign()  # a new file has changed the time of the folder
        return made

    def _take_over(self, local_rank: int) -> list[int]:
        """The files that the lost agent has left of a rank; []: none that can be used."""
        names = [name for name in self._names(local_rank) if name in self._found]
        self._found.difference_update(names)
        if not names:
            return []
        taken: list[int] = []
        problem = ""
        for name in names:
            try:
                flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
                taken.append(os.open(name, flags, dir_fd=self._own_fd))
                if not node_memory.is_fixed(taken[-1]):
                    problem = f"{name} is no file that only this user may open"
                elif not _is_locked(taken[-1], self._clock, self._patient_until):
                    problem = f"a process of that agent still has {name} open"
            except OSError as error:
                problem = f"{name}: {error.strerror}"
            if problem:
                break
        if not problem:
            return taken
        log.warning(
            "node %d does not use what a lost agent has left of local rank %d in node memory: %s",
            self._node_rank,
            local_rank,
            problem,
        )
        for descriptor in taken:
            os.close(descriptor)
        self.discard(local_rank)
        return []

    # ------------------------------------------------------------------ the folder

    def _open(self, former_agent: str) -> bool:
        """Whether there is a folder of this agent. Once: with what the lost one has left."""
        if self._own_fd >= 0 or self._is_unfit:
            return not self._is_unfit
        self._patient_until = self._clock.now() + _LOCK_S
        try:
            top = _opened(self._directory)
        except OSError as error:
            self._say_unfit(_why(error))
            return False
        try:
            self._check(top)
            self._enter(top, former_agent)
        except OSError as error:
            self._say_unfit(error.strerror or str(error))
        except _UnfitError as error:
            self._say_unfit(str(error))
        else:
            # to give much memory back takes seconds, and the others wait for a node that is back
            if former_agent:
                self._sweeper = threading.Thread(
                    target=self._sweep, args=(os.dup(top),), name="taskd-sweep", daemon=True
                )
                self._sweeper.start()
            else:
                self._sweep(os.dup(top))
        finally:
            os.close(top)
        return not self._is_unfit

    def _check(self, top: int) -> None:
        kind = _file_system(top)
        if kind != "tmpfs":
            raise _UnfitError(f"it is on {kind or 'an unknown file system'}, not on a tmpfs")
        if os.fstat(top).st_uid not in (0, os.geteuid()):
            raise _UnfitError("it belongs to another user")

    def _enter(self, top: int, former_agent: str) -> None:
        """Have a folder, and its lock. Raises OSError, _UnfitError."""
        for _ in range(_TRIES):
            with contextlib.suppress(FileExistsError):
                os.mkdir(self._place, 0o700, dir_fd=top)
            try:
                self._place_fd = _opened(self._place, top)
                _check_ours(self._place_fd, self._place)
                self._own_fd = self._left(former_agent) if former_agent else -1
                if self._own_fd < 0:
                    self._own_fd = self._new()
            except FileNotFoundError:  # somebody has removed it as empty
                if self._place_fd >= 0:
                    os.close(self._place_fd)
                self._place_fd = -1
                continue
            self._sign()
            self._say_where()
            return
        raise _UnfitError("it is removed again and again while it is made")

    def _new(self) -> int:
        """A folder without a file, locked. Raises OSError."""
        os.mkdir(self._incarnation, 0o700, dir_fd=self._place_fd)
        descriptor = _opened(self._incarnation, self._place_fd)
        is_locked = _is_locked(descriptor, self._clock, self._patient_until)
        if is_locked and _is_there(descriptor, self._incarnation, self._place_fd):
            return descriptor
        os.close(descriptor)
        raise FileNotFoundError

    def _left(self, former_agent: str) -> int:
        """The folder of the lost agent, which is ours from now on; -1: it has left nothing."""
        try:
            descriptor = _opened(former_agent, self._place_fd)
        except OSError as error:
            log.info(
                "node %d: nothing of the agent that was lost (%s) is in the node memory here: %s",
                self._node_rank,
                former_agent,
                error.strerror,
            )
            return -1
        try:
            _check_ours(descriptor, former_agent)
            _check_dead(descriptor, self._clock, self._patient_until)
            os.rename(
                former_agent,
                self._incarnation,
                src_dir_fd=self._place_fd,
                dst_dir_fd=self._place_fd,
            )
        except (OSError, _UnfitError) as error:
            log.warning(
                "node %d does not use the node memory of the agent that was lost (%s): %s",
                self._node_rank,
                former_agent,
                error,
            )
            os.close(descriptor)
            return -1
        self._found = set(os.listdir(descriptor))
        self._starts = max((_start_of(name) for name in self._found), default=0)
        log.info(
            "node %d takes over what the agent that was lost (%s) has left in node memory",
            self._node_rank,
            former_agent,
        )
        return descriptor

    def _say_where(self) -> None:
        log.info(
            "snapshots of node %d are kept in %s, and outlive this agent",
            self._node_rank,
            Path(self._directory, self._place, self._incarnation),
        )

    def _say_unfit(self, why: str) -> None:
        if not self._is_unfit:
            log.warning(
                "node %d: snapshots are kept as without TASKD_NODE_MEMORY=%s, and are lost with "
                "this torchrun: %s. It must be a folder on a tmpfs in which this user may write",
                self._node_rank,
                self._directory,
                why,
            )
        self._is_unfit = True
        if self._own_fd < 0 <= self._place_fd:
            os.close(self._place_fd)
            self._place_fd = -1

    # ------------------------------------------------------------------ what others have left

    def _sweep(self, top: int) -> None:
        """Remove what nobody can use any more. Fails where it fails. Closes `top`."""
        places: list[str] = []
        with contextlib.suppress(OSError):
            places = [name for name in os.listdir(top) if name.startswith(_PREFIX)]
        for place in places:
            with contextlib.suppress(OSError, _UnfitError), _folder(place, top) as place_fd:
                for name in os.listdir(place_fd):
                    if (place, name) != (self._place, self._incarnation):
                        self._sweep_one(place_fd, name, at_once=place == self._place)
                os.rmdir(place, dir_fd=top)  # if nothing is in it any more
        os.close(top)

    def _sweep_one(self, place_fd: int, name: str, *, at_once: bool) -> None:
        with contextlib.suppress(OSError, _UnfitError), _folder(name, place_fd) as descriptor:
            if not _is_locked(descriptor, self._clock):
                return
            now, until = self._clock.now(), os.fstat(descriptor).st_mtime
            if until > now + _LONGEST_S:  # it died before it could sign
                until = now + self._kept_s
                os.utime(descriptor, (0, until))
            if at_once or now >= until:
                _remove(place_fd, name, descriptor)
                log.info("node memory of a dead agent (%s) was removed", name)
            else:
                log.info(
                    "node memory of a dead agent (%s) is kept for another %.0f s, for one that "
                    "takes its place",
                    name,
                    until - now,
                )


@contextlib.contextmanager
def _folder(name: str, within: int) -> Iterator[int]:
    """Raises OSError, _UnfitError: there is no folder of ours of this name."""
    descriptor = _opened(name, within)
    try:
        _check_ours(descriptor, name)
        yield descriptor
    finally:
        os.close(descriptor)


def _opened(name: str, within: int | None = None) -> int:
    return os.open(name, _FOLDER, dir_fd=within)


def _check_ours(descriptor: int, name: str) -> None:
    """Raises _UnfitError: somebody else could change what is in it."""
    status = os.fstat(descriptor)
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise _UnfitError(f"{name} in it belongs to another user, or is open to others")


def _check_dead(descriptor: int, clock: Clock, until: float) -> None:
    """Lock it. Raises _UnfitError."""
    if not _is_locked(descriptor, clock, until):
        raise _UnfitError("that agent still lives")


def _is_locked(descriptor: int, clock: Clock, until: float = 0.0) -> bool:
    """Lock it, if not at once, then until that time. False: somebody else has."""
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if clock.now() >= until:
                return False
            time.sleep(_LOOK_S)
        else:
            return True


def _is_there(descriptor: int, name: str, within: int) -> bool:
    """Whether the name is still that of this folder."""
    known = os.fstat(descriptor)
    try:
        found = os.stat(name, dir_fd=within, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return (found.st_dev, found.st_ino) == (known.st_dev, known.st_ino)


def _remove(within: int, name: str, descriptor: int) -> None:
    """A folder of ours with its files, as far as that goes."""
    with contextlib.suppress(OSError):
        for file in os.listdir(descriptor):
            os.unlink(file, dir_fd=descriptor)
        os.rmdir(name, dir_fd=within)


def _start_of(name: str) -> int:
    number = name.split("-")[1:2]
    return int(number[0]) if number and number[0].isdigit() else 0


def _why(error: OSError) -> str:
    if isinstance(error, NotADirectoryError):
        return "it is no folder, or a symbolic link"
    if isinstance(error, FileNotFoundError):
        return "it is not there (in a container: is the volume mounted?)"
    return error.strerror or str(error)


def _file_system(descriptor: int) -> str:
    """Its type, as the kernel names it; "": it is not listed."""
    device = os.fstat(descriptor).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines():
            own, _, rest = line.partition(" - ")
            if own.split()[2] == wanted:
                return rest.split()[0]
    return ""
