"""Which process writes, in a form by which another one can tell that it is certainly gone.

A process is named by the boot of its kernel, its namespace of process ids, its id and its start:
`<boot>.<namespace>.<pid>.<start>`. Of a process of another machine or container nothing is certain,
so it counts as alive.
"""

import os
import re

_OWNER = re.compile(r"[0-9a-f-]{1,36}\.\d{1,20}\.\d{1,10}\.\d{1,20}")


def myself() -> str:
    """This process."""
    return f"{_place()}.{os.getpid()}.{_start_of(os.getpid())}"


def is_certainly_gone(owner: str) -> bool:
    """Whether the process named so has ended. False where that cannot be known from here."""
    if not _OWNER.fullmatch(owner):
        return False
    place, pid, start = owner.rsplit(".", 2)
    return place == _place() and _start_of(int(pid)) != start


def _place() -> str:
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        boot = file.read().strip()
    return f"{boot}.{os.stat('/proc/self/ns/pid').st_ino}"


def _start_of(pid: int) -> str:
    """Clock ticks from the boot to its start, "" if there is no such process.

    One that has ended and that nobody has reaped is none: where the first process of a container
    does not reap, it stays as long as the container.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The name before may hold spaces and parentheses; the start is field 22, the state
            # behind the name field 3.
            words = file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return "" if words[0] in (b"Z", b"X") else words[19].decode()
