"""Trains a small network, data parallel, and does to itself what FAULTS says.

FAULTS: "rank@step:place" and so on, SIGKILL in the step of that number: "begin" before it is
computed, "computed" before its commit, "committed" behind that. Each once:
a file in STRUCK tells that it has been. NO_MEMORY: ranks that get no memory for snapshots.
"""

from __future__ import annotations

import hashlib
import os
import pathlib
import signal
import time

import mindspore
import mindspore.dataset
import numpy as np
from mindspore import nn
from mindspore.communication import get_rank, init
from mindspore.train import Callback, Model

import taskd.mindspore
from taskd.errors import ArenaError
from taskd.native.arenas import Arenas

EPOCHS, SAMPLES, BATCH = int(os.environ.get("EPOCHS", "3")), 320, 16


class Faults(Callback):
    """Strikes at one place of each step."""

    def __init__(self, state, rank: int, place: str) -> None:
        super().__init__()
        self.state, self.rank, self.place = state, rank, place

    def strike(self, step: int) -> None:
        fault = f"{self.rank}@{step}:{self.place}"
        marker = pathlib.Path(os.environ["STRUCK"]) / f"struck-{fault}"
        if fault in os.environ.get("FAULTS", "").split(",") and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def on_train_step_begin(self, run_context) -> None:
        if self.place == "begin":
            self.strike(self.state.step + 1)

    def on_train_step_end(self, run_context) -> None:
        if self.place == "computed":
            self.strike(self.state.step + 1)
        if self.place == "committed":
            print(f"step {self.state.step} done", flush=True)
            self.strike(self.state.step)
            time.sleep(float(os.environ.get("PAUSE", "0")))


def refuse_memory(_: Arenas, size: int) -> None:
    raise ArenaError(f"no node memory for {size} bytes")


def main() -> None:
    mindspore.set_device("CPU")
    mindspore.set_context(mode=int(os.environ.get("MODE", "0")))
    rank, ranks = 0, int(os.environ.get("RANK_SIZE", "1"))
    if ranks > 1:
        init()
        rank = get_rank()
        mindspore.set_auto_parallel_context(
            parallel_mode=mindspore.ParallelMode.DATA_PARALLEL,
            gradients_mean=True,
            device_num=ranks,
        )
    if str(rank) in os.environ.get("NO_MEMORY", "").split(","):
        Arenas.make = refuse_memory
    mindspore.set_seed(1)
    mindspore.dataset.config.set_seed(5)
    width = int(os.environ.get("WIDTH", "32"))
    network = nn.SequentialCell(nn.Dense(16, width), nn.ReLU(), nn.Dense(width, 4))
    each = SAMPLES // BATCH  # steps of an epoch
    rate = nn.dynamic_lr.cosine_decay_lr(
        0.0, 0.05, EPOCHS * each, each, 3
    )  # counted by a parameter
    optimizer = nn.Momentum(network.trainable_params(), rate, 0.9)
    random = np.random.RandomState(0)
    data = mindspore.dataset.NumpySlicesDataset(
        {"x": random.randn(SAMPLES, 16).astype(np.float32),
         "y": random.randint(0, 4, SAMPLES).astype(np.int32)},
        shuffle=True, num_shards=ranks, shard_id=rank,
    ).batch(BATCH // ranks, drop_remainder=True)  # fmt: skip
    every = os.environ.get("CHECKPOINT_EVERY")
    state = taskd.mindspore.TrainState(
        network, optimizer, dataset=data, checkpoint_every=None if every is None else int(every),
        snapshot_every=int(apart) if (apart := os.environ.get("SNAPSHOT_EVERY", "1")) else None,
    )  # fmt: skip
    state.restore()
    loss = nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean")
    if state.epoch < EPOCHS:
        faults = {place: Faults(state, rank, place) for place in ("begin", "computed", "committed")}
        Model(network, loss_fn=loss, optimizer=optimizer).train(
            EPOCHS, data, initial_epoch=state.epoch, dataset_sink_mode=False,
            callbacks=[faults["begin"], faults["computed"], state.callback(), faults["committed"]],
        )  # fmt: skip
    held = [*network.get_parameters(), *optimizer.get_parameters()]
    content = b"".join(parameter.asnumpy().tobytes() for parameter in held)
    print(f"step {state.step} digest {hashlib.sha256(content).hexdigest()}", flush=True)


if __name__ == "__main__":
    main()
