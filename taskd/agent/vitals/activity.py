"""What the kernel says of a process that makes no progress.

Its state, what it waits in, what it and everything it started have used up. Reads /proc (see
proc(5)); keeps nothing. Whether that is a hang is `taskd.core.policy.hangs`'s business.
"""

import os
import platform
import signal
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

TICK_S = 1 / os.sysconf("SC_CLK_TCK")

# Numbers of the calls in which a thread waits for time, a lock or a signal: nanosleep,
# clock_nanosleep, futex, pause, rt_sigtimedwait, rt_sigsuspend. In any other it waits for something
# outside the process: a file, a socket, a child.
_INNER_CALLS = {
    "x86_64": frozenset({35, 230, 202, 34, 128, 130}),
    "aarch64": frozenset({101, 115, 98, 137, 133}),
}.get(platform.machine())
# select and pselect6: of no descriptors they wait for time (time.sleep() before Python 3.11).
_SELECT_CALLS = {"x86_64": frozenset({23, 270}), "aarch64": frozenset({72})}.get(
    platform.machine(), frozenset()
)
_EXITING = 0x4  # PF_EXITING of include/linux/sched.h
_SIGKILL_BIT = 1 << (signal.SIGKILL - 1)


@dataclass(frozen=True)
class Activity:
    """What a process and everything in its process group has used up so far."""

    looked_at: float
    main_s: float  # processor time of the main thread
    threads_s: float  # of the other threads
    others_s: float  # of the processes that it started, also of those that have ended
    main_io: int  # bytes read and written by the main thread
    threads_io: int  # ... by the other threads
    threads: "dict[int, Thread]" = field(default_factory=dict)

    @property
    def is_blocked(self) -> bool:
        """Whether a thread, main or other, waits for a disk."""
        return any(thread.is_blocked for thread in self.threads.values())

    def longest_runnable_s(self, earlier: "Activity") -> float:
        """Seconds since `earlier` for which the busiest thread ran or waited for a processor."""
        elapsed_s = self.looked_at - earlier.looked_at
        found = [
            thread.runnable_since(earlier.threads.get(tid, Thread()), elapsed_s)
            for tid, thread in self.threads.items()
        ]
        return max(found, default=0.0)


@dataclass(frozen=True)
class Thread:
    """What one thread has had of the processors.

    See proc(5), and schedstat in the kernel's documentation.
    """

    runnable_s: float = 0.0  # on a processor, or waiting for one; a wait counts when it is over
    sleeps: int = 0  # how often it gave its processor up
    is_ready: bool = False  # it runs or waits for a processor now
    is_blocked: bool = (
        False  # in the kernel (state D): it waits for a disk or a network file system
    )

    def runnable_since(self, earlier: "Thread", elapsed_s: float) -> float:
        """How many of the `elapsed_s` seconds since that look it ran or waited for a processor."""
        if self.is_ready and earlier.is_ready and self.sleeps == earlier.sleeps:
            return elapsed_s  # also where the wait is not over yet
        return self.runnable_s - earlier.runnable_s


class Processes:
    """All processes of this machine at one moment: parents, groups, processor time."""

    def __init__(self) -> None:
        self._parents: dict[int, int] = {}
        self._groups: dict[int, int] = {}
        self._ticks: dict[int, tuple[int, int]] = {}  # its own, and of its children that have ended
        self._exiting: set[int] = set()
        for entry in os.listdir("/proc"):
            if entry.isdigit():
                self._add(int(entry))

    def _add(self, pid: int) -> None:
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
        except OSError:  # it has ended since
            return
        self._parents[pid], self._groups[pid] = int(fields[1]), int(fields[2])
        self._ticks[pid] = int(fields[11]) + int(fields[12]), int(fields[13]) + int(fields[14])
        if int(fields[6]) & _EXITING:
            self._exiting.add(pid)

    def is_exiting(self, pid: int) -> bool:
        """Whether its main thread has begun to end: its memory is taken down, or threads remain."""
        return pid in self._exiting

    def used_s(self, leader: int) -> tuple[float, float]:
        """Processor time of `leader`, and of what it started.

        Data loaders, a compiler, a copy to remote storage.

        Those are its descendants, the other processes of its group, and the children of all these
        that have been waited for.
        """
        own, ended = self._ticks.get(leader, (0, 0))
        others = sum(
            sum(ticks)
            for pid, ticks in self._ticks.items()
            if pid != leader and (self._groups[pid] == leader or self._descends(pid, leader))
        )
        return own * TICK_S, (ended + others) * TICK_S

    def _descends(self, pid: int, leader: int) -> bool:
        seen = set()
        while pid in self._parents and pid not in seen:
            seen.add(pid)
            pid = self._parents[pid]
            if pid == leader:
                return True
        return False


class Status(NamedTuple):
    """Of a main thread: its state letter, who traces it (0: nobody), whether SIGKILL is pending."""

    state: str
    tracer: int
    is_killed: bool


def status_of(pid: int) -> Status:
    """See proc(5)."""
    lines = _status(f"/proc/{pid}")
    pending = int(lines["SigPnd"], 16) | int(lines["ShdPnd"], 16)
    return Status(lines["State"].strip()[0], int(lines["TracerPid"]), bool(pending & _SIGKILL_BIT))


def _status(folder: str) -> dict[str, str]:
    with open(f"{folder}/status", encoding="ascii", errors="replace") as file:
        return dict(line.split(":", 1) for line in file if ":" in line)


def waits_outside(pid: int) -> bool:
    """Whether the main thread is in a system call that waits for something outside its process.

    See proc(5), syscall.
    """
    try:
        with open(f"/proc/{pid}/syscall", encoding="ascii") as file:
            call, first, *_ = file.read().split()
    except (OSError, ValueError):  # not ours to see; it runs
        return False
    if _INNER_CALLS is None or not call.isdecimal() or int(call) in _INNER_CALLS:
        return False
    return int(call) not in _SELECT_CALLS or int(first, 16) != 0


def activity_of(now: float, pid: int, processes: Processes) -> Activity:
    """What it has used up so far.

    Raises OSError, ValueError or LookupError if it has just ended.
    """
    main_s = _schedstat(f"/proc/{pid}/task/{pid}")[0] / 1e9
    own_s, others_s = processes.used_s(pid)
    main_io, all_io = _io_bytes(f"/proc/{pid}/task/{pid}/io"), _io_bytes(f"/proc/{pid}/io")
    return Activity(now, main_s, own_s - main_s, others_s, main_io, all_io - main_io, _threads(pid))


def _schedstat(thread: str) -> list[int]:
    """Nanoseconds on a processor, and those in which it could have run and waited for one."""
    with open(f"{thread}/schedstat", encoding="ascii") as file:
        return [int(number) for number in file.read().split()[:2]]


def _threads(pid: int) -> dict[int, Thread]:
    found = {}
    for name in os.listdir(f"/proc/{pid}/task"):
        with suppress(OSError):  # it has ended since
            on, waited = _schedstat(f"/proc/{pid}/task/{name}")
            lines = _status(f"/proc/{pid}/task/{name}")
            state = lines["State"].strip()[0]
            found[int(name)] = Thread(
                (on + waited) / 1e9,
                int(lines["voluntary_ctxt_switches"]),
                is_ready=state == "R",
                is_blocked=state == "D",
            )
    return found


def _io_bytes(path: str) -> int:
    try:
        with open(path, encoding="ascii") as file:
            counters = dict(line.split(": ") for line in file)
        return int(counters["rchar"]) + int(counters["wchar"])
    except (OSError, ValueError, KeyError):  # not accounted for in this kernel, or not ours to see
        return 0
