"""Thousands of recoveries in a few long jobs: nothing hangs, crashes, differs or grows.

    python benchmarks/soak.py [--recoveries 3000] [--seed N] [--busy N] [--json FILE]
                              [--layouts ddp=4 hsdp=2 fsdp-snapshots=2 fsdp1-hybrid=1]

4 ranks, gloo, torchrun, manager; one job for each layout, with its share of the recoveries. In each
job one rank is spared, another one in each layout; all others end themselves with SIGKILL at places
drawn from the seed, every third step, a third of them at any moment of a step. It fails if
- a job comes no further for 60 s, or does not end well;
- a process ends that was not to die, or a recovery is anything but `recover-in-place`;
- a rank's final digest (its part of weights and optimizer memory, its generator) is not that of a
  run without deaths;
- from the 100th recovery to the last, memory, descriptors or threads of the manager, the agent, the
  forkserver or the spared rank grow (memory of manager and agent: from the 500th, when their
  stories are full; in a job that is shorter than 1.5 times that it is written down, not judged).

Each process is made to stand still once, at the beginning, until taskd has read torch's flight
recorder: what allocators keep after that is taken before the first sample. Judged is a process's
own memory, RssAnon + RssShmem of proc(5); of the spared rank without what its malloc has and nobody
uses. Each of the two, all of it, and RssFile, whose pages come and go with the machine's need for
memory, are written down as well. A job that fails is kept, and its directory printed.
"""

from __future__ import annotations

import contextlib
import json
import pathlib
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from benchmarks.measuring import RANKS, conditions, load_1min, parser, save, spread
from benchmarks.soak_plan import MEMORY, descriptors_of, plan_kills, size_of
from testbed.job import Job
from testbed.proc import parent_of

WORKLOAD = str(ROOT / "benchmarks" / "soak_workload.py")
SILENCE_S = 60.0  # between two recoveries: a hundred times what one takes
LOOK_S = 0.2
SETTLED = 100  # recoveries after which nothing grows any more
# But the stories of manager and agent, rings of 10,000 entries, whose memory is their own; with
# fewer than half as many recoveries again nothing can be said.
STORY_IS_FULL = {"manager": 500, "agent": 500}
# By how much its own memory may grow in 1,000 recoveries, in kB. glibc's heap is in pieces after a
# while, and torch's TCPStore keeps 2.2 kB per store that was made anew; a leak of one process group
# has 100 kB and more.
SLOPE_KB = 4096
_COUNTED = ("fds", "threads")
_JUDGED = ("held_kb", *_COUNTED)
_WRITTEN = (*MEMORY, "own_kb", *_JUDGED)
_WINDOW = 25  # samples whose median is compared
# Samples whose fewest are compared: processes that are forked for the next faults, and recoveries
# that are under way, have descriptors in most of them.
_COUNTED_WINDOW = 100


class Layout(NamedTuple):
    """One of the ways in which the state is spread."""

    workload: str
    spared: int
    snapshot_every: int = 0


LAYOUTS = {
    "ddp": Layout("ddp", 0),
    "hsdp": Layout("hsdp", 3),
    "fsdp-snapshots": Layout("fsdp", 1, snapshot_every=2),
    "fsdp1-hybrid": Layout("flat-HYBRID_SHARD-orig", 2),
}
Sample = tuple[int, dict[str, int]]  # after so many recoveries: what `size_of` says


# ---------------------------------------------------------------- one job


class Watch:
    """Follows a job: its records as they come, and how large its lasting processes are then."""

    def __init__(self, job: Job) -> None:
        self._job, self._path, self._read = job, job.log_dir / "recoveries.jsonl", 0
        self.records: list[dict] = []
        self.samples: dict[str, list[Sample]] = {"manager": [], "agent": [], "forkserver": []}
        # of each process, what kinds of descriptors it had since SETTLED, by their number
        self.kinds: dict[str, dict[int, Counter[str]]] = {}
        self._pids: dict[str, int] = {}

    def follow(self) -> None:
        """Until torchrun has ended. Raises TimeoutError: nothing new for too long."""
        last = time.monotonic()
        while True:
            with contextlib.suppress(TimeoutError):
                self._job.agents[0].wait(LOOK_S)
                self._take()
                return
            if self._take():
                last = time.monotonic()
            elif time.monotonic() - last > SILENCE_S:
                raise TimeoutError(
                    f"no recovery and no end for {SILENCE_S} s after "
                    f"{len(self.records)} recoveries: {self._job.directory}"
                )

    def _take(self) -> bool:
        if not self._path.exists():
            return False
        with self._path.open("rb") as file:
            file.seek(self._read)
            lines = file.read().splitlines(keepends=True)
        whole = [line for line in lines if line.endswith(b"\n")]
        self._read += sum(map(len, whole))
        self.records += map(json.loads, whole)
        if whole:
            self._sample()
        return bool(whole)

    def _sample(self) -> None:
        if not self._pids:
            worker = next(
                int(path.stem.partition("-")[2])
                for path in self._job.facts_dir.glob(f"{self._spared()}-*.jsonl")
            )
            assert self._job.manager is not None
            self._pids = {
                "manager": self._job.manager.process.pid,
                "agent": self._job.agents[0].process.pid,
                "forkserver": parent_of(worker),
            }
        for name, pid in self._pids.items():
            with contextlib.suppress(OSError):  # the job has just ended
                self.samples[name].append((len(self.records), size_of(pid)))
                if len(self.records) >= SETTLED:
                    kinds = descriptors_of(pid)
                    self.kinds.setdefault(name, {}).setdefault(kinds.total(), kinds)

    def more_descriptors(self, name: str, grown: dict) -> str:
        """What a process has at last and did not have when it had settled."""
        kinds = self.kinds.get(name, {})
        now, then = kinds.get(grown["last"]), kinds.get(grown["settled"])
        return "" if now is None or then is None else f"; more of {dict(now - then)}"

    def _spared(self) -> int:
        return int(self._job.env["SPARED"])


def start(
    directory: pathlib.Path, layout: Layout, kills: int, planned: int, seed: str, step_s: float
) -> Job:
    """The job; nobody waits for it yet."""
    job = Job(
        directory,
        LAYOUT=layout.workload,
        SNAPSHOT_EVERY=str(layout.snapshot_every),
        SPARED=str(layout.spared),
        SEED=seed,
        KILLS=str(kills),
        KILLS_PLANNED=str(planned),
        STEP_S=str(step_s),
    )
    job.start_manager()
    job.start_agent(WORKLOAD, nproc=RANKS, options=(f"--max-restarts={kills or 1}",))
    return job


def undisturbed(
    directory: pathlib.Path, layout: Layout, planned: int
) -> tuple[dict[int, str], float]:
    """Digests by rank, and seconds per step."""
    job = start(directory, layout, 0, planned, "", 0.0)
    try:
        finished = job.agents[0].wait(SILENCE_S + planned)
        assert finished.returncode == 0, finished.output[-4000:]
        facts = job.facts()
    finally:
        job.close()
    step_s = max(fact["step_s"] for fact in facts if fact["what"] == "trained")
    return digests_of(facts), step_s


def digests_of(facts: list[dict]) -> dict[int, str]:
    """The final ones, by rank."""
    return {fact["rank"]: fact["digest"] for fact in facts if fact["what"] == "returned"}


def run(directory: pathlib.Path, name: str, kills: int, seed: str) -> dict:
    """One layout: its figures, and the list of what went wrong."""
    layout = LAYOUTS[name]
    expected, step_s = undisturbed(directory / f"{name}-undisturbed", layout, kills)
    began = time.monotonic()
    job = start(directory / name, layout, kills, kills, seed, step_s)
    watch = Watch(job)
    try:
        watch.follow()
        took = time.monotonic() - began
        codes = (
            job.agents[0].wait(0).returncode,
            job.manager.wait(20).returncode if job.manager else None,
        )
        facts, left = job.facts(), job.leftovers()
    finally:
        job.close()
    samples = watch.samples | {"survivor": survivor_sizes(facts, layout.spared)}
    (directory / name / "sizes.json").write_text(json.dumps(samples))
    growth = {
        who: growth_of(sizes, STORY_IS_FULL.get(who, SETTLED)) for who, sizes in samples.items()
    }
    problems = unplanned(facts, watch.records, plan_kills(kills, RANKS, layout.spared, seed))
    problems += [
        f"{who}: {problem}{watch.more_descriptors(who, grown['fds'])}"
        for who, grown in growth.items()
        for problem in grown.pop("problems")
    ]
    if codes != (0, 0):
        problems.append(f"torchrun and manager ended with {codes}")
    if digests_of(facts) != expected:
        problems.append("final digests differ from those of a run without deaths")
    if left:
        problems.append(f"processes left behind: {sorted(left)}")
    times = [record["total_s"] for record in watch.records]
    return {
        "layout": name,
        "recoveries": len(watch.records),
        "deaths": kills,
        "spared": layout.spared,
        "seed": seed,
        "step_ms": round(1e3 * step_s, 1),
        "seconds": round(took, 1),
        "recoveries_per_minute": round(60 * len(times) / took, 1),
        **spread(times),
        "steps_redone": sum(record["steps_redone"] for record in watch.records),
        "growth": growth,
        "problems": problems,
    }


# ---------------------------------------------------------------- judgement


def unplanned(facts: list[dict], records: list[dict], kills: list) -> list[str]:
    """Deaths that nobody planned, plans that did not happen, recoveries of another kind."""
    done = {fact["number"] for fact in facts if fact["what"] == "fault"}
    problems = [f"{len(done)} of {len(kills)} deaths happened"] if len(done) != len(kills) else []
    lives = Counter(fact["rank"] for fact in facts if fact["what"] == "entered")
    for rank in range(RANKS):
        wanted = 1 + sum(kill.rank == rank for kill in kills)
        if lives[rank] != wanted:
            problems.append(f"rank {rank} had {lives[rank]} lives instead of {wanted}")
    for record in records:
        strange = [
            fault
            for fault in record["faults"]
            if fault["kind"] != "killed" or not fault["detail"].startswith("SIGKILL")
        ]
        if strange or record["strategy"] != "recover-in-place":
            problems.append(
                f"generation {record['generation']}, "
                f"{record['strategy']}: "
                + "; ".join(
                    f"rank {fault['rank']} {fault['kind']} ({fault['detail']})"
                    for fault in record["faults"]
                )
            )
    return problems


def survivor_sizes(facts: list[dict], spared: int) -> list[Sample]:
    """Of the spared rank, after each of its entries."""
    entries = [fact for fact in facts if fact["what"] == "restored" and fact["rank"] == spared]
    return [(number, {key: entry[key] for key in _WRITTEN}) for number, entry in enumerate(entries)]


def growth_of(samples: list[Sample], memory_settled: int) -> dict:
    """First, settled and last size of a process, its slope, and what of that is too much.

    `memory_settled`: after so many recoveries its memory is.
    """
    total = samples[-1][0]
    found: dict = {"first": samples[0][1], "problems": []}
    for key in _WRITTEN:
        since = SETTLED if key in _COUNTED else memory_settled
        is_long = total >= since * 3 // 2
        begin = since if is_long else total // 3
        found[key] = grown = _growth([(at, size[key]) for at, size in samples if at >= begin], key)
        if key not in _JUDGED:
            continue
        grown["is_judged"] = is_long
        bound = 0 if key in _COUNTED else SLOPE_KB * max(1.0, (total - since) / 1000)
        if is_long and grown["last"] - grown["settled"] > bound:
            found["problems"].append(
                f"{key} grew from {grown['settled']} to {grown['last']} "
                f"from recovery {grown['since']} to {total}"
            )
    return found


def _growth(sizes: list[tuple[int, int]], key: str) -> dict:
    """Descriptors and threads of a recovery that is under way come on top of what stays.

    So of them the fewest in a window count; of memory the median.
    """
    numbers, values = [number for number, _ in sizes], [value for _, value in sizes]
    typical, window = (min, _COUNTED_WINDOW) if key in _COUNTED else (statistics.median, _WINDOW)
    return {
        "since": numbers[0],
        "settled": typical(values[:window]),
        "last": typical(values[-window:]),
        "max": max(values),
        "per_1000": round(statistics.linear_regression(numbers, values).slope * 1000, 1),
    }


# ---------------------------------------------------------------- the whole


def shares(words: list[str], total: int) -> dict[str, int]:
    """Recoveries by layout, from words like "ddp=4" or "ddp"."""
    weights = {}
    for word in words:
        name, _, weight = word.partition("=")
        if name not in LAYOUTS or not (weight or "1").isdigit():
            raise SystemExit(
                f"--layouts: {word} is none of {', '.join(LAYOUTS)}, with =WEIGHT or without"
            )
        weights[name] = int(weight or 1)
    return {
        name: max(1, -(-total * weight // sum(weights.values())))
        for name, weight in weights.items()
    }


@contextlib.contextmanager
def load(processes: int):
    """So many processes that take all the time that they get."""
    running = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)
    ]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def main() -> None:
    """Run all of it, print it, write it, and end with 1 if anything went wrong."""
    options_of = parser(__doc__)
    options_of.add_argument("--recoveries", type=int, default=3000)
    options_of.add_argument(
        "--layouts",
        nargs="+",
        default=["ddp=4", "hsdp=2", "fsdp-snapshots=2", "fsdp1-hybrid=1"],
        metavar="NAME[=WEIGHT]",
    )
    options_of.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    options_of.add_argument(
        "--busy", type=int, default=0, help="processes that compete for the cores"
    )
    options_of.set_defaults(json=ROOT / "docs" / "measured" / "soak.json")
    options = options_of.parse_args()
    planned = shares(options.layouts, options.recoveries)
    print(f"seed {options.seed}", flush=True)
    directory = pathlib.Path(tempfile.mkdtemp(prefix="taskd-soak-"))
    before, began, rows = conditions(), time.monotonic(), []
    with load(options.busy):
        for name, kills in planned.items():
            try:
                row = run(directory, name, kills, f"{options.seed}-{name}")
            except BaseException:
                print(f"kept: {directory}, seed {options.seed}", file=sys.stderr)
                raise
            rows.append(row)
            print(json.dumps(row, indent=1), flush=True)
    problems = [f"{row['layout']}: {problem}" for row in rows for problem in row["problems"]]
    result = {
        "recoveries": sum(row["recoveries"] for row in rows),
        "seconds": round(time.monotonic() - began, 1),
        "seed": options.seed,
        "busy": options.busy,
        "slope_bound_kb": SLOPE_KB,
        "problems": problems,
        "rows": rows,
        "conditions": before | {"torch": torch_version(), "load_1min_after": load_1min()},
    }
    save(result, options.json)
    if problems:
        raise SystemExit("\n".join([*problems, f"kept: {directory}, seed {options.seed}"]))
    shutil.rmtree(directory)


def torch_version() -> str:
    """Of the interpreter that runs the jobs."""
    return subprocess.run(
        [sys.executable, "-c", "import torch; print(torch.__version__)"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()


if __name__ == "__main__":
    main()
