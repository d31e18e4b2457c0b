"""What heartbeat, marks and the pulse of a worker cost while nothing happens.

    python benchmarks/marks.py [--steps 8000] [--json FILE]

One run of the DDP workload (4 ranks, gloo) in which blocks of 25 steps with marks and pulse
alternate with blocks without. Three figures, of all ranks: the ratio of the median step times of
neighbouring blocks (median over the pairs, with its 95 % interval by resampling); the time that the
marks of one step take, measured in the step, where caches are cold; and the processor time of the
two threads that libtaskd and the runtime have in each worker. The first shows whether there is
anything that the other two miss; they are the precise ones.
"""

from __future__ import annotations

import itertools
import pathlib
import random
import statistics
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from benchmarks import measuring, recovery


def read(path: pathlib.Path) -> tuple[dict[int, list[int]], list[float], dict[str, float]]:
    """Of one rank: times of its blocks, ns per step spent in marks, each thread's share."""
    blocks: dict[int, list[int]] = {}
    counted: dict[int, list[int]] = {}
    shares: dict[str, float] = {}
    for line in path.read_text().splitlines():
        kind, first, *rest = line.split()
        if kind == "block":
            blocks.setdefault(int(first), []).append(int(rest[0]))
        elif kind == "count":
            counted.setdefault(int(first), []).append(int(rest[1]))
        elif kind == "thread":
            shares[first] = int(rest[0]) / int(rest[1])
    per_step = [spent[-1] / len(spent) for spent in counted.values() if spent[-1]]
    return blocks, per_step, shares


def interval(values: list[float]) -> tuple[float, float]:
    """95 % interval of the median, by resampling."""
    chance = random.Random(1)
    medians = sorted(statistics.median(chance.choices(values, k=len(values))) for _ in range(2000))
    return medians[50], medians[1949]


def main() -> None:
    """Measure and print."""
    parser = measuring.parser(__doc__)
    parser.add_argument("--steps", type=int, default=8000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="taskd-marks-") as name:
        facts = recovery.run_taskd(pathlib.Path(name), options.steps, "", "marks")
        ranks = [read(facts / f"{rank}.txt") for rank in range(measuring.RANKS)]
    ratios, step_ms = [], []
    for blocks, _, _ in ranks:
        medians = [
            statistics.median(b - a for a, b in itertools.pairwise(times))
            for _, times in sorted(blocks.items())
        ][2:]
        ratios += [on / off for on, off in zip(medians[::2], medians[1::2], strict=False)]
        step_ms += [median / 1e6 for median in medians[1::2]]
    step = statistics.median(step_ms)
    marks_us = statistics.median(each for _, per_step, _ in ranks for each in per_step) / 1e3
    low, high = interval(ratios)
    threads = {
        name: max(shares.get(name, 0.0) for _, _, shares in ranks)
        for name in {name for _, _, shares in ranks for name in shares}
    }
    result = {
        "conditions": measuring.conditions(),
        "steps": options.steps,
        "step_ms": round(step, 2),
        "pairs_of_blocks": len(ratios),
        "paired_percent_median": round(100 * (statistics.median(ratios) - 1), 2),
        "paired_percent_interval": [round(100 * (low - 1), 2), round(100 * (high - 1), 2)],
        "marks_us_per_step": round(marks_us, 2),
        "marks_percent_of_step": round(marks_us / step / 10, 3),
        "thread_percent_of_a_core": {
            name: round(100 * share, 3) for name, share in sorted(threads.items())
        },
    }
    measuring.show(result, options.json)


if __name__ == "__main__":
    main()
