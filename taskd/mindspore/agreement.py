"""What all ranks of a MindSpore job have to know of each other before they go on: small numbers.

One AllReduce of a table in which each rank has filled its own row: the one collective that
MindSpore has on every device. Every rank must take part as often as the others.
"""

from __future__ import annotations

import mindspore
import numpy as np
from mindspore import ops
from mindspore.communication import GlobalComm, get_group_size, get_rank

from taskd.errors import StateError

_HALF = 1 << 16  # on the CPU AllReduce takes float32 alone, which is exact up to 2**24


class Agreement:
    """Of the ranks of this job."""

    def __init__(self, launched: int) -> None:
        """`launched`: how many processes the launcher has started, as it says.

        Raises StateError: there are others, and they cannot be reached yet.
        """
        self.rank, self.world_size = 0, 1
        if GlobalComm.INITED:
            self.rank, self.world_size = get_rank(), get_group_size()
        elif launched > 1:
            raise StateError(
                "TrainState: call mindspore.communication.init() before restore(): there are "
                f"{launched} ranks, and all go on from the same step"
            )

    def gather(self, own: list[int]) -> list[list[int]]:
        """These numbers of each rank, by rank: as many from each, from -1 to 2**32 - 2."""
        if self.world_size == 1:
            return [own]
        table: np.ndarray = np.zeros((self.world_size, 2 * len(own)), np.float32)
        table[self.rank] = [half for number in own for half in divmod(number + 1, _HALF)]
        found = ops.AllReduce()(mindspore.Tensor(table)).asnumpy()
        return [
            [
                int(high) * _HALF + int(low) - 1
                for high, low in zip(row[::2], row[1::2], strict=True)
            ]
            for row in found
        ]
