"""What the callback of `taskd.mindspore.TrainState` costs a step, by the size of the state.

    python benchmarks/mindspore_commit.py [--steps 800] [--json FILE]

needs MindSpore. The steps are those of a network in graph mode, filled up to 30 ms by products of
matrices. The TrainState is made as most scripts make it: how far its snapshots are apart is left to
it. At the end of each step two callbacks are called, in an order that is drawn: the commit, and one
that does nothing; so other work on the machine meets both alike. Told are the medians of commits
with a snapshot and without one, and what all commits after the choice take of the time: these
medians as often as there were such commits, less that of the empty callback, beside the median of
a step, which other work can make longer than 30 ms. Ends with 1 if that is more than 1 % for any
size.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import random
import statistics
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

STEP_S = 0.030
LIMIT = 0.01  # of a step
WIDTHS = (50, 300, 1080)  # 0.2, 9 and 112 MB of parameters and momentum
LAYERS = 8
CHOSEN_AT = 10  # the commit behind which snapshots are as far apart as the ranks have chosen


def measure(width: int, steps: int) -> dict:
    """Of one size: seconds of a commit of each kind, and the part of the time that all take."""
    import mindspore  # noqa: PLC0415 - `import benchmarks` must need no MindSpore
    import numpy as np  # noqa: PLC0415
    from mindspore import nn  # noqa: PLC0415
    from mindspore.train import Callback, Model  # noqa: PLC0415

    from taskd.mindspore import TrainState  # noqa: PLC0415

    class Measured(Callback):
        """Fills each step up, and calls both callbacks behind it, with a look at the clock."""

        def __init__(self, state: TrainState) -> None:
            super().__init__()
            self.commit, self.empty = state.callback(), Callback()
            memory = state._memory  # noqa: SLF001 - which commits make a snapshot is seen there
            self.take, memory.take = memory.take, self.note
            self.is_kept = False
            self.took: dict[str, list[float]] = {
                "kept": [], "counted": [], "empty": [], "step": []
            }  # fmt: skip
            self.began = 0.0
            self.work = np.ones((128, 128), np.float32)
            self.result = np.empty_like(self.work)

        def note(self, *arguments: object) -> bool:
            self.is_kept = True
            return self.take(*arguments)

        def on_train_begin(self, run_context: object) -> None:
            self.commit.on_train_begin(run_context)

        def on_train_step_begin(self, _: object) -> None:
            self.began = time.perf_counter()

        def on_train_step_end(self, run_context: object) -> None:
            while time.perf_counter() < self.began + STEP_S:
                np.dot(self.work, self.work, out=self.result)
            if run_context.original_args().cur_step_num > CHOSEN_AT:
                self.took["step"].append(time.perf_counter() - self.began)
            for one in random.sample([self.commit, self.empty], 2):
                self.is_kept = False
                now = time.perf_counter()
                one.on_train_step_end(run_context)
                spent = time.perf_counter() - now
                if run_context.original_args().cur_step_num > CHOSEN_AT:
                    kind = "kept" if self.is_kept else "counted"
                    self.took["empty" if one is self.empty else kind].append(spent)

    mindspore.set_device("CPU")
    mindspore.set_context(mode=mindspore.GRAPH_MODE)
    layers = [nn.Dense(width, width) for _ in range(LAYERS)]
    network = nn.SequentialCell(*layers)
    optimizer = nn.Momentum(network.trainable_params(), 0.01, 0.9)
    zeros = np.zeros((steps, width), np.float32)
    data = mindspore.dataset.NumpySlicesDataset({"x": zeros, "y": zeros}).batch(1)
    state = TrainState(network, optimizer, dataset=data)
    state.restore()
    measured = Measured(state)
    Model(network, nn.MSELoss(), optimizer).train(1, data, callbacks=[measured])
    medians = {kind: statistics.median(took or [0.0]) for kind, took in measured.took.items()}
    kept, counted = len(measured.took["kept"]), len(measured.took["counted"])
    spent = kept * medians["kept"] + counted * medians["counted"]
    commit_s, step_s = spent / (kept + counted) - medians["empty"], medians["step"]
    held = [*network.get_parameters(), *optimizer.get_parameters()]
    return {
        "state_bytes": sum(one.asnumpy().nbytes for one in held),
        "parameters": len(state.parameter_names), "steps": steps,
        "snapshot_every": state._spacing.steps,  # noqa: SLF001 - a script does not need it
        "snapshots": kept, "kept_s": medians["kept"], "counted_s": medians["counted"],
        "empty_s": medians["empty"], "step_s": step_s, "part": commit_s / step_s,
        "part_of_each_step": (medians["kept"] - medians["empty"]) / step_s,
    }  # fmt: skip


def main() -> int:
    """Measure each size."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    rows = []
    for width in WIDTHS:
        with tempfile.TemporaryDirectory() as folder:
            os.environ["TASKD_CHECKPOINT_DIR"] = folder
            row = measure(width, options.steps)
        rows.append(row)
        print(
            f"{row['state_bytes'] / 1e6:6.2f} MB in {row['parameters']} parameters: "
            f"{100 * row['part']:.2f} % of {1e3 * row['step_s']:.1f} ms by default, a snapshot "
            f"every {row['snapshot_every']} steps ({row['snapshots']} in {row['steps']} steps): "
            f"{1e6 * row['kept_s']:.0f} µs with a snapshot, {1e6 * row['counted_s']:.0f} without, "
            f"{1e6 * row['empty_s']:.0f} an empty callback; {100 * row['part_of_each_step']:.1f} % "
            "with snapshot_every=1",
            flush=True,
        )
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    return int(any(row["part"] > LIMIT for row in rows))


if __name__ == "__main__":
    sys.exit(main())
