"""The tests of one framework, in an environment that has it: `make test-tensorflow`.

    python tests/face_lane.py tensorflow tensorflow-cpu keras numpy

Runs tests/NAME, and writes docs/measured/faces/NAME.txt: the versions of the packages, the machine,
and each test with its outcome. Ends with the status of pytest.
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
PAGES = ROOT / "docs" / "measured" / "faces"


def outcomes(junit: pathlib.Path) -> list[str]:
    """One line for each test: what became of it, after how many seconds, and why if not well."""
    lines = []
    for case in ET.parse(junit).iter("testcase"):
        wrong = next((part for part in case if part.tag in {"failure", "error", "skipped"}), None)
        kind = "passed" if wrong is None else wrong.tag
        lines.append(f"{kind} {float(case.get('time', 0)):6.0f} s  {case.get('name')}")
        if wrong is not None:
            lines.append(f"    {' '.join((wrong.get('message') or '').split())[:300]}")
    return lines


def page(name: str, packages: list[str], lines: list[str], load: float, took_s: float) -> str:
    """What is written."""
    versions = ", ".join(f"{one} {importlib.metadata.version(one)}" for one in packages)
    count = {
        kind: sum(line.startswith(f"{kind} ") for line in lines)
        for kind in ("passed", "failure", "error", "skipped")
    }
    return "\n".join([
        f"{versions}, Python {platform.python_version()}",
        f"{len(os.sched_getaffinity(0))} cores, load {load:.1f} at the beginning, {took_s:.0f} s",
        "",
        f"tests/{name}: " + ", ".join(f"{number} {kind}" for kind, number in count.items()),
        *lines,
        "",
    ])  # fmt: skip


def main(name: str, packages: list[str]) -> int:
    """Run, write, print; the exit code."""
    began, load = time.monotonic(), os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="taskd-face-lane-") as folder:
        junit = pathlib.Path(folder) / "junit.xml"
        # A start takes minutes on a machine that is busy, which is no reason to print stacks.
        options = ["-v", "-o", "faulthandler_timeout=900", f"--junit-xml={junit}"]
        command = [sys.executable, "-m", "pytest", *options, f"tests/{name}"]
        status = subprocess.run(command, cwd=ROOT, check=False).returncode
        lines = outcomes(junit)
    text = page(name, packages, lines, load, time.monotonic() - began)
    PAGES.mkdir(parents=True, exist_ok=True)
    (PAGES / f"{name}.txt").write_text(text, encoding="utf-8")
    print(text)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
