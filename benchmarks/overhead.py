"""What taskd costs while nothing happens: step time on against off, and the idle manager and agent.

    python benchmarks/overhead.py [--pairs 8] [--steps 150] [--bare] [--json FILE]

In-step cost: one run under taskd in which blocks of 25 steps with its hooks and commit() alternate
with blocks without them; the figure is the median over neighbouring blocks of the ratio of their
median step times.

Step time: pairs of runs of the same DDP workload (4 ranks, gloo), once under taskd (manager, agent,
black box, commit at each step) and once under plain torchrun, order alternating; the figure is the
median over the pairs of the ratio of median step times. The first steps of each run are left out.
With --bare the script under taskd uses nothing of it, so that the steps are the same on both sides:
what is left is the spread of whole runs. Idle cost: CPU seconds of the manager and of the torchrun
process over a window in which 4 workers sleep, and resident memory of the manager.
"""

from __future__ import annotations

import itertools
import os
import pathlib
import signal
import statistics
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from benchmarks import measuring, recovery
from testbed.job import SCRIPTS, Job
from testbed.proc import stat_of, status_of
from testbed.processes import Output, environment, torchrun

WARM_UP = 30
TICKS = os.sysconf("SC_CLK_TCK")


def step_times(facts: pathlib.Path) -> list[float]:
    commits, _, _ = recovery.read_facts(facts)
    line = sorted(when for when, _ in commits[0])[WARM_UP:]
    return [(b - a) / 1e6 for a, b in itertools.pairwise(line)]


def plain(directory: pathlib.Path, steps: int, ranks: int) -> pathlib.Path:
    """Without checkpoints: none is due before the end."""
    return recovery.run_torchrun(
        directory, steps, "", "--standalone", ranks=ranks, CHECKPOINT_EVERY="1000000"
    )


def alternating(directory: pathlib.Path, steps: int, ranks: int) -> list[float]:
    """Median step time of each block with taskd by that of the next one without, in one run."""
    facts = recovery.run_taskd(directory, steps, "", "alternating", ranks)
    blocks: dict[int, list[int]] = {}
    for line in (facts / "0.txt").read_text().splitlines():
        kind, block, when = line.split()
        assert kind == "block"
        blocks.setdefault(int(block), []).append(int(when))
    medians = [
        statistics.median(b - a for a, b in itertools.pairwise(times))
        for _, times in sorted(blocks.items())
    ][2:]
    return [on / off for on, off in zip(medians[::2], medians[1::2], strict=False)]


def cpu_s(pid: int) -> float:
    fields = stat_of(pid)
    return (int(fields[11]) + int(fields[12])) / TICKS


def idle(directory: pathlib.Path, window_s: float) -> dict:
    """While the workers sleep: CPU of manager, agent and plain torchrun; memory of the manager."""
    job = Job(directory)
    try:
        manager = job.start_manager()
        agent = job.start_agent("sleeper.py")
        script = str(SCRIPTS / "sleeper.py")
        command = torchrun(script, "--standalone", nproc=4, module="torch.distributed.run")
        bare = Output(command, environment(), directory / "torchrun.out", directory)
        agent.wait_text("asleep", 60)
        time.sleep(15)  # let start-up end on all sides before the window begins
        pids = {
            "manager": manager.process.pid,
            "agent": agent.process.pid,
            "torchrun": bare.process.pid,
        }
        before = {name: cpu_s(pid) for name, pid in pids.items()}
        time.sleep(window_s)
        used = {name: 100 * (cpu_s(pid) - before[name]) / window_s for name, pid in pids.items()}
        rss_mb = int(status_of(manager.process.pid)["VmRSS"].split()[0]) / 1024
        os.killpg(bare.process.pid, signal.SIGTERM)
        bare.wait(60)
        bare.end()
    finally:
        job.close()
    return {
        "manager_cpu_percent": round(used["manager"], 2),
        "agent_cpu_percent": round(used["agent"], 2),
        "torchrun_cpu_percent": round(used["torchrun"], 2),
        "agent_beyond_torchrun_percent": round(used["agent"] - used["torchrun"], 2),
        "manager_rss_mb": round(rss_mb, 1),
        "window_s": window_s,
    }


def main() -> None:
    parser = measuring.parser(__doc__)
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--ranks", type=int, default=measuring.RANKS)
    parser.add_argument("--alternating-steps", type=int, default=2000)
    parser.add_argument("--window-s", type=float, default=30)
    parser.add_argument("--bare", action="store_true")
    options = parser.parse_args()
    mode = "checkpoint" if options.bare else "taskd"
    ratios, medians = [], {"on": [], "off": []}
    with tempfile.TemporaryDirectory(prefix="taskd-bench-") as name:
        base = pathlib.Path(name)
        for i in range(options.pairs):
            order = ["on", "off"] if i % 2 == 0 else ["off", "on"]
            for which in order:
                where = base / f"{which}{i}"
                steps = options.steps + WARM_UP
                facts = (
                    recovery.run_taskd(where, steps, "", mode, options.ranks)
                    if which == "on"
                    else plain(where, steps, options.ranks)
                )
                medians[which].append(statistics.median(step_times(facts)))
            ratios.append(medians["on"][-1] / medians["off"][-1])
        inside = alternating(base / "alternating", options.alternating_steps, options.ranks)
        result = {
            "in_step_overhead_percent_median": round(100 * (statistics.median(inside) - 1), 2),
            "in_step_overhead_percent_quartiles": [
                round(100 * (q - 1), 2) for q in statistics.quantiles(inside, n=4)
            ],
            "in_step_pairs_of_blocks": len(inside),
            "conditions": measuring.conditions(),
            "pairs": options.pairs,
            "steps_per_run": options.steps,
            "step_ms_on": round(statistics.median(medians["on"]), 3),
            "step_ms_off": round(statistics.median(medians["off"]), 3),
            "overhead_percent_median": round(100 * (statistics.median(ratios) - 1), 2),
            "overhead_percent_each": [round(100 * (ratio - 1), 2) for ratio in ratios],
            "idle": idle(base / "idle", options.window_s),
        }
    measuring.show(result, options.json)


if __name__ == "__main__":
    main()
