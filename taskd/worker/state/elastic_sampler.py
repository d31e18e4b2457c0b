"""`taskd.ElasticSampler`: which samples a step takes, whatever the number of ranks.

Step v takes the same samples in a world of any size, its global batch; each rank gets its share of
it in micro-batches, which are accumulated. So there is no position to save: the step is the
position. Rank and size are those of the default process group, in a job of ours or not.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist

from taskd.worker.life import current


class MicroBatch(NamedTuple):
    """A part of a rank's share of a global batch.

    `indices`: of its samples in the data set. `weight`: what the *mean* of their losses is to be
    multiplied by. `is_last`: the last of this step on this rank; DDP averages gradients in its
    backward pass, and is to be told `no_sync()` in the others.
    """

    indices: list[int]
    weight: float
    is_last: bool


class ElasticSampler:
    """The samples of each step, for a world whose size may change.

    The gradient of a step is the mean over the global batch, if each rank does

        for batch in sampler.of(state.step):
            with contextlib.nullcontext() if batch.is_last else ddp.no_sync():
                (loss_of(batch.indices).mean() * batch.weight).backward()

    and gradients are averaged over ranks, as DDP and FSDP do. It is the same sum in another order,
    so not the same to the last bit, in a world of another size. Random numbers that a rank draws
    (dropout) differ as well. All ranks have equally many micro-batches.

    Args:
        size: number of samples in the data set.
        batch_size: of the global batch, over all ranks; at least as many as ranks.
        micro_batch_size: samples that a rank takes at once, at most; None: its whole share.
        shuffle: another order in each pass through the data, drawn from `seed`.

    Raises:
        ValueError: one of these numbers makes no sense.
    """

    def __init__(
        self,
        size: int,
        batch_size: int,
        *,
        micro_batch_size: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
    ) -> None:
        for name, number in (
            ("size", size), ("batch_size", batch_size), ("micro_batch_size", micro_batch_size or 1)
        ):  # fmt: skip
            if number < 1:
                message = f"ElasticSampler: {name} is {number}: it is a number from 1"
                raise ValueError(message)
        self._size, self._batch_size, self._micro = size, batch_size, micro_batch_size
        self._seed = seed if shuffle else None
        self._order: tuple[int, list[int]] = (-1, [])

    def global_batch(self, step: int) -> list[int]:
        """The indices of all samples of a step, in order. Steps count from 0, and never end."""
        first = step * self._batch_size
        return [self._sample(number) for number in range(first, first + self._batch_size)]

    def of(self, step: int) -> list[MicroBatch]:
        """What this rank takes of the global batch of `step`.

        Raises:
            ValueError: there are more ranks than samples in a global batch.
        """
        life = current()
        if life is not None:
            life.has_elastic_data = True
        is_alone = not (dist.is_available() and dist.is_initialized())
        rank, world_size = (0, 1) if is_alone else (dist.get_rank(), dist.get_world_size())
        if world_size > self._batch_size:
            message = (
                f"a global batch of {self._batch_size} samples is too small for {world_size} ranks"
            )
            raise ValueError(message)
        share = self.global_batch(step)[rank::world_size]
        longest = -(-self._batch_size // world_size)
        count = -(-longest // (self._micro or longest))
        batches = []
        for number in range(count):
            indices = share[number::count]
            # none is left for it: any sample, which counts nothing
            weight = len(indices) * world_size / self._batch_size
            batches.append(MicroBatch(indices or share[:1], weight, number == count - 1))
        return batches

    def _sample(self, number: int) -> int:
        """The sample with this number in the endless row of passes through the data."""
        epoch, place = divmod(number, self._size)
        if self._seed is None:
            return place
        if self._order[0] != epoch:
            generator = torch.Generator().manual_seed(self._seed + epoch)
            order = torch.randperm(self._size, generator=generator, device="cpu")
            self._order = epoch, order.tolist()
        return self._order[1][place]
