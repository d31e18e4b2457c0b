"""A small language model in the manner of Pangu: a network with its loss inside, Adam, all ranks.

    MS_ENABLE_TFT="{RSC:1}" msrun --worker_num=4 --local_worker_num=4 examples/mindspore/pangu.py

Needs `pip install mindspore "numpy<2"`, and no accelerator. Data parallel over all processes, as
far as MindSpore does that on the CPU. A checkpoint is written every `--save` steps beside the
training; the lines with `state` are TaskD's. The text is this file.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import os
import pathlib

import mindspore
import mindspore.dataset
import numpy as np
from mindspore import nn, ops
from mindspore.communication import get_rank, init
from mindspore.train import Callback, Model

import taskd.mindspore

LETTERS, LENGTH = 128, 16


class Layer(nn.Cell):
    """Attention to what came before, and two dense layers."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.scale = heads, 1 / math.sqrt(width // heads)
        self.first, self.second = nn.LayerNorm((width,)), nn.LayerNorm((width,))
        self.query_key_value = nn.Dense(width, 3 * width)
        self.out = nn.Dense(width, width)
        self.mlp = nn.SequentialCell(
            nn.Dense(width, 4 * width), nn.GELU(), nn.Dense(4 * width, width)
        )
        late = np.triu(np.full((LENGTH, LENGTH), -1e4, np.float32), 1)
        self.late = mindspore.Tensor(late)

    def construct(self, x: mindspore.Tensor) -> mindspore.Tensor:
        """Forward."""
        count, length, width = x.shape
        shape = (count, length, 3, self.heads, width // self.heads)
        parts = self.query_key_value(self.first(x)).reshape(shape).transpose(2, 0, 3, 1, 4)
        scores = ops.matmul(parts[0], parts[1].swapaxes(2, 3)) * self.scale + self.late
        found = ops.matmul(ops.softmax(scores, -1), parts[2]).transpose(0, 2, 1, 3)
        x = x + self.out(found.reshape(count, length, width))
        return x + self.mlp(self.second(x))


class PanguWithLoss(nn.Cell):
    """Letters to the loss of guessing each next one."""

    def __init__(self, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(LETTERS, width), nn.Embedding(LENGTH, width)
        self.layers = nn.SequentialCell(*[Layer(width, heads) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm((width,)), nn.Dense(width, LETTERS)
        self.where = mindspore.Tensor(np.arange(LENGTH, dtype=np.int32))

    def construct(self, text: mindspore.Tensor) -> mindspore.Tensor:
        """Forward."""
        x = self.letters(text[:, :-1]) + self.places(self.where)
        scores = self.head(self.norm(self.layers(x)))
        return ops.cross_entropy(scores.reshape(-1, LETTERS), text[:, 1:].reshape(-1))


def sentences(rank: int, ranks: int, batch: int) -> mindspore.dataset.Dataset:
    """Pieces of this file; each rank has its own share."""
    text = np.frombuffer(pathlib.Path(__file__).read_bytes(), np.uint8).astype(np.int32) % LETTERS
    count = (len(text) - 1) // LENGTH
    pieces = np.stack([text[at * LENGTH : at * LENGTH + LENGTH + 1] for at in range(count)])
    mindspore.dataset.config.set_seed(7)
    data = mindspore.dataset.NumpySlicesDataset(
        {"text": pieces}, shuffle=True, num_shards=ranks, shard_id=rank
    )
    return data.batch(batch // ranks, drop_remainder=True)


class Show(Callback):
    """A line each step."""

    def __init__(self, state: taskd.mindspore.TrainState) -> None:
        super().__init__()
        self._state = state

    def on_train_step_end(self, run_context: mindspore.train.RunContext) -> None:
        """After the commit: callbacks are called in their order."""
        loss = float(run_context.original_args().net_outputs.asnumpy().mean())
        print(f"step {self._state.step} loss {loss:.4f}", flush=True)


def main() -> None:
    """Train, and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--save", type=int, default=20)
    options = parser.parse_args()
    mindspore.set_device("CPU")
    mindspore.set_context(mode=mindspore.GRAPH_MODE)
    rank, ranks = 0, int(os.environ.get("RANK_SIZE", "1"))
    if ranks > 1:
        init()
        rank = get_rank()
        mindspore.set_auto_parallel_context(
            parallel_mode=mindspore.ParallelMode.DATA_PARALLEL,
            gradients_mean=True,
            device_num=ranks,
        )
    mindspore.set_seed(1)
    network, data = PanguWithLoss(32, 2, 4), sentences(rank, ranks, options.batch)
    optimizer = nn.Adam(network.trainable_params(), learning_rate=3e-3)
    state = taskd.mindspore.TrainState(
        network, optimizer, dataset=data, checkpoint_every=options.save
    )
    state.restore()
    if state.epoch < options.epochs:
        Model(network, optimizer=optimizer).train(
            options.epochs, data, callbacks=[state.callback(), Show(state)],
            initial_epoch=state.epoch, dataset_sink_mode=False,
        )  # fmt: skip
    held = b"".join(one.asnumpy().tobytes() for one in network.trainable_params())
    print(f"step {state.step} digest {hashlib.sha256(held).hexdigest()[:16]}", flush=True)


if __name__ == "__main__":
    main()
