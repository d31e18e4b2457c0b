"""A small ResNet that trains with MindSpore, on one process or data parallel, and can be ended.

    python examples/mindspore/resnet.py --epochs 4
    MS_ENABLE_TFT="{RSC:1}" msrun --worker_num=2 --local_worker_num=2 examples/mindspore/resnet.py

needs `pip install mindspore "numpy<2"`, and no accelerator. Three lines are TaskD's (marked). With
them a process that dies costs a few steps: msrun starts all anew, and they go on after the last one
of which all of them had a copy. SIGTERM, to any process or to all, saves that step in
`taskd_checkpoints`, and the same command goes on from there. The images are drawn, not loaded.
"""

from __future__ import annotations

import argparse
import hashlib
import os

import mindspore
import mindspore.dataset
import numpy as np
from mindspore import nn
from mindspore.communication import get_rank, init
from mindspore.train import Callback, Model

import taskd.mindspore  # TaskD

IMAGES, SIZE, CLASSES = 512, 12, 4


class Block(nn.Cell):
    """Two convolutions, and a way around them."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.SequentialCell(
            nn.Conv2d(channels, channels, 3, has_bias=False), nn.BatchNorm2d(channels), nn.ReLU(),
            nn.Conv2d(channels, channels, 3, has_bias=False), nn.BatchNorm2d(channels),
        )  # fmt: skip
        self.relu = nn.ReLU()

    def construct(self, x: mindspore.Tensor) -> mindspore.Tensor:
        """Forward."""
        return self.relu(self.body(x) + x)


def resnet(channels: int, blocks: int) -> nn.Cell:
    """Images to scores of classes."""
    return nn.SequentialCell(
        nn.Conv2d(3, channels, 3, has_bias=False), nn.BatchNorm2d(channels), nn.ReLU(),
        *[Block(channels) for _ in range(blocks)],
        nn.AvgPool2d(SIZE, SIZE), nn.Flatten(), nn.Dense(channels, CLASSES),
    )  # fmt: skip


def images(rank: int, ranks: int, batch: int) -> mindspore.dataset.Dataset:
    """Noise with a bright corner, which is the class; each rank has its own share."""
    random = np.random.RandomState(0)
    labels = random.randint(0, CLASSES, IMAGES).astype(np.int32)
    pixels = random.randn(IMAGES, 3, SIZE, SIZE).astype(np.float32)
    half = SIZE // 2
    for image, label in zip(pixels, labels, strict=True):
        row, column = divmod(int(label), 2)
        image[:, row * half : (row + 1) * half, column * half : (column + 1) * half] += 0.5
    mindspore.dataset.config.set_seed(7)  # the order of each epoch
    data = mindspore.dataset.NumpySlicesDataset(
        {"image": pixels, "label": labels}, shuffle=True, num_shards=ranks, shard_id=rank
    )
    return data.batch(batch // ranks, drop_remainder=True)


class Show(Callback):
    """A line each few steps."""

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
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--channels", type=int, default=8)
    parser.add_argument("--blocks", type=int, default=2)
    options = parser.parse_args()
    mindspore.set_device("CPU")
    mindspore.set_context(mode=mindspore.GRAPH_MODE)
    rank, ranks = 0, int(os.environ.get("RANK_SIZE", "1"))  # msrun says how many
    if ranks > 1:
        init()
        rank = get_rank()
        mindspore.set_auto_parallel_context(
            parallel_mode=mindspore.ParallelMode.DATA_PARALLEL,
            gradients_mean=True,
            device_num=ranks,
        )
    mindspore.set_seed(1)  # all begin with the same weights
    network, data = resnet(options.channels, options.blocks), images(rank, ranks, options.batch)
    optimizer = nn.Momentum(network.trainable_params(), learning_rate=0.02, momentum=0.9)
    state = taskd.mindspore.TrainState(network, optimizer, dataset=data)  # TaskD
    state.restore()  # TaskD
    loss = nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean")
    if state.epoch < options.epochs:
        Model(network, loss_fn=loss, optimizer=optimizer).train(
            options.epochs, data, callbacks=[state.callback(), Show(state)],
            initial_epoch=state.epoch, dataset_sink_mode=False,
        )  # fmt: skip
    held = b"".join(one.asnumpy().tobytes() for one in network.trainable_params())
    print(f"step {state.step} digest {hashlib.sha256(held).hexdigest()[:16]}", flush=True)


if __name__ == "__main__":
    main()
