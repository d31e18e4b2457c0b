"""How long a job stops when one of four ranks hangs; and that a job that is only slow goes on.

    python benchmarks/hangs.py [--times 10] [--steps 10000]

Hangs: the ways are SIGSTOP, an endless loop in C that keeps the interpreter lock, and sleep in
Python before the all-reduce, on alternating ranks, with steps of 50 ms and default limits. Measured
from the hang to every rank's first new commit; the record must name the rank, and the final digest
must be that of a run without a hang.

False alarms: `--steps` steps of 50 ms of which 1 % take 20 times as long on one rank, a first step
of 20 s, and two checkpoints of 60 s. Any recovery is a false alarm.

`--json FILE` writes the figures.
"""

from __future__ import annotations

import pathlib
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from benchmarks.measuring import conditions, parser, percentile, save
from testbed.job import Job

STEPS, STEP_S, HANG_AT = 60, "0.05", 30
WAYS = {
    "stop": "SIGSTOP",
    "spin": "endless loop in C with the interpreter lock",
    "sleep": "asleep before its all-reduce",
}


def run(faults: str) -> tuple[list[dict], list[dict], str]:
    """Facts of one run (faults and commits), its recoveries, and the one digest of all ranks."""
    with tempfile.TemporaryDirectory(prefix="taskd-hangs-") as name:
        job = Job(pathlib.Path(name), FAULTS=faults, STEPS=str(STEPS), SLEEP_S=STEP_S)
        try:
            finished = job.run(timeout_s=120)
            if finished.returncode != 0:
                raise SystemExit(finished.output[-4000:])
            (digest,) = set(job.digests().values())
            return job.facts(), job.recoveries(), digest
        finally:
            job.close()


def standstill_s(facts: list[dict]) -> float:
    """From the hang to the first new commit of the last rank."""
    (fault,) = (fact for fact in facts if fact["what"] == "fault")
    first = {}
    for fact in facts:
        if fact["what"] == "committed" and fact["time"] > fault["time"] and fact["step"] > HANG_AT:
            first.setdefault(fact["rank"], fact["time"])
    assert len(first) == 4
    return max(first.values()) - fault["time"]


def measure_hangs(times: int) -> dict[str, dict]:
    """Each way of hanging, `times` times."""
    _, _, expected = run("")
    found = {}
    for how, text in WAYS.items():
        took = []
        for number in range(times):
            rank = number % 4
            facts, records, digest = run(
                f"{rank}@{HANG_AT}:{('step', 'forward')[number % 2]}:{how}"
            )
            (record,) = records
            assert [(fault["rank"], fault["kind"]) for fault in record["faults"]] == [
                (rank, "hang")
            ], record
            assert record["steps_redone"] == 0
            assert digest == expected
            took.append(standstill_s(facts))
        found[text] = {"times": times, "p50_s": percentile(took, 0.5), "max_s": max(took)}
        print(
            f"{text}: {times} hangs, all named, digest equal; p50 {percentile(took, 0.5):.2f} s, "
            f"max {max(took):.2f} s",
            flush=True,
        )
    return found


def measure_false_alarms(steps: int) -> dict:
    """One long run that is only slow."""
    with tempfile.TemporaryDirectory(prefix="taskd-slow-") as name:
        job = Job(
            pathlib.Path(name),
            STEPS=str(steps),
            STEP_S=STEP_S,
            SLOW_SHARE="0.01",
            FIRST_S="20",
            SAVE_AT=f"{steps // 3},{2 * steps // 3}",
            SAVE_S="60",
        )
        try:
            finished = job.run("slow.py", timeout_s=600 + steps * 0.2)
            if finished.returncode != 0:
                raise SystemExit(finished.output[-4000:])
            found = {
                "steps": steps,
                "slow_steps": len(job.facts("slow")),
                "checkpoints_of_60_s": len(job.facts("saved")),
                "false_alarms": len(job.recoveries()),
            }
        finally:
            job.close()
    print(f"{found}", flush=True)
    return found


def main() -> None:
    """Measure, and say whether the targets are met."""
    options_of = parser(__doc__)
    options_of.add_argument("--times", type=int, default=10)
    options_of.add_argument("--steps", type=int, default=10_000)
    options = options_of.parse_args()
    result = {"conditions": conditions()}
    if options.times:
        result["hangs"] = measure_hangs(options.times)
    if options.steps:
        result["slow"] = measure_false_alarms(options.steps)
    save(result, options.json)


if __name__ == "__main__":
    main()
