"""What torch has registered of process groups, and how it comes to forget all of it.

Torch registers a group before the function that makes it returns. An interrupt may come in between:
then torch has a group of which nobody else knows, and perhaps no default group.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from taskd.worker import internals
from taskd.worker.process.aborting import unwrapped

if TYPE_CHECKING:
    from collections.abc import Iterable


def registered() -> list[Any]:
    """The groups that torch has. From any thread; does not import torch."""
    world = getattr(sys.modules.get("torch.distributed.distributed_c10d"), "_world", None)
    return list(getattr(world, "pg_map", ()))


def name_ranks(backends: Iterable[Any], size: int) -> None:
    """Of a new default group of this size: its backends know who is in it.

    Torch gives them no ranks, which means all. But then it knows only the first group that a
    process has made for one of all, and kills the process when a later one is split (pytorch
    192106 and 192109, in 2.13).
    """
    for backend in backends:
        with suppress(AttributeError, RuntimeError):  # it has no options, or no ranks in them
            options = unwrapped(backend).options
            if not options.global_ranks_in_group:
                options.global_ranks_in_group = list(range(size))


def forget_all(*, is_on_device: bool) -> None:
    """Torch has no groups any more. Those on a device are not ended in good order.

    That would wait for what they have been asked for, which never comes.
    """
    import torch.distributed as dist  # noqa: PLC0415
    from torch.distributed import distributed_c10d as c10d  # noqa: PLC0415

    if dist.is_initialized():
        if is_on_device and hasattr(c10d, "_abort_process_group"):
            c10d._abort_process_group()
        else:
            dist.destroy_process_group()
    internals.attempt("the numbers of process groups", _forget_rest)


def _forget_rest() -> None:
    """Of a creation that was left half-way, or a destruction: names must agree on all ranks.

    A name that stays registered would be refused to the group that has it next.
    """
    from torch.distributed import distributed_c10d as c10d  # noqa: PLC0415

    world = c10d._world
    world.group_count = 0
    world.pg_names.clear()
    c10d._unregister_all_process_groups()
    for of_groups in (
        world.pg_map,
        world.pg_group_ranks,
        world.pg_backend_config,
        world.pg_to_tag,
        world.tags_to_pg,
        world.pg_coalesce_state,
    ):
        of_groups.clear()
