"""Who can be hit: workers, agents and manager of the job below one process, read from /proc.

A worker is a process that holds its own black box; its agent is the parent of its forkserver. The
manager says its pid in its log. Looks only; touches nobody.
"""

from __future__ import annotations

import os
import pathlib
import re
import struct
from contextlib import suppress
from typing import NamedTuple

from taskd.native import box_layout

_BOX = "/memfd:taskd-black-box"
_NUMBERS = ("pid", "incarnation", "phase", "version")  # words of the box from OFFSET_PID on
LEAVING = (4, 5)  # phases: the function has returned, the process is on its way out


class Worker(NamedTuple):
    """One training process, and how far it is."""

    pid: int
    phase: int
    version: int | None  # committed steps; None: the script has not said


def _stat(pid: int) -> list[str]:
    """The fields of proc(5)'s stat from the third (state) on. Raises OSError: it is gone."""
    return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def state_of(pid: int) -> str:
    """The state letter of proc(5); empty: it is gone."""
    try:
        return _stat(pid)[0]
    except OSError:
        return ""


def parents() -> dict[int, int]:
    """The parent of every process of the machine."""
    found = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with suppress(OSError):
                found[int(entry)] = int(_stat(int(entry))[1])
    return found


def descendants(root: int, parent_by_pid: dict[int, int]) -> list[int]:
    """All processes below `root`, in order of their pids."""
    children: dict[int, list[int]] = {}
    for pid, parent in parent_by_pid.items():
        children.setdefault(parent, []).append(pid)
    found: set[int] = set()
    todo = [root]
    while todo:
        new = set(children.get(todo.pop(), [])) - found
        found |= new
        todo += new
    return sorted(found)


def session(leader: int) -> set[int]:
    """All processes of a session, also those whose parent has ended."""
    found = set()
    for pid in parents():
        with suppress(OSError):
            if int(_stat(pid)[3]) == leader:
                found.add(pid)
    return found


def workers(root: int) -> list[Worker]:
    """The live workers below `root`, in order of their pids."""
    below = descendants(root, parents())
    found = [worker for pid in below if (worker := _worker(pid)) is not None]
    return [worker for worker in found if state_of(worker.pid) not in ("", "Z", "X")]


def agents(root: int) -> list[int]:
    """The torchruns that have workers: a worker's parent is the forkserver of one. No spare is."""
    parent_by_pid = parents()
    forkservers = {parent_by_pid.get(worker.pid, 0) for worker in workers(root)}
    return sorted({parent_by_pid.get(pid, 0) for pid in forkservers} - {0})


def manager(log: pathlib.Path) -> int | None:
    """The manager that has listened last, by its log; None: there is none, or it is gone."""
    pids = re.findall(r" listens on \S+ \(pid (\d+)\)", read(log))
    if not pids or state_of(int(pids[-1])) in ("", "Z", "X"):
        return None
    return int(pids[-1])


def registrations(log: pathlib.Path, pid: int) -> int:
    """How many nodes have registered with the manager of this pid."""
    _, _, rest = read(log).rpartition(f"(pid {pid})")
    return len(set(re.findall(r" node (\d+) of \d+ registered, ranks ", rest)))


def read(path: pathlib.Path) -> str:
    """A log; empty: it is not there yet."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ""


def _worker(pid: int) -> Worker | None:
    """Not the owner of a box: data loaders and agents hold boxes, too, but of others."""
    folder = f"/proc/{pid}/fd"
    with suppress(OSError):
        for name in os.listdir(folder):
            path = f"{folder}/{name}"
            with suppress(OSError):
                if os.readlink(path).startswith(_BOX):
                    found = _box(path)
                    if found is not None and found["pid"] == pid:
                        version = found["version"]
                        return Worker(pid, found["phase"], None if version < 0 else version)
    return None


def _box(path: str) -> dict[str, int] | None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        head = os.pread(descriptor, box_layout.OFFSET_VERSION + 8, 0)
    finally:
        os.close(descriptor)
    if len(head) < box_layout.OFFSET_VERSION + 8 or struct.unpack_from("=QI", head) != (
        box_layout.MAGIC,
        box_layout.LAYOUT_VERSION,
    ):
        return None
    words = struct.unpack_from("=4q", head, box_layout.OFFSET_PID)
    return dict(zip(_NUMBERS, words, strict=True))
