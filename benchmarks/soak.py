"""Twenty kills in one run, again and again: recovery times, steps redone, and whether anything hangs.

    python benchmarks/soak.py [--runs 25]

Every rank in turn is killed with SIGKILL at changing places of a step, three steps apart. Stops at the first run that hangs (60 s without an
end), fails, or ends with different digests. The times are those of the manager's own records.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from benchmarks.recovery import percentile
from tests.process.harness import Job

PLACES = ("forward", "backward", "optimizer", "step", "before-commit")
KILLS = 20


def main() -> None:
    """Run them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=25)
    options = parser.parse_args()
    faults = ";".join(f"{i * 7 % 4}@{2 + 3 * i}:{PLACES[(i + i // 5) % 5]}:kill" for i in range(KILLS))
    times, redone = [], 0
    for run in range(options.runs):
        with tempfile.TemporaryDirectory(prefix="taskd-soak-") as name:
            job = Job(pathlib.Path(name), FAULTS=faults, STEPS="64")
            try:
                finished = job.run(timeout_s=60)
                records = job.recoveries()
                assert finished.returncode == 0, finished.output[-4000:]
                assert len(job.facts("fault")) == KILLS
                assert len(set(job.digests().values())) == 1
            finally:
                job.close()
        times += [record["total_s"] for record in records]
        redone += sum(record["steps_redone"] for record in records)
        print(f"run {run}: {len(records)} recoveries, slowest {max(record['total_s'] for record in records):.3f} s", flush=True)
    print(f"{len(times)} recoveries: p50 {percentile(times, 0.5):.3f} s, p99 {percentile(times, 0.99):.3f} s, max {max(times):.3f} s, "
          f"steps redone {redone}")


if __name__ == "__main__":
    main()
