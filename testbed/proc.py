"""What /proc says of the processes of this machine."""

from __future__ import annotations

import contextlib
import os
import pathlib

MARK_ENV = "TASKD_TEST_MARK"  # its value names the job that a process belongs to


def stat_of(pid: int) -> list[str]:
    """The fields of proc(5)'s stat from the third (state) on. Raises OSError: it is gone."""
    return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def state_of(pid: int) -> str:
    """The state letter of a process (proc(5): R, S, D, T, Z, ...)."""
    return stat_of(pid)[0]


def parent_of(pid: int) -> int:
    """The process that has started it."""
    return int(stat_of(pid)[1])


def status_of(pid: int) -> dict[str, str]:
    """The fields of proc(5)'s status. Raises OSError: it is gone."""
    with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as status:
        return {name: value.strip() for name, _, value in (line.partition(":") for line in status)}


def open_files(part: str) -> list[str]:
    """What the descriptors of this process that name `part` are of; others may come and go."""
    found = []
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return sorted(name for name in found if part in name)


def threads_of(pid: int) -> str:
    """Name, state and the kernel function that it waits in, of each thread: for a failure's text.

    "gone" of a process that has ended.
    """
    try:
        tasks = sorted(pathlib.Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        return "gone"
    found = []
    for task in tasks:
        with contextlib.suppress(OSError):
            name, state = (task / "comm").read_text().strip(), stat_of(int(task.name))[0]
            found.append(f"{name} {state} {(task / 'wchan').read_text()}")
    return ", ".join(found)


def _all_pids() -> list[int]:
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]


def descendants(pid: int) -> set[int]:
    """All live processes below `pid`."""
    children: dict[int, list[int]] = {}
    for other in _all_pids():
        with contextlib.suppress(OSError):
            children.setdefault(parent_of(other), []).append(other)
    found, todo = set(), [pid]
    while todo:
        new = children.get(todo.pop(), [])
        found.update(new)
        todo += new
    return found


def group(leader: int) -> set[int]:
    """All live processes of its process group, also when it has ended itself."""
    found = set()
    for pid in _all_pids():
        with contextlib.suppress(OSError):
            state, _, of, *_ = stat_of(pid)
            if int(of) == leader and state != "Z":
                found.add(pid)
    return found


def marked(value: str) -> set[int]:
    """All live processes whose environment holds TASKD_TEST_MARK=value.

    Orphans of a job are found by it.
    """
    needle = f"{MARK_ENV}={value}".encode()
    found = set()
    for pid in _all_pids():
        with contextlib.suppress(OSError):
            variables = pathlib.Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            if pid != os.getpid() and needle in variables and state_of(pid) != "Z":
                found.add(pid)
    return found
