"""What the kernel tells of a death by SIGKILL: whether it killed for lack of memory.

A process cannot say anything about its own SIGKILL. The kernel counts whom it killed for lack of
memory: in the control group of this process (its workers share it), and on the whole machine; and
it names them in its log, if we may read that. Decides nothing, and must not know ranks.
"""

import contextlib
import os
import re
from dataclasses import dataclass, field

_UNCLAIMED_S = 10.0  # a kill that no death has been seen for after so long was somebody else's
_MAX_RECORDS = 10_000  # of the kernel's log read at one death
_FIRST_PID_NAMESPACE = "pid:[4026531836]"  # PROC_PID_INIT_INO of include/linux/proc_ns.h
_KILLED = re.compile(rb"Killed process (\d+) ")


@dataclass
class Counter:
    """One counter in a file, and the kills in it that no known death belongs to yet."""

    name: str
    path: str
    seen: int
    shown_from: int = 0
    unclaimed: int = 0
    unclaimed_until: float = field(default=0.0)

    def claim(self, now: float) -> str | None:
        """Text like "cgroup oom_kill 0 → 1" for a kill that no death has claimed; None: no such."""
        count = read_counter(self.path)
        if count is not None and count > self.seen:
            if self.unclaimed == 0 or now > self.unclaimed_until:
                self.shown_from, self.unclaimed = self.seen, 0
            self.unclaimed += count - self.seen
            self.seen, self.unclaimed_until = count, now + _UNCLAIMED_S
        if self.unclaimed == 0 or now > self.unclaimed_until:
            return None
        self.unclaimed -= 1
        return f"{self.name} {self.shown_from} → {self.seen}"


class MemoryKills:
    """Begins to count when it is made; ask `reason` after each death by SIGKILL.

    Whatever cannot be read is left out.
    """

    def __init__(
        self, proc: str = "/proc", cgroups: str = "/sys/fs/cgroup", log: str = "/dev/kmsg"
    ) -> None:
        """The arguments are for tests."""
        self._log = _open_log(log)
        self._named: set[int] = set()  # processes of the log whose death was not asked for yet
        found = [("cgroup oom_kill", path) for path in cgroup_files(proc, cgroups)[:1]]
        if self._log < 0 or not _knows_pids_of_the_log(proc):  # else it names whoever was killed
            found.append(("oom_kill of the machine", f"{proc}/vmstat"))
        counters = ((name, path, read_counter(path)) for name, path in found)
        self._counters = [
            Counter(name, path, count) for name, path, count in counters if count is not None
        ]

    def reason(self, pid: int | None, now: float) -> str | None:
        """Why the kernel may have killed `pid`, None if nothing says that it did.

        `now`: monotonic seconds.
        """
        claims = [claim for counter in self._counters if (claim := counter.claim(now)) is not None]
        self._read_log()
        if pid is not None and pid in self._named:
            self._named.discard(pid)
            return ", ".join(["the kernel killed it for lack of memory", *claims[:1]])
        return claims[0] if claims else None

    def _read_log(self) -> None:
        """Whom the kernel has named since the last call."""
        if self._log < 0:
            return
        for _ in range(_MAX_RECORDS):
            try:
                record = os.read(self._log, 8192)
            except BrokenPipeError:  # some were overwritten before we came
                continue
            except OSError:  # nothing more
                break
            if not record:
                break
            self._named.update(int(pid) for pid in _KILLED.findall(record))

    def close(self) -> None:
        """Twice is once."""
        if self._log >= 0:
            os.close(self._log)
            self._log = -1


def cgroup_files(proc: str, cgroups: str) -> list[str]:
    """Files that count the kills in the control group of this process, the nearest first.

    Both versions, both layouts.
    """
    try:
        with open(f"{proc}/self/cgroup", encoding="utf-8", errors="replace") as file:
            groups = [line.rstrip("\n").split(":", 2) for line in file if line.count(":") >= 2]
    except OSError:
        return []
    found = []
    for hierarchy, controllers, path in groups:
        inside = path.strip("/")
        if "memory" in controllers.split(","):
            bases, name = [f"{cgroups}/memory"], "memory.oom_control"
        elif hierarchy == "0" and not controllers:
            bases, name = [cgroups, f"{cgroups}/unified"], "memory.events"
        else:
            continue
        # In a container the path may be that of the machine, and what is mounted may be the group
        # itself.
        found += [
            os.path.join(base, part, name) for part in dict.fromkeys((inside, "")) for base in bases
        ]
    return [path for path in found if read_counter(path) is not None]


def read_counter(path: str) -> int | None:
    """The number in the line "oom_kill N" of a file, None if there is none."""
    try:
        with open(path, "rb") as file:
            content = file.read(1 << 20)
    except OSError:
        return None
    found = re.search(rb"(?m)^oom_kill (\d{1,19})$", content)
    return None if found is None else int(found[1])


def _knows_pids_of_the_log(proc: str) -> bool:
    """Whether the kernel's log has the pids that this process sees: pid_namespaces(7)."""
    try:
        return os.readlink(f"{proc}/self/ns/pid") == _FIRST_PID_NAMESPACE
    except OSError:
        return False


def _open_log(path: str) -> int:
    """The kernel's log behind its present end, -1 if we may not read it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return -1
    with contextlib.suppress(OSError):
        os.lseek(descriptor, 0, os.SEEK_END)
    return descriptor
