"""Recovery time against plain torchrun, both on the same machine in one run.

    python benchmarks/recovery.py [--kills 50] [--json FILE]

4 ranks, gloo, DDP. A seeded victim kills itself with SIGKILL at a seeded step and place. Reported:
seconds from the kill to the first new commit of the slowest rank; steps redone; whether the final
digest equals that of a run without faults. The alternative is plain torchrun with c10d in the way
that works best for it (TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, a checkpoint every 50 steps). Its
clock stops at the first step after the restart, not at the step it had lost: the comparison favours
it.
"""

from __future__ import annotations

import argparse
import json
import math
import pathlib
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from tests.process.harness import Job, environment

WORKLOAD = str(ROOT / "benchmarks" / "workload.py")
PLACES = ("step", "forward", "backward", "optimizer", "before-commit")
RANKS = 4


def percentile(values: list[float], fraction: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.ceil(fraction * len(ordered)) - 1)]


def plan_kills(count: int, spacing: int, seed: int) -> str:
    chance = random.Random(seed)
    return ";".join(
        f"{chance.randrange(RANKS)}@{spacing * (i + 1) + chance.randrange(spacing // 2)}:{chance.choice(PLACES)}"
        for i in range(count)
    )


def read_facts(
    directory: pathlib.Path,
) -> tuple[dict[int, list[tuple[int, int]]], list[tuple[int, int, str]], set[str]]:
    commits: dict[int, list[tuple[int, int]]] = {}
    kills: list[tuple[int, int, str]] = []
    digests = set()
    for path in sorted(directory.glob("[0-9]*.txt")):
        for line in path.read_text().splitlines():
            kind, *rest = line.split()
            if kind == "commit":
                commits.setdefault(int(path.stem), []).append((int(rest[1]), int(rest[0])))
            elif kind == "kill":
                kills.append((int(rest[1]), int(rest[0]), rest[3]))
            elif kind == "digest":
                digests.add(rest[0])
    return commits, sorted(kills), digests


def recovery_times(
    commits: dict[int, list[tuple[int, int]]], kills: list[tuple[int, int, str]]
) -> tuple[list[float], int]:
    """Seconds from each kill to the slowest rank's first commit of a step that was new to the job.

    Commits done twice.

    A survivor may commit the step it was in a moment after the kill, before it is interrupted: that
    step needs nothing of the dead rank any more. The clock therefore waits for a commit that every
    rank, the replacement too, has made after the kill.
    """
    times = []
    for at, step, _ in kills:
        first = []
        for line in commits.values():
            later = [when for when, done in line if when > at and done > step + 1]
            first.append(min(later) if later else math.inf)
        times.append((max(first) - at) / 1e9)
    redone = sum(len(line) - len({step for _, step in line}) for line in commits.values())
    return times, redone


def restart_times(
    commits: dict[int, list[tuple[int, int]]], kills: list[tuple[int, int, str]]
) -> tuple[list[float], int]:
    """The same for restarts.

    To the slowest rank's first commit of any step by a process of the new attempt.
    """
    times = []
    for at, _, _ in kills:
        first = []
        for line in commits.values():
            # A commit within 50 ms of the kill is the old attempt's; the new one needs seconds.
            later = [when for when, _ in line if when > at + 50_000_000]
            first.append(min(later) if later else math.inf)
        times.append((max(first) - at) / 1e9)
    redone = sum(len(line) - len({step for _, step in line}) for line in commits.values())
    return times, redone


def run_taskd(directory: pathlib.Path, steps: int, kills: str, mode: str = "taskd") -> pathlib.Path:
    job = Job(directory, MODE=mode, STEPS=str(steps), KILLS=kills)
    try:
        job.start_manager()
        command = [
            sys.executable,
            "-m",
            "taskd.run",
            f"--nproc-per-node={RANKS}",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint=localhost:{job.master_port}",
            WORKLOAD,
        ]
        with (directory / "out.txt").open("wb") as out:
            code = subprocess.run(
                command, env=job.env, stdout=out, stderr=out, timeout=1800, check=False
            ).returncode
        if code != 0:
            raise SystemExit(
                f"taskd run failed ({code}):\n" + (directory / "out.txt").read_text()[-4000:]
            )
    finally:
        job.close()
    return job.facts_dir


def run_torchrun(directory: pathlib.Path, steps: int, kills: str, port: int) -> pathlib.Path:
    facts = directory / "facts"
    facts.mkdir(parents=True)
    env = environment(
        MODE="checkpoint",
        STEPS=str(steps),
        KILLS=kills,
        FACTS=str(facts),
        TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",
    )
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        f"--nproc-per-node={RANKS}",
        "--max-restarts=1000",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint=localhost:{port}",
        WORKLOAD,
    ]
    with (directory / "out.txt").open("wb") as out:
        code = subprocess.run(
            command, env=env, stdout=out, stderr=out, timeout=1800, check=False
        ).returncode
    if code != 0:
        raise SystemExit(
            f"torchrun run failed ({code}):\n" + (directory / "out.txt").read_text()[-4000:]
        )
    return facts


def start_up_time(facts: pathlib.Path, started_ns: int) -> float:
    commits, _, _ = read_facts(facts)
    return (max(min(when for when, _ in line) for line in commits.values()) - started_ns) / 1e9


def summary(name: str, times: list[float], redone: int, equal: bool) -> dict:
    return {
        "what": name,
        "n": len(times),
        "p50_s": round(statistics.median(times), 3),
        "p99_s": round(percentile(times, 0.99), 3),
        "min_s": round(min(times), 3),
        "max_s": round(max(times), 3),
        "steps_redone": redone,
        "digest_equal": equal,
    }


def conditions() -> dict:
    began = time.perf_counter()
    socket.getnameinfo(("127.0.0.1", 1), 0)
    return {
        "world_size": RANKS,
        "cores": len(__import__("os").sched_getaffinity(0)),
        "load_1min": round(__import__("os").getloadavg()[0], 2),
        "reverse_dns_of_loopback_s": round(time.perf_counter() - began, 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--torchrun-kills", type=int, default=5)
    parser.add_argument("--start-ups", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    spacing = 12
    rows: list[dict] = []
    result: dict = {"conditions": conditions(), "rows": rows}
    with tempfile.TemporaryDirectory(prefix="taskd-bench-") as name:
        base = pathlib.Path(name)
        port = Job(base / "port").master_port

        starts: dict[str, list[float]] = {"taskd": [], "torchrun": []}
        for i in range(options.start_ups):  # paired: one of each, in turn
            began = time.monotonic_ns()
            starts["taskd"].append(start_up_time(run_taskd(base / f"start-a{i}", 3, ""), began))
            began = time.monotonic_ns()
            starts["torchrun"].append(
                start_up_time(run_torchrun(base / f"start-b{i}", 3, "", port), began)
            )

        steps = spacing * (options.kills + 2)
        _, _, expected = read_facts(run_taskd(base / "clean", steps, ""))
        kills = plan_kills(options.kills, spacing, options.seed)
        commits, done, digests = read_facts(run_taskd(base / "kills", steps, kills))
        assert len(done) == options.kills, f"{len(done)} of {options.kills} kills happened"
        times, redone = recovery_times(commits, done)
        rows.append(summary("taskd, recoverable", times, redone, digests == expected))
        result["times_s"] = [round(t, 4) for t in times]

        # Seven steps beyond each checkpoint or more: every restart redoes some, none starts from
        # nothing.
        few = ";".join(
            spec.replace("before-commit", "step")
            for spec in plan_kills(options.torchrun_kills, 60, options.seed).split(";")
        )
        long = 60 * (options.torchrun_kills + 2)
        for label, mode in (("taskd, unmodified script", "taskd"), ("torchrun", "torchrun")):
            where = base / f"few-{mode}"
            facts = (
                run_taskd(where, long, few, "checkpoint")
                if mode == "taskd"
                else run_torchrun(where, long, few, port)
            )
            commits, done, digests = read_facts(facts)
            assert len(done) == options.torchrun_kills, f"{len(done)} kills happened"
            times, redone = restart_times(commits, done)
            rows.append(summary(label, times, redone, len(digests) == 1))
    plain = rows[2]["p50_s"]
    result["ratios"] = {
        "recoverable_vs_torchrun": round(plain / rows[0]["p50_s"], 1),
        "unmodified_vs_torchrun": round(plain / rows[1]["p50_s"], 1),
        "start_up_vs_torchrun": round(
            statistics.median(starts["torchrun"]) / statistics.median(starts["taskd"]), 2
        ),
    }
    result["start_up_s"] = {
        key: round(statistics.median(values), 2) for key, values in starts.items()
    }
    result["conditions"]["load_1min_after"] = conditions()["load_1min"]
    print(f"{'':28}{'n':>4}{'p50 s':>9}{'p99 s':>9}{'max s':>9}{'redone':>8}  digest equal")
    for row in rows:
        print(
            f"{row['what']:28}{row['n']:>4}{row['p50_s']:>9.3f}{row['p99_s']:>9.3f}{row['max_s']:>9.3f}"
            f"{row['steps_redone']:>8}  {row['digest_equal']}"
        )
    print(f"start-up to the first step: {result['start_up_s']}")
    print(f"ratios: {result['ratios']}\nconditions: {result['conditions']}")
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
