"""What needs a GPU: `make test-gpu`, in an environment that has torch for it. One GPU is enough.

    python tests/gpu_lane.py [--jobs 4]

Runs tests/gpu, then benchmarks of recovery, of the death alarm and of snapshots there. Writes one
page and the figures to docs/measured/gpu/. Ends with 1 if a test failed.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import pathlib
import platform
import subprocess
import sys
import tempfile
import time

import torch

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from tests.face_lane import outcomes  # noqa: E402

PAGES = ROOT / "docs" / "measured" / "gpu"
# Each: the file of its figures, the command, more of its environment.
BENCHMARKS: tuple[tuple[str, tuple[str, ...], dict[str, str]], ...] = (
    ("recovery", ("recovery.py", "--kills", "5", "--torchrun-kills", "2", "--start-ups", "0"),
     {"DEVICE": "cuda"}),
    ("death_alarm", ("death_alarm.py", "--rss-gb", "0", "--n", "6", "--busy", "0",
     "--device-gb", "4"), {}),
    ("snapshot", ("snapshot_device.py",), {}),
)  # fmt: skip
LIMIT_S = 120.0


def run_tests(folder: pathlib.Path, jobs: int) -> tuple[list[str], list[str]]:
    """One line for each test, and for each figure that one has noted."""
    junit, figures = folder / "junit.xml", folder / "figures.jsonl"
    options = ["-n", str(jobs), "-p", "no:benchmark", f"--junit-xml={junit}"]
    subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *options, "tests/gpu"],
        cwd=ROOT,
        env=os.environ | {"TASKD_GPU_FIGURES": str(figures)},
        check=False,
    )
    noted = map(json.loads, figures.read_text().splitlines()) if figures.exists() else []
    return outcomes(junit), sorted(
        f"{one['what']}: {one['n']}, median {one['median_s']:.2f} s, slowest {one['max_s']:.2f} s"
        for one in noted
    )


def measure(name: str, command: tuple[str, ...], extra: dict[str, str]) -> str:
    """Run a benchmark, which writes its own figures; what it printed, or why it did not end."""
    script, *arguments = command
    line = [sys.executable, str(ROOT / "benchmarks" / script), *arguments]
    try:
        ended = subprocess.run(
            [*line, "--json", str(PAGES / f"{name}.json")],
            cwd=ROOT,
            env=os.environ | extra,
            check=False,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        return f"{script}: not at its end after {LIMIT_S:g} s"
    text = ended.stdout.partition("{\n")[0] if ended.returncode == 0 else ended.stderr[-2000:]
    return f"benchmarks/{' '.join(command)}\n{text or 'see the file of its figures'}"


def main() -> int:
    """Run, write, print; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--jobs", type=int, default=4, help="tests side by side")
    jobs = parser.parse_args().jobs
    began, load = time.monotonic(), os.getloadavg()[0]
    PAGES.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="taskd-gpu-lane-") as name:
        lines, figures = run_tests(pathlib.Path(name), jobs)
    count = {
        kind: sum(line.startswith(f"{kind} ") for line in lines)
        for kind in ("passed", "failure", "error", "skipped")
    }
    summary = ", ".join(f"{number} {kind}" for kind, number in count.items())
    tested = "\n".join([
        f"{len(os.sched_getaffinity(0))} cores, load {load:.1f} at the beginning",
        "",
        f"tests/gpu, {jobs} side by side, {time.monotonic() - began:.0f} s: {summary}",
        *lines,
        "",
        "seconds from the fault to the first step of all ranks, in these tests:",
        *figures,
    ])  # fmt: skip
    text = write_page([tested])
    measured: list[str] = []
    for one in BENCHMARKS:
        measured.append(measure(*one))
        text = write_page([tested, *measured])  # what is known, if this is cut short
    print(text)
    return 0 if count["passed"] and not count["failure"] and not count["error"] else 1


def write_page(parts: list[str]) -> str:
    """Named after the device. Returns what was written."""
    versions = f"torch {torch.__version__}, pyzmq {importlib.metadata.version('pyzmq')}"
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    machine = (
        f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}, {versions}, NCCL {nccl}, "
        f"Python {platform.python_version()}, kernel {platform.release()}"
    )
    text = machine + "\n" + "\n\n".join(parts) + "\n"
    page = PAGES / f"{torch.cuda.get_device_name().replace(' ', '-')}.txt"
    page.write_text(text, encoding="utf-8")
    return text


if __name__ == "__main__":
    sys.exit(main())
