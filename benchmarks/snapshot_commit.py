"""What a snapshot costs `TrainState.commit()`, in one process.

The commits that begin one beside those that do not.

    python benchmarks/snapshot_commit.py --tensors 400 --mb 200

The copy itself runs beside the next step and is `benchmarks/snapshot.py`'s business.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch
from torch import nn

from taskd.native.arenas import Arenas
from taskd.native.black_box import BlackBox
from taskd.worker import life as life_module
from taskd.worker.life import Life, Saving
from taskd.worker.restore.parking import park_all
from taskd.worker.train_state import TrainState


def main() -> None:
    """Print one JSON object."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--tensors", type=int, default=400, help="of the state, a quarter of them parameters"
    )
    parser.add_argument("--mb", type=int, default=200, help="of the state")
    parser.add_argument("--commits", type=int, default=60)
    options = parser.parse_args()
    torch.set_num_threads(1)
    life = Life(
        rank=0,
        world_size=1,
        incarnation=0,
        box=BlackBox.create(),
        job_id="benchmark",
        saving=Saving(Arenas.create()),
    )
    life_module.set_current(life)
    life.interrupts.in_recoverable = True
    parameters = nn.ParameterList(
        torch.zeros(options.mb * 1_000_000 * 4 // 3 // 4 // options.tensors)
        for _ in range(options.tensors // 4)
    )
    optimizer = torch.optim.Adam(parameters.parameters())
    state = TrainState(model=parameters, optimizer=optimizer, snapshot_every=2)
    state.restore()
    taken: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(options.commits):
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        began = time.perf_counter()
        state.commit()
        taken[state.step % 2 == 0].append(time.perf_counter() - began)
        assert life.saving.snapshots is not None
        life.saving.snapshots.wait()
    made = life.saving.versions()
    assert made, "no snapshot was made"
    print(
        json.dumps(
            {
                "tensors": options.tensors,
                "mb": options.mb,
                "snapshots": list(made),
                "commit_with_ms": round(statistics.median(taken[True][2:]) * 1e3, 3),
                "commit_without_ms": round(statistics.median(taken[False][2:]) * 1e3, 3),
            },
            indent=1,
        )
    )
    park_all(life)


if __name__ == "__main__":
    main()
