"""Who dies when in benchmarks/soak.py.

Drawn from a seed, the same for the driver and for every rank. Imports no torch.
"""

from __future__ import annotations

import os
import random
from typing import NamedTuple

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


def size_of(pid: int) -> dict[str, int]:
    """Of a process: resident memory in kB, descriptors, threads. Raises OSError: it is gone."""
    with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as status:
        fields = dict(line.split(":", 1) for line in status)
    if "VmRSS" not in fields:
        raise ProcessLookupError(f"process {pid} has ended")
    return {
        "rss_kb": int(fields["VmRSS"].split()[0]),
        "fds": len(os.listdir(f"/proc/{pid}/fd")),
        "threads": int(fields["Threads"]),
    }
