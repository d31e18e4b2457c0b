"""Recovery time where state is sharded.

The dead rank's part comes from its replica (HSDP), or from node memory (FSDP over all ranks).

    python benchmarks/sharded_recovery.py [--kills 30] [--per-run 10] [--seed 1] [--json FILE]
    python benchmarks/sharded_recovery.py --layout fsdp --snapshot-every 3

4 ranks, gloo, torchrun, manager. Seeded ranks kill themselves with SIGKILL at seeded steps and
places (step, forward, backward-begin, backward-end, before-vote), several in one run. Reported:
seconds from the kill, noted right before it, to the first new commit of the slowest rank, that is
of the step that was under way: steps that are done again count into the time. Steps redone, from
the commits themselves; and whether every rank's final digest (its part of weights and optimizer
memory, its generator) is that of a run without kills. A run that fails is kept, and its directory
printed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import pathlib
import random
import shutil
import statistics
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from benchmarks.recovery import RANKS, conditions, percentile
from tests.process.harness import Job

WORKLOAD = ROOT / "benchmarks" / "sharded_workload.py"
PLACES = ("step", "forward", "backward-begin", "backward-end", "before-vote")
SPACING = 12  # steps between kills, so that one is over when the next comes
RUN_S = 300
TARGET_S = 1.0


def read_facts(job: Job) -> list[dict]:
    """What the workers noted, with rank and pid, in order of time.

    A line that a kill cut off is left out.
    """
    found = []
    for path in job.facts_dir.glob("*.jsonl"):
        rank, _, pid = path.stem.partition("-")
        lines = path.read_text().splitlines(keepends=True)
        found += [
            json.loads(line) | {"rank": int(rank), "pid": int(pid)}
            for line in lines
            if line.endswith("\n")
        ]
    return sorted(found, key=lambda fact: fact["time"])


def plan_kills(count: int, seed: str) -> list[str]:
    chance = random.Random(seed)
    return [
        f"{chance.randrange(RANKS)}@{SPACING * (i + 1) + chance.randrange(SPACING // 2)}:{chance.choice(PLACES)}"
        for i in range(count)
    ]


def final_digests(facts: list[dict]) -> dict[int, str]:
    return {fact["rank"]: fact["digest"] for fact in facts if fact["what"] == "returned"}


def run(
    directory: pathlib.Path, options: argparse.Namespace, steps: int, kills: list[str]
) -> tuple[list[dict], list[dict]]:
    """Facts and records of one run that must end well."""
    job = Job(
        directory,
        LAYOUT=options.layout,
        HIDDEN=str(options.hidden),
        LAYERS=str(options.layers),
        STEPS=str(steps),
        KILLS=";".join(kills),
        SNAPSHOT_EVERY=str(options.snapshot_every),
    )
    try:
        finished = job.run(
            str(WORKLOAD),
            nproc=RANKS,
            timeout_s=RUN_S,
            options=(f"--max-restarts={len(kills) or 1}",),
        )
        assert finished.returncode == 0, f"exit {finished.returncode}:\n{finished.output[-4000:]}"
        facts, records = read_facts(job), job.recoveries()
    finally:
        job.close()
    done = {fact["number"] for fact in facts if fact["what"] == "fault"}
    assert done == set(range(len(kills))), f"{len(done)} of {len(kills)} kills happened"
    assert len(final_digests(facts)) == RANKS
    return facts, records


def times_and_redone(facts: list[dict]) -> tuple[list[float], list[int]]:
    """For each kill: seconds to the slowest rank's first commit of the step in which it came.

    Steps done twice for it.
    """
    times, redone = [], []
    faults = [fact for fact in facts if fact["what"] == "fault"]
    ends = [fact["time"] for fact in faults[1:]] + [math.inf]
    for fault, end in zip(faults, ends, strict=True):
        first: dict[int, float] = {}
        again = []
        for rank in range(RANKS):
            commits = [
                fact for fact in facts if fact["what"] == "committed" and fact["rank"] == rank
            ]
            before = {fact["step"] for fact in commits if fact["time"] <= fault["time"]}
            after = [fact for fact in commits if fault["time"] < fact["time"] <= end]
            first[rank] = min(
                (fact["time"] for fact in after if fact["step"] > fault["step"]), default=math.inf
            )
            again.append(len([fact for fact in after if fact["step"] in before]))
        times.append(max(first.values()) - fault["time"])
        redone.append(max(again))
    return times, redone


def measure(options: argparse.Namespace, base: pathlib.Path) -> dict:
    times: list[float] = []
    redone: list[int] = []
    strategies: dict[str, int] = {}
    counts = [
        min(options.per_run, options.kills - first)
        for first in range(0, options.kills, options.per_run)
    ]
    steps = SPACING * (max(counts) + 2)
    undisturbed, _ = run(base / "undisturbed", options, steps, [])
    expected = final_digests(undisturbed)
    equal = True
    for number, count in enumerate(counts):
        kills = plan_kills(count, f"{options.seed}-{number}")
        facts, records = run(base / f"run-{number}", options, steps, kills)
        equal = equal and final_digests(facts) == expected
        took, again = times_and_redone(facts)
        assert len(took) == count
        times, redone = times + took, redone + again
        for record in records:
            strategies[record["strategy"]] = strategies.get(record["strategy"], 0) + 1
        print(
            f"run {number}: {count} kills, slowest {max(took):.3f} s, digests "
            f"{'equal' if equal else 'DIFFER'}",
            flush=True,
        )
    commits = [
        fact["time"] for fact in undisturbed if fact["what"] == "committed" and fact["rank"] == 0
    ]
    return {
        "layout": options.layout, "snapshot_every": options.snapshot_every, "n": len(times), "p50_s": round(statistics.median(times), 3),
        "p99_s": round(percentile(times, 0.99), 3), "max_s": round(max(times), 3), "min_s": round(min(times), 3),
        "step_ms": round(1e3 * statistics.median(b - a for a, b in itertools.pairwise(commits)), 1),
        "state_mb": round(12e-6 * options.layers * (options.hidden + 1) * options.hidden, 1),
        "rss_mb": max(fact["rss_mb"] for fact in undisturbed if fact["what"] == "memory"),
        "steps_redone": sum(redone), "steps_redone_max": max(redone), "strategies": strategies, "digests_equal": equal,
        "target_met": statistics.median(times) <= TARGET_S and equal and max(redone) <= options.snapshot_every,
        "times_s": [round(took, 4) for took in times],
    }  # fmt: skip


def main() -> None:
    """Measure, print, and end with 1 if the target is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--per-run", type=int, default=10)
    parser.add_argument("--layout", choices=("hsdp", "fsdp"), default="hsdp")
    parser.add_argument(
        "--snapshot-every",
        type=int,
        default=0,
        help="steps between snapshots in node memory; fsdp needs them",
    )
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    if options.layout == "fsdp" and not options.snapshot_every:
        parser.error("--layout fsdp: a dead rank's part is nowhere else: give --snapshot-every")
    base = pathlib.Path(tempfile.mkdtemp(prefix="taskd-sharded-"))
    before = conditions()
    try:
        result = measure(options, base)
    except BaseException:
        print(f"kept: {base}, seed {options.seed}", file=sys.stderr)
        raise
    shutil.rmtree(base)
    result["conditions"] = before | {"load_1min_after": conditions()["load_1min"]}
    print(json.dumps({key: value for key, value in result.items() if key != "times_s"}, indent=1))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    if not result["target_met"]:
        raise SystemExit(
            f"target missed: p50 at most {TARGET_S} s, all digests equal, at most "
            f"{options.snapshot_every} steps redone per kill"
        )


if __name__ == "__main__":
    main()
