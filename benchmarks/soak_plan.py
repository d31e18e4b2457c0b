"""Who dies when in benchmarks/soak.py.

Drawn from a seed, the same for the driver and for every rank. Imports no torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import re
from collections import Counter
from typing import NamedTuple

from testbed.proc import status_of

SPACING = 3  # steps from one death to the next, so that one is over when the next comes
_PLACES = (
    "step",
    "forward",
    "backward-begin",
    "backward-end",
    "before-vote",
    "optimizer",
    "before-commit",
)
ANY = "any"  # at any moment of a step, by a timer of the kernel: a third of all deaths


class Kill(NamedTuple):
    """One death."""

    number: int
    rank: int
    step: int
    place: str
    moment: float  # place ANY: which part of a step after its begin


def plan_kills(count: int, world_size: int, spared: int, seed: str) -> list[Kill]:
    """`spared`: the rank that never dies. The first deaths do not depend on how many there are."""
    chance = random.Random(seed)
    ranks = [rank for rank in range(world_size) if rank != spared]
    found = []
    for number in range(count):
        place = ANY if chance.random() < 1 / 3 else chance.choice(_PLACES)
        found.append(
            Kill(number, chance.choice(ranks), SPACING * (number + 1), place, chance.random())
        )
    return found


def steps_for(kills: int) -> int:
    """The length of a training with so many deaths: a few steps are left after the last."""
    return SPACING * (kills + 2)


MEMORY = {"anon_kb": "RssAnon", "shmem_kb": "RssShmem", "file_kb": "RssFile"}


def size_of(pid: int, free_kb: int = 0) -> dict[str, int]:
    """Of a process: resident memory by kind in kB, descriptors, threads.

    `own_kb` is what it has for itself, anonymous and shared; pages of files go and come with the
    machine's need for memory. `held_kb` is that without `free_kb`, which its allocator has and
    nobody uses. Raises OSError: it is gone.
    """
    fields = status_of(pid)
    if "RssAnon" not in fields:
        raise ProcessLookupError(f"process {pid} has ended")
    memory = {key: int(fields[field].split()[0]) for key, field in MEMORY.items()}
    own_kb = memory["anon_kb"] + memory["shmem_kb"]
    return memory | {
        "own_kb": own_kb,
        "held_kb": own_kb - free_kb,
        "fds": len(os.listdir(f"/proc/{pid}/fd")),
        "threads": int(fields["Threads"]),
    }


class MallocInfo(ctypes.Structure):
    """struct mallinfo2 of <malloc.h>, see mallinfo(3)."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd",
            "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    )  # fmt: skip


def free_kb() -> int:
    """What this process has given back to malloc, and malloc not to the system, in kB.

    glibc keeps up to twice the largest block that was ever freed (M_TRIM_THRESHOLD, mallopt(3)):
    ten MB more after one block of five, some time in the first hundreds of recoveries.
    """
    ask = ctypes.CDLL(None).mallinfo2
    ask.restype = MallocInfo
    return int(ask().fordblks) // 1024


def descriptors_of(pid: int) -> Counter[str]:
    """How many descriptors a process has of each kind. Raises OSError: it is gone."""
    kinds: Counter[str] = Counter()
    for entry in os.scandir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed since the look at the directory
            kinds[re.sub(r"\d+", "N", os.readlink(entry.path))] += 1
    return kinds
