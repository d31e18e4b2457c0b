"""The vote before an optimizer step of a state that is sharded: every rank's backward pass has come to its end.

Shards must not split over two versions. Collectives of one shard say nothing of the others, so that some ranks could step while others
never get their gradients. After this all-reduce every rank has its own: whoever steps, all can. A rank at which the vote breaks
cannot know whether it has passed for others; it asks, and steps if it has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from taskd.worker.exchange import wire_device

if TYPE_CHECKING:
    from taskd.worker.life import Life


def vote(life: Life, name: str) -> None:
    """Wait until all ranks of the default group are here. Interrupts are held off from here to the commit. `name`: of the TrainState.

    Raises:
        taskd.Interrupted: the vote has passed for nobody, and a recovery waits for this process.
        RuntimeError: as the first, if the job ends with it.
    """
    life.hold()
    if not dist.is_initialized():
        return
    try:
        error = _broken(life, name)
        if error is None or (life.on_broken_vote is not None and life.on_broken_vote(error)):
            return
    except BaseException:
        life.held = False
        raise
    life.drop_hold()
    raise error


def _broken(life: Life, name: str) -> RuntimeError | None:
    """What ended the vote early, if anything."""
    life.is_voting = True
    try:
        ready = torch.ones(1, device=wire_device(name))
        dist.all_reduce(ready)
        count = int(ready.item())         # on a device the all-reduce has only been begun, and an abort may end it without an error
    except RuntimeError as error:
        return error
    finally:
        life.is_voting = False
    if count != dist.get_world_size():
        return RuntimeError(f"TrainState({name!r}): the vote before the optimizer step was aborted")
    return None
