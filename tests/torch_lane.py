"""What must work on another torch: `make test-torch TORCH_VERSION=2.15.0`.

    python tests/torch_lane.py        in an environment that has that torch

Runs the tests of `LANE`, then ten kills of benchmarks/recovery.py, and writes one page to
docs/measured/torch/VERSION.txt. Ends with 1 if a test failed, a kill was not recovered, or the
digest differs.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import pathlib
import platform
import subprocess
import sys
import tempfile
import time
from xml.etree import ElementTree as ET

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGES = ROOT / "docs" / "measured" / "torch"
KILLS = 10

_PROCESS = "tests/process/test_"
_DUMP = f"{_PROCESS}dump.py::test_the_next_start_goes_on_to_the_last_bit"
_HANG = f"{_PROCESS}hangs.py::test_a_rank_that_stands_still_is_replaced"
# What each group shows -> node ids.
LANE = {
    "seams": ("tests/compat/test_torch_seams.py",),
    "other torches are left alone": (
        f"{_PROCESS}patch.py::test_unknown_torch_is_said_and_left_alone",
        f"{_PROCESS}patch.py::test_a_torch_that_is_not_tested_and_looks_like_one_that_is_works",
    ),
    "internals that are not there": ("tests/unit/worker/test_internals.py",),
    "DDP: each rank killed, at each place": (f"{_PROCESS}recovery.py::test_twenty_in_one_run",),
    "FSDP2, HSDP: each rank killed": (f"{_PROCESS}sharded.py::test_each_rank_in_one_run",),
    "FSDP1: two ranks killed": (
        f"{_PROCESS}fsdp1.py::test_a_shard_comes_from_node_memory[flat-FULL_SHARD-1-backward-end]",
    ),
    "dump and resume": (f"{_DUMP}[1@5:forward:kill-5-rank 1 ended with SIGKILL]",),
    "hang": (f"{_HANG}[forward-spin-with the interpreter lock held]",),
    "unmodified script": (
        f"{_PROCESS}unmodified.py::test_an_unmodified_script_is_restarted_warm[c10d]",
    ),
}


def run_tests(junit: pathlib.Path) -> dict[str, str]:
    """Each test's outcome by its name: "passed", or why not."""
    ids = [test for group in LANE.values() for test in group]
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "loadgroup"]
    subprocess.run([*command, f"--junit-xml={junit}", *ids], cwd=ROOT, check=False)
    found = {}
    for case in ET.parse(junit).iter("testcase"):
        wrong = next((part for part in case if part.tag in {"failure", "error", "skipped"}), None)
        name = f"{case.get('classname')}.{case.get('name')}"
        found[name] = "passed" if wrong is None else f"{wrong.tag}: {wrong.get('message')}"
    return found


def measure(folder: pathlib.Path) -> dict:
    """The row of ten kills; empty if the benchmark failed."""
    result = folder / "recovery.json"
    command = [sys.executable, "benchmarks/recovery.py", "--kills", str(KILLS), "--json", result]
    with contextlib.suppress(subprocess.CalledProcessError):
        subprocess.run(
            [*command, "--torchrun-kills", "0", "--start-ups", "0"], cwd=ROOT, check=True
        )
        (row,) = json.loads(result.read_text())["rows"]
        return row
    return {}


def page(outcomes: dict[str, str], row: dict, load: float, took_s: float) -> str:
    """What is written, and why it is not whole if it is not."""
    versions = {name: importlib.metadata.version(name) for name in ("torch", "numpy", "pyzmq")}
    count = dict.fromkeys(("passed", "failed", "skipped"), 0)
    others = []
    for name, outcome in outcomes.items():
        kind, _, why = outcome.partition(": ")
        kind = {"failure": "failed", "error": "failed"}.get(kind, kind)
        count[kind] += 1
        if kind != "passed":
            others.append(f"- {kind}: {name}\n  {' '.join(why.split())[:300]}")
    lines = [
        ", ".join(f"{name} {version}" for name, version in versions.items())
        + f", Python {platform.python_version()}",
        f"{len(os.sched_getaffinity(0))} cores, load {load:.1f} at the beginning, {took_s:.0f} s",
        "",
        "tests: " + ", ".join(f"{number} {kind}" for kind, number in count.items()),
        *(f"  {what}" for what in LANE),
        *others,
        "",
    ]
    if not row:
        lines.append(f"recovery: the job with {KILLS} kills did not end well")
    else:
        lines.append(
            f"recovery, {row['n']} kills, 4 ranks, DDP, gloo: p50 {row['p50_s']:.3f} s, "
            f"slowest {row['max_s']:.3f} s, {row['steps_redone']} steps redone"
        )
        is_equal = "yes" if row["digest_equal"] else "NO"
        lines.append(f"digest equal to that without faults: {is_equal}")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run, write, print; the exit code."""
    began, load = time.monotonic(), os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="taskd-torch-lane-") as name:
        folder = pathlib.Path(name)
        outcomes = run_tests(folder / "junit.xml")
        row = measure(folder)
    text = page(outcomes, row, load, time.monotonic() - began)
    PAGES.mkdir(exist_ok=True)
    version = importlib.metadata.version("torch").partition("+")[0]
    (PAGES / f"{version}.txt").write_text(text, encoding="utf-8")
    print(text)
    is_well = all(outcome.startswith(("passed", "skipped")) for outcome in outcomes.values())
    return 0 if is_well and row and row["digest_equal"] else 1


if __name__ == "__main__":
    sys.exit(main())
