"""Adds the memory that dead workers have left on this node to a `Dump` order.

For those that write the last checkpoint of the job: memory of dead ranks of this node, and mirrors
of ranks of others.
"""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from taskd.agent.workers.host import Worker
    from taskd.core import commands


def with_left_memory(
    order: commands.Dump,
    rank: int,
    workers: Mapping[int, Worker],
    find_mirror: Callable[[int, int], int | None],
) -> commands.Dump:
    """The order for `rank`, with the paths of what dead workers have left.

    Whoever writes an orphaned part gets the memory that holds it. The first writer of this node
    gets the black boxes of the other dead, and their memory, in which there are versions that a
    black box has no longer.

    `find_mirror(rank, version)`: the descriptor of an arena that mirrors a rank of another node.
    """
    orphaned = dict(order.orphaned)
    own = [other for other, writer in orphaned.items() if writer == rank]
    is_first = rank == min((writer for writer in order.writers if writer in workers), default=None)
    gone = [
        other
        for other in sorted(workers)
        if is_first and other not in order.writers and other not in orphaned
    ]

    def descriptor_of(other: int) -> int | None:
        if other not in workers:
            return find_mirror(other, order.version)
        arena = workers[other].arenas.find(order.version)
        return None if arena is None else arena.fd

    found = ((other, descriptor_of(other)) for other in (*own, *gone))
    return dataclasses.replace(
        order,
        arenas=tuple((other, _path(fd)) for other, fd in found if fd is not None),
        legacies=tuple((other, _path(workers[other].left.fd)) for other in gone),
    )


def _path(descriptor: int) -> str:
    return f"/proc/{os.getpid()}/fd/{descriptor}"
