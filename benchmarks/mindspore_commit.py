"""What a commit of `taskd.mindspore.TrainState` costs a training step, by the size of the state.

    python benchmarks/mindspore_commit.py [--pairs 300] [--json FILE]

needs MindSpore. The steps are those of a network in graph mode, filled up to 30 ms by products of
matrices. They come in pairs, one with the callback and one without, in
an order that is drawn, so that other work on the machine meets both alike. Told is the median time
from the end of the computation to the end of all callbacks, less that without the callback: of a
commit with a snapshot, of one without, and from which `snapshot_every` on both together are at most
1 % of a step. Ends with 1 if a commit without a snapshot alone is more than that.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pathlib
import random
import statistics
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

STEP_S = 0.030
PART = 0.01  # of a step
WIDTHS = (50, 300, 1080)  # 0.2, 9 and 112 MB of parameters and momentum
LAYERS = 8


def measure(width: int, pairs: int, snapshot_every: int) -> dict:
    """Seconds of a commit, beside what a callback costs in any case."""
    import mindspore  # noqa: PLC0415 - `import benchmarks` must need no MindSpore
    import numpy as np  # noqa: PLC0415
    from mindspore import nn  # noqa: PLC0415
    from mindspore.train import Callback, Model  # noqa: PLC0415

    from taskd.mindspore import TrainState  # noqa: PLC0415

    class Measured(Callback):
        """Calls the commit in one step of two, and looks at the clock before and behind it."""

        def __init__(self, commit: Callback, order: list[bool]) -> None:
            super().__init__()
            self.commit, self.order = commit, order
            self.took: dict[bool, list[float]] = {True: [], False: []}
            self.began = 0.0
            self.work = np.ones((256, 256), np.float32)
            self.result = np.empty_like(self.work)

        def on_train_begin(self, run_context: object) -> None:
            self.commit.on_train_begin(run_context)

        def on_train_step_begin(self, _: object) -> None:
            self.began = time.perf_counter()

        def on_train_step_end(self, run_context: object) -> None:
            while time.perf_counter() < self.began + STEP_S:
                np.dot(self.work, self.work, out=self.result)
            is_with = self.order.pop()
            now = time.perf_counter()
            if is_with:
                self.commit.on_train_step_end(run_context)
            self.took[is_with].append(time.perf_counter() - now)

    mindspore.set_device("CPU")
    mindspore.set_context(mode=mindspore.GRAPH_MODE)
    layers = [nn.Dense(width, width) for _ in range(LAYERS)]
    network = nn.SequentialCell(*layers)
    optimizer = nn.Momentum(network.trainable_params(), 0.01, 0.9)
    order = [is_with for _ in range(pairs) for is_with in random.sample([True, False], 2)]
    data = mindspore.dataset.NumpySlicesDataset(
        {
            "x": np.zeros((2 * pairs, width), np.float32),
            "y": np.zeros((2 * pairs, width), np.float32),
        }
    ).batch(1)
    state = TrainState(network, optimizer, dataset=data, snapshot_every=snapshot_every)
    state.restore()
    measured = Measured(state.callback(), order)
    Model(network, nn.MSELoss(), optimizer).train(1, data, callbacks=[measured])
    spent = statistics.median(measured.took[True]) - statistics.median(measured.took[False])
    tail = sorted(measured.took[True])[int(0.9 * pairs)]
    held = [*network.get_parameters(), *optimizer.get_parameters()]
    return {
        "state_bytes": sum(one.asnumpy().nbytes for one in held),
        "parameters": len(state.parameter_names), "pairs": pairs, "commit_s": spent, "p90_s": tail,
    }  # fmt: skip


def main() -> int:
    """Measure each size."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=300)
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TASKD_CHECKPOINT_DIR"] = folder
        for width in WIDTHS:
            row = measure(width, options.pairs, 1)
            without = measure(width, options.pairs, 10**9)["commit_s"]
            left_s = PART * STEP_S - without
            row |= {"without_s": without, "part": row["commit_s"] / STEP_S}
            row["snapshot_every"] = (
                max(1, math.ceil((row["commit_s"] - without) / left_s)) if left_s > 0 else None
            )
            rows.append(row)
            print(
                f"{row['state_bytes'] / 1e6:6.2f} MB in {row['parameters']} parameters: "
                f"{1e6 * row['commit_s']:6.0f} µs with a snapshot (p90 {1e6 * row['p90_s']:.0f}; "
                f"{100 * row['part']:.1f} % of 30 ms), {1e6 * without:.0f} µs without; at most 1 % "
                f"from snapshot_every={row['snapshot_every']} on; {row['pairs']} pairs",
                flush=True,
            )
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    return int(any(row["without_s"] > PART * STEP_S for row in rows))


if __name__ == "__main__":
    sys.exit(main())
