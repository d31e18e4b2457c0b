"""The world that this process trains in: all ranks of the job, or those that are left of them.

Owns the change from one to the other: torchrun's variables, from which torch and the script learn
rank and size, and what is void in another world. Agent and manager know ranks by their numbers in
the job; process groups, and files of checkpoints, by those in the world.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from taskd.config import launcher
from taskd.core import commands

if TYPE_CHECKING:
    from collections.abc import Iterable

    from taskd.worker.life import Life

log = logging.getLogger(__name__)


def enter(life: Life, active: tuple[int, ...]) -> None:
    """From now on the world consists of these ranks; (): all. Main thread, at the gate."""
    if active == life.active:
        return
    life.active, life.is_resized = active, True
    life.world_size = len(active) or life.job_size
    if life.saving.arenas is not None:
        life.saving.arenas.forget_after(-1)  # what is in there is named by ranks of a world
    launcher.set_world(life.world_rank, life.world_size)


def report_step(life: Life) -> None:
    """The first step in this world is done: say what it means for the data, unless it is known."""
    is_resized, life.is_resized = life.is_resized, False
    if not is_resized or life.world_rank or life.has_elastic_data:
        return
    log.warning(
        "elastic-training: the world has %d of %d ranks now, and the script reads its data without "
        "taskd.ElasticSampler: what divides samples or batches by the number of ranks "
        "(DistributedSampler, one batch size per rank) takes others than before, so samples come "
        "twice or not at all, and a step has another number of them. Take taskd.ElasticSampler, "
        "or begin an epoch anew",
        life.world_size,
        life.job_size,
    )


def in_world(
    order: commands.Dump | commands.Publish, life: Life
) -> commands.Dump | commands.Publish:
    """The same order, with the ranks of the world in place of those of the job."""
    if not life.active:
        return order
    in_it = life.world_rank_of
    if isinstance(order, commands.Publish):
        return replace(order, rank=in_it(order.rank))

    def named(paths: Iterable[tuple[int, str]]) -> tuple[tuple[int, str], ...]:
        return tuple((in_it(rank), path) for rank, path in paths if rank in life.active)

    return replace(
        order,
        writers=tuple(map(in_it, order.writers)),
        legacies=named(order.legacies),
        arenas=named(order.arenas),
        orphaned=tuple((in_it(dead), in_it(writer)) for dead, writer in order.orphaned),
    )
