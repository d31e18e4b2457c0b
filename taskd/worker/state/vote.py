"""The vote before an optimizer step of a state that is sharded.

Every rank's backward pass has come to its end.

Shards must not split over two versions. Collectives of one shard say nothing of the others, so that
some ranks could step while others never get their gradients. After this all-reduce every rank has
its own: whoever steps, all can. A rank at which the vote breaks cannot know whether it has passed
for others; it asks, and steps if it has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from taskd.errors import StateError

if TYPE_CHECKING:
    from taskd.worker.life import Life


def vote(life: Life, name: str, *, agrees: bool = True) -> bool:
    """Wait until all ranks of the default group are here; whether all of them agree.

    Interrupts are held off from here to the commit.

    What it is that they agree to is the caller's; it travels with the vote, so it costs nothing. A
    rank at which the vote broke, and that steps because it has passed for others, says that they do
    not. `name`: of the TrainState.

    Raises:
        taskd.Interrupted: the vote has passed for nobody, and a recovery waits for this process.
        RuntimeError: as the first, if the job ends with it.
    """
    interrupts = life.interrupts
    interrupts.is_held = True
    if not dist.is_initialized():
        return agrees
    try:
        answer = _ask_all(life, name, agrees=agrees)
        if isinstance(answer, bool):
            return answer
        if life.supervisor.has_passed(answer):
            return False
    except BaseException:
        interrupts.is_held = False
        raise
    interrupts.release()
    raise answer


def _ask_all(life: Life, name: str, *, agrees: bool) -> bool | RuntimeError:
    """What they say, or what ended the vote early."""
    life.interrupts.is_voting = True
    try:
        counts = torch.tensor([1.0, float(agrees)], device=wire_device(name))
        dist.all_reduce(counts)
        # on a device the all-reduce has only been begun, and an abort may end it without an error
        here, agreed = counts.tolist()
    except RuntimeError as error:
        return error
    finally:
        life.interrupts.is_voting = False
    if here != dist.get_world_size():
        return RuntimeError(f"TrainState({name!r}): the vote before the optimizer step was aborted")
    return bool(agreed == here)


def wire_device(name: str) -> torch.device:
    """Where the group's backend wants its tensors."""
    if not dist.is_initialized():
        message = (
            f"TrainState({name!r}): call init_process_group() before restore(): the state is "
            "received from another rank"
        )
        raise StateError(message)
    backends = str(dist.get_backend_config()).lower()
    for backend, kind in (("nccl", "cuda"), ("hccl", "npu"), ("xccl", "xpu")):
        module = getattr(torch, kind, None)
        if backend in backends and module is not None and module.is_available():
            return torch.device(kind, module.current_device())
    return torch.device("cpu")
