"""What dead workers have left in the memory of this node, for those that write the last checkpoint of the job: their own, and mirrors of others."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from taskd.agent.host import Worker
    from taskd.core import commands


def with_remains(
    order: commands.Dump, rank: int, workers: Mapping[int, Worker], find_mirror: Callable[[int, int], int | None],
) -> commands.Dump:
    """The order for `rank`: the first writer here gets the black boxes of the dead, one that sees to an orphaned part the memory that holds it.

    `find_mirror(rank, version)`: of a rank of another node, the descriptor of an arena.
    """
    orphaned = dict(order.orphaned)
    arenas: list[tuple[int, str]] = []
    for other in (other for other, writer in orphaned.items() if writer == rank):
        arena = workers[other].arenas.find(order.version) if other in workers else None
        descriptor = find_mirror(other, order.version) if other not in workers else None if arena is None else arena.fd
        if descriptor is not None:
            arenas.append((other, _path(descriptor)))
    order = dataclasses.replace(order, arenas=tuple(arenas), legacies=())
    if rank != min((writer for writer in order.writers if writer in workers), default=None):
        return order
    gone = [other for other in sorted(workers) if other not in order.writers and other not in orphaned]
    return dataclasses.replace(order, legacies=tuple((other, _path(workers[other].box.fd)) for other in gone))


def _path(descriptor: int) -> str:
    return f"/proc/{os.getpid()}/fd/{descriptor}"
