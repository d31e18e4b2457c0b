"""MindSpore under TaskD, on a real MindSpore: `make test-mindspore`.

    python tests/mindspore_lane.py [PYTEST'S ARGUMENTS]      in an environment that has MindSpore

Runs tests/mindspore and the cost of a commit, and writes docs/measured/faces/mindspore.txt. Ends
with 1 if a test failed. KILLS=2 in the environment is a shorter run.
"""

from __future__ import annotations

import importlib.metadata
import os
import pathlib
import platform
import subprocess
import sys
import tempfile
import time
from xml.etree import ElementTree as ET

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "measured" / "faces" / "mindspore.txt"


def run_tests(junit: pathlib.Path, arguments: list[str]) -> list[ET.Element]:
    """Each test, with its outcome and what it recorded."""
    command = [sys.executable, "-m", "pytest", "-v", "-o", "faulthandler_timeout=0"]
    command += ["-o", "junit_family=xunit1"]  # it has properties
    subprocess.run(
        [*command, f"--junit-xml={junit}", *(arguments or ["tests/mindspore"])],
        cwd=ROOT,
        check=False,
    )
    return list(ET.parse(junit).iter("testcase"))


def outcome(case: ET.Element) -> str:
    """As pytest says it."""
    wrong = next((part for part in case if part.tag in {"failure", "error", "skipped"}), None)
    return "passed" if wrong is None else f"{wrong.tag}: {(wrong.get('message') or '')[:300]}"


def lines_of(case: ET.Element) -> list[str]:
    """A test on the page."""
    found = [f"{outcome(case)}  {case.get('name')}  {float(case.get('time') or 0):.0f} s"]
    return found + [f"    {one.get('name')}: {one.get('value')}" for one in case.iter("property")]


def main() -> int:
    """Run, write, print; the exit code."""
    began, load = time.monotonic(), os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="taskd-mindspore-") as name:
        cases = run_tests(pathlib.Path(name) / "junit.xml", sys.argv[1:])
    cost = subprocess.run(
        [sys.executable, "benchmarks/mindspore_commit.py"], cwd=ROOT, check=False,
        capture_output=True, text=True,
    )  # fmt: skip
    took_s = time.monotonic() - began
    packages = ("mindspore", "numpy", "pyzmq")
    text = "\n".join(
        [
            ", ".join(f"{name} {importlib.metadata.version(name)}" for name in packages)
            + f", Python {platform.python_version()}",
            f"kills of each rank, and ends by SIGTERM: {os.environ.get('KILLS', '10')}",
            f"{len(os.sched_getaffinity(0))} cores, load {load:.1f}, {took_s:.0f} s",
            "",
            *(line for case in cases for line in lines_of(case)),
            "",
            "benchmarks/mindspore_commit.py:",
            cost.stdout.strip() or f"failed: {cost.stderr[-500:]}",
            "",
        ]
    )
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(text, encoding="utf-8")
    print(text)
    is_well = bool(cases) and all(outcome(case).startswith(("passed", "skipped")) for case in cases)
    return 0 if is_well and cost.returncode == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
