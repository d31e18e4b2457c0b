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
    order: commands.Dump,
    rank: int,
    workers: Mapping[int, Worker],
    find_mirror: Callable[[int, int], int | None],
) -> commands.Dump:
    """The order for `rank`, with what is left of the dead.

    One that sees to an orphaned part gets the memory that holds it; the first writer here gets the
    black boxes of the other dead, and their memory, in which there are versions that a black box
    has no longer. `find_mirror(rank, version)`: of a rank of another node, the descriptor of an
    arena.
    """
    orphaned = dict(order.orphaned)
    is_first = rank == min((writer for writer in order.writers if writer in workers), default=None)
    gone = (
        [other for other in sorted(workers) if other not in order.writers and other not in orphaned]
        if is_first
        else []
    )
    arenas: list[tuple[int, str]] = []
    for other in (*(other for other, writer in orphaned.items() if writer == rank), *gone):
        arena = workers[other].arenas.find(order.version) if other in workers else None
        descriptor = (
            find_mirror(other, order.version)
            if other not in workers
            else None
            if arena is None
            else arena.fd
        )
        if descriptor is not None:
            arenas.append((other, _path(descriptor)))
    return dataclasses.replace(
        order,
        arenas=tuple(arenas),
        legacies=tuple((other, _path(workers[other].box.fd)) for other in gone),
    )


def _path(descriptor: int) -> str:
    return f"/proc/{os.getpid()}/fd/{descriptor}"
