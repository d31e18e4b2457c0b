"""What dead workers of this node have left in its memory, for those that write the last checkpoint of the job."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from taskd.agent.service import Worker
    from taskd.core import commands


def with_remains(order: commands.Dump, rank: int, workers: Mapping[int, Worker]) -> commands.Dump:
    """The order for `rank`: the first writer here gets the black boxes of the dead, one that sees to an orphaned part the memory that holds it."""
    orphaned = dict(order.orphaned)
    arenas = [(other, workers[other].arenas.find(order.version)) for other, writer in orphaned.items() if writer == rank and other in workers]
    order = dataclasses.replace(order, arenas=tuple((other, _path(arena.fd)) for other, arena in arenas if arena is not None), legacies=())
    if rank != min((writer for writer in order.writers if writer in workers), default=None):
        return order
    gone = [other for other in sorted(workers) if other not in order.writers and other not in orphaned]
    return dataclasses.replace(order, legacies=tuple((other, _path(workers[other].box.fd)) for other in gone))


def _path(descriptor: int) -> str:
    return f"/proc/{os.getpid()}/fd/{descriptor}"
