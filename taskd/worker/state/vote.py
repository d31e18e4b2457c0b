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
    from taskd.worker.state.comparison import Comparison


def vote(
    life: Life, name: str, *, agrees: bool = True, comparison: Comparison | None = None
) -> bool:
    """Wait until all ranks of the default group are here; whether all of them agree.

    Interrupts are held off from here to the commit.

    What it is that they agree to is the caller's; it travels with the vote, so it costs nothing. A
    rank at which the vote broke, and that steps because it has passed for others, says that they do
    not. `name`: of the TrainState. `comparison`: of its replicas, travels with the vote as well.

    Raises:
        StateError: two ranks would count as replicas of each other, and are none.
        taskd.Interrupted: the vote has passed for nobody, and a recovery waits for this process.
        RuntimeError: as the first, if the job ends with it.
    """
    interrupts = life.interrupts
    interrupts.is_held = True
    if not dist.is_initialized():
        return agrees
    try:
        answer = _ask_all(life, name, agrees=agrees, comparison=comparison)
        if isinstance(answer, bool):
            return answer
        if life.supervisor.has_passed(answer):
            return False
    except BaseException:
        interrupts.is_held = False
        raise
    interrupts.release()
    raise answer


def _ask_all(
    life: Life, name: str, *, agrees: bool, comparison: Comparison | None
) -> bool | RuntimeError:
    """What they say, or what ended the vote early."""
    own = [1.0, float(agrees)]
    row = None if comparison is None else comparison.row()
    if row is not None:  # each rank adds its own to zeros
        before, behind = dist.get_rank(), dist.get_world_size() - dist.get_rank() - 1
        own += [0.0] * (len(row) * before) + row + [0.0] * (len(row) * behind)
    life.interrupts.is_voting = True
    try:
        counts = torch.tensor(own, device=wire_device(name))
        dist.all_reduce(counts)
        # on a device the all-reduce has only been begun, and an abort may end it without an error
        here, agreed, *rows = counts.tolist()
    except RuntimeError as error:
        return error
    finally:
        life.interrupts.is_voting = False
    if here != dist.get_world_size():
        return RuntimeError(f"TrainState({name!r}): the vote before the optimizer step was aborted")
    if comparison is not None and row is not None:
        size = len(row)
        comparison.conclude([rows[at : at + size] for at in range(0, len(rows), size)])
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
