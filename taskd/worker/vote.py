"""The vote before an optimizer step of a state that is sharded: every rank's backward pass has come to its end.

Shards must not split over two versions. Collectives of one shard say nothing of the others, so that some ranks could step while others
never get their gradients. After this all-reduce every rank has its own: whoever steps, all can.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from taskd.worker.exchange import wire_device


def vote(name: str, *, agrees: bool = True) -> bool:
    """Wait until all ranks of the default group are here; whether all of them agree. `name`: of the TrainState.

    What it is that they agree to is the caller's; it travels with the vote, so it costs nothing. Raises RuntimeError if one of them is gone.
    """
    if not dist.is_initialized():
        return agrees
    count = torch.full((1,), float(agrees), device=wire_device(name))
    dist.all_reduce(count)
    return count.item() == dist.get_world_size()         # on a device the all-reduce has only been begun: this waits for it
