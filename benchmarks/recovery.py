"""Recovery time against plain torchrun, both on the same machine in one run.

    python benchmarks/recovery.py [--kills 50] [--raises 0] [--json FILE]

4 ranks, gloo, DDP. A seeded victim kills itself with SIGKILL at a seeded step and place; in another
job it raises an exception there, for which no process has to be replaced. Reported: seconds from
the fault to the first new commit of the slowest rank; steps redone; whether the final digest equals
that of a run without faults. The alternative is plain torchrun with c10d in the way that works best
for it (TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, a checkpoint every 50 steps). Its clock stops at the
first step after the restart, not at the step it had lost: the comparison favours it.
"""

from __future__ import annotations

import math
import pathlib
import random
import statistics
import sys
import tempfile
import time
from typing import TYPE_CHECKING

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from benchmarks.measuring import RANKS, conditions, load_1min, parser, save, spread
from testbed.job import Job
from testbed.processes import Output, environment, free_port, torchrun

if TYPE_CHECKING:
    from collections.abc import Callable

WORKLOAD = str(ROOT / "benchmarks" / "workload.py")
PLACES = ("step", "forward", "backward", "optimizer", "before-commit")
SPACING = 120  # steps between kills: a second or more, and then what a recovery used is there again
LIMIT_S = 1800

Commits = dict[int, list[tuple[int, int]]]  # by rank: when (monotonic ns), which step
Kill = tuple[int, int]  # when, at which step


def plan_kills(
    count: int, spacing: int, seed: int, places: tuple[str, ...] = PLACES, how: str = "kill"
) -> str:
    """As workload.py takes them: seeded ranks at seeded steps and places."""
    chance = random.Random(seed)

    def kill(number: int) -> str:
        rank, step = chance.randrange(RANKS), spacing * number + chance.randrange(spacing // 2)
        return f"{rank}@{step}:{chance.choice(places)}:{how}"

    return ";".join(kill(number + 1) for number in range(count))


def read_facts(directory: pathlib.Path) -> tuple[Commits, list[Kill], set[str]]:
    """What the ranks noted: their commits, the kills in order, the final digests."""
    commits: Commits = {}
    kills: list[Kill] = []
    digests = set()
    for path in sorted(directory.glob("[0-9]*.txt")):
        for line in path.read_text().splitlines():
            kind, *rest = line.split()
            if kind == "commit":
                commits.setdefault(int(path.stem), []).append((int(rest[1]), int(rest[0])))
            elif kind == "kill":
                kills.append((int(rest[1]), int(rest[0])))
            elif kind == "digest":
                digests.add(rest[0])
    return commits, sorted(kills), digests


def times_to_commit(
    commits: Commits, kills: list[Kill], is_new: Callable[[Kill, int, int], bool]
) -> list[float]:
    """Seconds from each kill to the slowest rank's first new commit.

    `is_new(kill, when, step)`: whether a commit is one.
    """
    times = []
    for kill in kills:
        first = [
            min((when for when, step in line if is_new(kill, when, step)), default=math.inf)
            for line in commits.values()
        ]
        times.append((max(first) - kill[0]) / 1e9)
    return times


def is_beyond(kill: Kill, when: int, step: int) -> bool:
    """Of a recovery: a commit of a step that was new to the job.

    A survivor may commit the step it was in a moment after the kill, before it is interrupted: that
    step needs nothing of the dead rank any more. The clock therefore waits for a commit that every
    rank, the replacement too, has made after the kill.
    """
    return when > kill[0] and step > kill[1] + 1


def is_of_new_attempt(kill: Kill, when: int, _: int) -> bool:
    """Of a restart: a commit of any step by a process of the new attempt.

    A commit within 50 ms of the kill is the old attempt's; the new one needs seconds.
    """
    return when > kill[0] + 50_000_000


def steps_redone(commits: Commits) -> int:
    """Commits done twice."""
    return sum(len(line) - len({step for _, step in line}) for line in commits.values())


def run_to_end(command: list[str], env: dict[str, str], directory: pathlib.Path) -> None:
    """Raises SystemExit: it did not end well."""
    process = Output(command, env, directory / "out.txt", directory)
    try:
        finished = process.wait(LIMIT_S)
    finally:
        process.end()
    if finished.returncode != 0:
        raise SystemExit(f"{command} ended with {finished.returncode}:\n{finished.output[-4000:]}")


def c10d(port: int) -> tuple[str, str]:
    """Torchrun's options for a rendezvous on this port."""
    return "--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{port}"


def run_taskd(
    directory: pathlib.Path, steps: int, kills: str, mode: str = "taskd", ranks: int = RANKS
) -> pathlib.Path:
    """The workload with manager and agent; returns the folder of its facts."""
    job = Job(directory, MODE=mode, STEPS=str(steps), KILLS=kills)
    try:
        job.start_manager()
        command = torchrun(WORKLOAD, *c10d(job.master_port), nproc=ranks)
        run_to_end(command, job.env, directory)
    finally:
        job.close()
    return job.facts_dir


def run_torchrun(
    directory: pathlib.Path, steps: int, kills: str, *options: str, ranks: int = RANKS, **env: str
) -> pathlib.Path:
    """The workload under plain torchrun; returns the folder of its facts."""
    facts = directory / "facts"
    facts.mkdir(parents=True)
    env = environment(MODE="checkpoint", STEPS=str(steps), KILLS=kills, FACTS=str(facts), **env)
    command = torchrun(WORKLOAD, *options, nproc=ranks, module="torch.distributed.run")
    run_to_end(command, env, directory)
    return facts


def run_restarting(directory: pathlib.Path, steps: int, kills: str, port: int) -> pathlib.Path:
    """`run_torchrun` in the way in which it restarts fastest."""
    options = ("--max-restarts=1000", *c10d(port))
    fast = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    return run_torchrun(directory, steps, kills, *options, **fast)


def start_up_time(facts: pathlib.Path, started_ns: int) -> float:
    """Seconds to the slowest rank's first commit."""
    commits, _, _ = read_facts(facts)
    return (max(min(when for when, _ in line) for line in commits.values()) - started_ns) / 1e9


def measure_start_ups(base: pathlib.Path, count: int, port: int) -> dict[str, float]:
    """Medians, of pairs: one of each, in turn."""
    starts: dict[str, list[float]] = {"taskd": [], "torchrun": []}
    for i in range(count):
        began = time.monotonic_ns()
        starts["taskd"].append(start_up_time(run_taskd(base / f"start-a{i}", 3, ""), began))
        began = time.monotonic_ns()
        facts = run_restarting(base / f"start-b{i}", 3, "", port)
        starts["torchrun"].append(start_up_time(facts, began))
    return {key: round(statistics.median(values), 2) for key, values in starts.items() if values}


def row(what: str, times: list[float], commits: Commits, *, is_equal: bool) -> dict:
    """One line of the table."""
    redone = steps_redone(commits)
    return {"what": what, "n": len(times), **spread(times)} | {
        "steps_redone": redone,
        "digest_equal": is_equal,
    }


def measure_recoveries(
    base: pathlib.Path, count: int, seed: int, how: str = "kill"
) -> tuple[dict, list[float]]:
    """The decorated workload: its row, and each time. `how`: "kill" or "raise"."""
    steps = SPACING * (count + 2)
    # an exception between the optimizer's step and the commit is not retried, and not measured here
    places = PLACES if how == "kill" else ("step", "forward", "backward")
    _, _, expected = read_facts(run_taskd(base / f"clean-{how}", steps, ""))
    facts = run_taskd(base / how, steps, plan_kills(count, SPACING, seed, places, how))
    commits, done, digests = read_facts(facts)
    assert len(done) == count, f"{len(done)} of {count} faults happened"
    times = times_to_commit(commits, done, is_beyond)
    what = "taskd, recoverable" if how == "kill" else "taskd, an exception"
    return row(what, times, commits, is_equal=digests == expected), times


def measure_restarts(base: pathlib.Path, count: int, seed: int, port: int) -> list[dict]:
    """A workload that knows nothing of taskd, under it and under plain torchrun: their rows.

    Seven steps beyond each checkpoint or more: every restart redoes some, none starts from nothing.
    """
    spacing, rows = 60, []
    kills = plan_kills(count, spacing, seed).replace("before-commit", "step")
    steps = spacing * (count + 2)
    for label in ("taskd, unmodified script", "torchrun"):
        if label == "torchrun":
            facts = run_restarting(base / "few-torchrun", steps, kills, port)
        else:
            facts = run_taskd(base / "few-taskd", steps, kills, "checkpoint")
        commits, done, digests = read_facts(facts)
        assert len(done) == count, f"{len(done)} of {count} kills happened"
        times = times_to_commit(commits, done, is_of_new_attempt)
        rows.append(row(label, times, commits, is_equal=len(digests) == 1))
    return rows


def ratios_of(rows: list[dict], starts: dict[str, float]) -> dict[str, float]:
    """Those that could be measured."""
    found = {}
    if len(rows) >= 3:
        recoverable, unmodified, plain = (row["p50_s"] for row in rows[:3])
        found["recoverable_vs_torchrun"] = round(plain / recoverable, 1)
        found["unmodified_vs_torchrun"] = round(plain / unmodified, 1)
    if starts:
        found["start_up_vs_torchrun"] = round(starts["torchrun"] / starts["taskd"], 2)
    return found


def main() -> None:
    """Measure, print, and write."""
    options = parser(__doc__)
    options.add_argument("--kills", type=int, default=50)
    options.add_argument("--raises", type=int, default=0, help="exceptions, in a job of their own")
    options.add_argument("--torchrun-kills", type=int, default=5, help="0: without the comparison")
    options.add_argument("--start-ups", type=int, default=5)
    options.add_argument("--seed", type=int, default=1)
    given = options.parse_args()
    before, port = conditions(), free_port()
    with tempfile.TemporaryDirectory(prefix="taskd-bench-") as name:
        base = pathlib.Path(name)
        starts = measure_start_ups(base, given.start_ups, port)
        recovered, times = measure_recoveries(base, given.kills, given.seed)
        rows = [recovered]
        if given.torchrun_kills:
            rows += measure_restarts(base, given.torchrun_kills, given.seed, port)
        if given.raises:
            rows.append(measure_recoveries(base, given.raises, given.seed, "raise")[0])
    result = {
        "conditions": before | {"load_1min_after": load_1min()},
        "rows": rows,
        "times_s": [round(took, 4) for took in times],
        "ratios": ratios_of(rows, starts),
        "start_up_s": starts,
    }
    print(f"{'':28}{'n':>4}{'p50 s':>9}{'p99 s':>9}{'max s':>9}{'redone':>8}  digest equal")
    for each in rows:
        print(
            f"{each['what']:28}{each['n']:>4}{each['p50_s']:>9.3f}{each['p99_s']:>9.3f}"
            f"{each['max_s']:>9.3f}{each['steps_redone']:>8}  {each['digest_equal']}"
        )
    print(f"start-up to the first step: {starts}")
    print(f"ratios: {result['ratios']}\nconditions: {result['conditions']}")
    save(result, given.json)


if __name__ == "__main__":
    main()
