"""Faults of every kind into jobs on network namespaces: what is lost, what hangs, and for how long.

    python benchmarks/chaos_hosts.py [--faults 300] [--seed 1] [--per-job 25] [--json FILE]
    python benchmarks/chaos_hosts.py --kinds kill+manager --faults 50 --fault-timeout 30

4 ranks (DDP, gloo) over 2 hosts, a spare on a third, the manager on a fourth
(benchmarks/chaos_hosts_job.py). `python -m taskd.chaos` injects the faults, spread over several
jobs; job number i has the seed --seed * 1000 + i. One run without faults is as long as the longest
of them; each rank's state after every 50 steps, random numbers included, must be the same in all.

Reported: faults by kind and by what they were recovered by, seconds from a fault to the first new
commit of the slowest rank, steps redone, jobs with other digests, faults that were not recovered
in time, recoveries that no fault explains, and processes that were replaced though nothing had
befallen them. The folder of a job with a problem is kept. Exit status 1 if there was one.
"""

from __future__ import annotations

import json
import os
import pathlib
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from benchmarks.chaos_hosts_job import what_befalls
from benchmarks.measuring import conditions, load_1min, parser, percentile, save
from taskd.chaos import schedule
from testbed.facts import facts_in
from testbed.hosts import missing

if TYPE_CHECKING:
    import argparse

KINDS = "kill,segv,stop,manager,agent,node,link"
JOB = ROOT / "benchmarks" / "chaos_hosts_job.py"
LIMIT_S = 90  # for a recovery; some take the lease of a node, 6 s, and the start of a torchrun
START_S, END_S = 120, 120
STEPS = 10**6  # it is told when it may end
OVER = "all faults are over"
RANKS = 4
HURT = {"kill": 1, "segv": 1, "stop": 1, "kill+manager": 1, "manager": 0, "agent": 2, "node": 2}
ROW = ("number", "kind", "what", "position", "recovered_by", "total_s", "trouble")  # of the JSON
_LOOK_S = 0.1


def environment(directory: pathlib.Path, options: argparse.Namespace, **env: str) -> dict[str, str]:
    return os.environ | {
        "CHAOS_HOSTS": str(directory),
        "END": str(directory / "end"),
        "STEPS": str(STEPS),
        "STEP_S": "0.02",
        "FAULT_TIMEOUT": str(options.fault_timeout),
        **env,
    }


def run_job(base: pathlib.Path, number: int, count: int, options: argparse.Namespace) -> dict:
    """One job with so many faults. Returns its verdict."""
    directory = base / f"job{number}"
    verdict, output = base / f"verdict{number}.json", base / f"chaos{number}.out"
    fault = shlex.join([sys.executable, str(JOB), "fault"])
    kinds = schedule.kinds_of(options.kinds)
    command = [
        *(sys.executable, "-m", "taskd.chaos", f"--seed={options.seed * 1000 + number}"),
        *(f"--faults={count}", f"--every={options.every}", f"--kinds={options.kinds}"),
        *(f"--limit={LIMIT_S}", f"--start-limit={START_S}", f"--json={verdict}"),
        *(f"--directory={base / f'chaos{number}'}",),
        *(f"--{kind}={fault}" for kind in schedule.BY_COMMAND if kind in kinds),
        *("--", sys.executable, str(JOB)),
    ]
    deadline = time.monotonic() + START_S + END_S + count * LIMIT_S
    with output.open("wb") as file:
        chaos = subprocess.Popen(
            command, env=environment(directory, options), stdout=file, stderr=file, cwd=ROOT
        )
    ended = 0.0
    try:
        while chaos.poll() is None and time.monotonic() < deadline:
            if not ended and OVER in output.read_text():
                (directory / "end").touch()
                ended = time.monotonic()
                deadline = min(deadline, ended + END_S)
            time.sleep(_LOOK_S)
    finally:
        if chaos.poll() is None:
            chaos.send_signal(signal.SIGTERM)
        chaos.wait()
    if not verdict.exists():
        said = output.read_text()[-3000:]
        return {
            "problems": [f"no verdict ({chaos.returncode}): {said}"],
            "faults": [],
            "others": [],
        }
    return json.loads(verdict.read_text())


def run_reference(base: pathlib.Path, steps: int, options: argparse.Namespace) -> dict:
    """So many steps without faults. Returns the digest of each rank after each noted step."""
    directory = base / "reference"
    env = environment(directory, options, STEPS=str(steps + 1), STEP_S="0")
    subprocess.run([sys.executable, str(JOB)], env=env, check=True, stdout=subprocess.DEVNULL)
    return digests_of(directory)


def digests_of(directory: pathlib.Path) -> dict[tuple[int, int], set[str]]:
    found: dict[tuple[int, int], set[str]] = {}
    for fact in facts_in(directory / "facts"):
        if fact["what"] == "digest":
            found.setdefault((fact["rank"], fact["step"]), set()).add(fact["digest"])
    return found


def processes_of(directory: pathlib.Path) -> int:
    """Training processes that have begun, replacements among them."""
    pids = {fact["pid"] for fact in facts_in(directory / "facts") if fact["what"] == "entered"}
    return len(pids)


def is_of_node(fault: dict) -> bool:
    return "node lost" in fault["found_as"]


def expected_processes(verdict: dict) -> int:
    """Those of the start, and a replacement for each that a fault has ended."""
    of_links = sum(
        2 for fault in verdict["faults"] if fault["kind"] == "link" and is_of_node(fault)
    )
    return RANKS + of_links + sum(HURT.get(fault["kind"], 0) for fault in verdict["faults"])


def spread(faults: list[dict]) -> dict[str, float]:
    times = [fault["total_s"] for fault in faults if fault["total_s"] is not None]
    if not times:
        return {}
    shares = {"p50_s": 0.5, "p95_s": 0.95, "p99_s": 0.99, "max_s": 1.0}
    return {"n": len(times)} | {
        name: round(percentile(times, share), 3) for name, share in shares.items()
    }


def summary(verdicts: list[dict]) -> dict[str, Any]:
    """Over all jobs."""
    faults = [fault for verdict in verdicts for fault in verdict["faults"]]
    happened = [fault for fault in faults if fault["has_happened"]]
    ways: dict[str, Counter[str]] = {}
    for fault in happened:
        way = str(fault["recovered_by"]) if fault["recovered_by"] else "not recovered"
        ways.setdefault(fault["kind"], Counter())[way] += 1
    for fault in happened:
        if fault["kind"] == "link":
            fault["what"] = what_befalls(fault["choice"])
    return {
        "injected": dict(Counter(fault["kind"] for fault in happened)),
        "recovered_by": {kind: dict(found) for kind, found in sorted(ways.items())},
        "links": dict(Counter(fault["what"] for fault in happened if "what" in fault)),
        "times": {
            kind: spread([fault for fault in happened if fault["kind"] == kind])
            for kind in sorted(ways)
        },
        "steps_redone": sum(fault["steps_redone"] for fault in happened),
        "not_recovered": sum(bool(fault["trouble"]) for fault in faults),
        "other_recoveries": [each for verdict in verdicts for each in verdict["others"]],
        "jobs": len(verdicts),
        "jobs_with_equal_digests": sum(verdict["digest_equal"] == "yes" for verdict in verdicts),
        "states_compared": sum(verdict.get("states", 0) for verdict in verdicts),
        "replaced_without_need": sum(verdict.get("too_many", 0) for verdict in verdicts),
        "problems": [problem for verdict in verdicts for problem in verdict["problems"]],
    }


def compare(verdict: dict, found: dict, expected: dict) -> None:
    """Adds to the verdict whether each noted state is that of the reference."""
    other = sorted(key for key, each in found.items() if each != expected.get(key))
    steps = max((step for _, step in found), default=0)
    is_whole = all((rank, steps) in found for rank in range(RANKS)) and steps > 0
    verdict["digest_equal"] = "yes" if not other and is_whole else "no"
    verdict["states"] = len(found)
    if other or not is_whole:
        verdict["problems"].append(
            f"the states differ from those without faults: (rank, step) {other[:8]} ..., whole: "
            f"{is_whole}"
        )


def table(result: dict) -> list[str]:
    lines = [f"{'fault':14}{'n':>5}{'p50 s':>9}{'p95 s':>9}{'p99 s':>9}{'max s':>9}  recovered by"]
    for kind, count in sorted(result["injected"].items()):
        figures = result["times"].get(kind, {})
        times = "".join(
            f"{figures[name]:9.3f}" if name in figures else f"{'-':>9}"
            for name in ("p50_s", "p95_s", "p99_s", "max_s")
        )
        ways = ", ".join(f"{way} {n}" for way, n in result["recovered_by"].get(kind, {}).items())
        lines.append(f"{kind:14}{count:5}{times}  {ways}")
    names = ("steps_redone", "not_recovered", "replaced_without_need", "jobs")
    lines += [f"{name.replace('_', ' '):24}{result[name]}" for name in names]
    lines.append(f"{'jobs with equal digests':24}{result['jobs_with_equal_digests']}")
    lines.append(f"{'other recoveries':24}{len(result['other_recoveries'])}")
    return [*lines, *result["problems"]]


def main() -> int:
    """Measure, print, and write."""
    made = parser(__doc__)
    made.add_argument("--faults", type=int, default=300)
    made.add_argument("--seed", type=int, default=1)
    made.add_argument("--per-job", type=int, default=25)
    made.add_argument("--every", type=float, default=1.0)
    made.add_argument("--kinds", default=KINDS)
    made.add_argument("--fault-timeout", type=int, default=6)
    made.add_argument("--limit", type=float, default=3600.0, help="no job begins after it, in s")
    options = made.parse_args()
    reason = missing()
    if reason is not None:
        raise SystemExit(reason)
    before, began = conditions(), time.monotonic()
    base = pathlib.Path(tempfile.mkdtemp(prefix="taskd-chaos-hosts-"))
    verdicts: list[dict] = []
    for number, first in enumerate(range(0, options.faults, options.per_job)):
        if time.monotonic() - began > options.limit:
            break
        count = min(options.per_job, options.faults - first)
        verdicts.append(run_job(base, number, count, options))
        found = verdicts[-1]
        print(f"job {number}: {len(found['faults'])} of {count}, {found['problems']}", flush=True)
    states = [digests_of(base / f"job{number}") for number in range(len(verdicts))]
    longest = max((step for found in states for _, step in found), default=0)
    expected = run_reference(base, longest, options)
    for number, (verdict, found) in enumerate(zip(verdicts, states, strict=True)):
        compare(verdict, found, expected)
        too_many = processes_of(base / f"job{number}") - expected_processes(verdict)
        verdict["too_many"] = too_many
        if verdict["problems"] or too_many or verdict["others"]:
            print(f"see {base}/job{number}, chaos{number}: {too_many} processes too many")
        else:
            for name in (f"job{number}", f"chaos{number}"):
                shutil.rmtree(base / name)
    result = summary(verdicts)
    measured = before | {"load_1min_after": load_1min(), "duration_s": time.monotonic() - began}
    measured |= {name: getattr(options, name) for name in
                 ("seed", "faults", "per_job", "every", "kinds", "fault_timeout")}  # fmt: skip
    rows = [
        {"job": number} | {name: fault[name] for name in ROW if name in fault}
        for number, verdict in enumerate(verdicts)
        for fault in verdict["faults"]
    ]
    save({"conditions": measured, **result, "faults": rows}, options.json)
    print("\n".join(table(result)))
    if any(base.glob("job*")):
        shutil.rmtree(base / "reference")
    else:
        shutil.rmtree(base)
    return int(bool(result["problems"]))


if __name__ == "__main__":
    sys.exit(main())
