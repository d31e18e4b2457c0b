"""A net, its data and its optimizer, small enough for a CPU.

Every batch of a rank is the same, so that parameters depend on the number of steps alone, wherever
a start goes on within an epoch.
"""

import hashlib

import mindspore as ms
import mindspore.dataset as ds
import numpy as np
from mindspore import nn
from mindspore.train import Model


def dataset(rank: int, steps: int):
    random = np.random.RandomState(rank)
    x, y = random.rand(4, 16).astype(np.float32), random.rand(4, 4).astype(np.float32)
    return ds.NumpySlicesDataset(
        {"x": np.tile(x, (steps, 1)), "y": np.tile(y, (steps, 1))}, shuffle=False
    ).batch(4)


def model(optimizer=nn.Momentum):
    ms.set_seed(1)
    net = nn.SequentialCell(nn.Dense(16, 32), nn.ReLU(), nn.Dense(32, 4))
    trained = optimizer(net.trainable_params(), 0.01, 0.9)
    return Model(net, loss_fn=nn.MSELoss(), optimizer=trained, metrics={"loss"})


def digest(trained) -> str:
    found = hashlib.sha256()
    for parameter in trained._train_network.get_parameters():
        found.update(parameter.name.encode() + parameter.asnumpy().tobytes())
    return found.hexdigest()[:16]
