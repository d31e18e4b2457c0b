"""What taskd's entry point costs a torchrun that does not ask for it.

    python benchmarks/torchrun_start.py [--pairs 30] [--json FILE]

Starts fresh torchruns by turns with and without the entry point (metadata in a folder of
PYTHONPATH; the package can be imported in both), the order changing from pair to pair. Two figures
for each: the processor time of torchrun until the script has ended, which other work disturbs less,
and the time on the clock. The script is `pass`, in one process. Within torchrun the entry point
itself is measured as well, in processor time: import, call, and what it does at the launch.
"""

from __future__ import annotations

import os
import pathlib
import resource
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from benchmarks import measuring
from testbed.processes import environment

# What torch calls of ours in a torchrun that has loaded its rendezvous, and not yet taskd.
TIMED = """
import time, types
import torch.distributed.elastic.rendezvous.utils as utils
launcher = types.SimpleNamespace(launch_agent=lambda config: None)
config = types.SimpleNamespace(rdzv_backend="static")
began = time.process_time()
from taskd.python.adaptor import handler
handler.get_handler()
handler._prepare(launcher)
launcher.launch_agent(config)
print(time.process_time() - began)
assert utils._parse_rendezvous_config.__wrapped__
"""


def start(path: str, script: pathlib.Path) -> tuple[float, float]:
    """One torchrun: seconds on the clock, seconds of processor time of it and its script."""
    before, began = _children_s(), time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", str(script)],
        env=environment(PYTHONPATH=path),
        check=True,
        capture_output=True,
        timeout=120,
    )
    return time.perf_counter() - began, _children_s() - before


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def own_cost(path: str) -> float:
    """Seconds that the entry point takes itself."""
    done = subprocess.run(
        [sys.executable, "-c", TIMED],
        env=environment(PYTHONPATH=path),
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )
    return float(done.stdout)


def install(folder: pathlib.Path, points: str) -> str:
    """Metadata of an installation in a folder; returns a PYTHONPATH that has it and the package."""
    metadata = folder / "taskd-0.1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: taskd\nVersion: 0.1.0\n")
    (metadata / "entry_points.txt").write_text(points)
    return f"{folder}{os.pathsep}{ROOT}"


def compare(ours: list[float], theirs: list[float]) -> dict[str, float]:
    """In ms: medians, 99th percentiles, and the median of the differences within pairs."""
    pairs = [mine - other for mine, other in zip(ours, theirs, strict=True)]
    figures = {
        "with_p50_ms": statistics.median(ours),
        "with_p99_ms": measuring.percentile(ours, 0.99),
        "without_p50_ms": statistics.median(theirs),
        "without_p99_ms": measuring.percentile(theirs, 0.99),
        "difference_p50_ms": statistics.median(pairs),
        "difference_p99_ms": measuring.percentile(pairs, 0.99),
    }
    return {name: round(1000 * value, 2) for name, value in figures.items()}


def main() -> None:
    parser = measuring.parser(__doc__)
    parser.add_argument("--pairs", type=int, default=30)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        folder = pathlib.Path(directory)
        script = folder / "train.py"
        script.write_text("pass\n")
        point = "[torchrun.handlers]\ntaskd = taskd.python.adaptor.handler:get_handler\n"
        paths = {
            "with": install(folder / "with", point),
            "without": install(folder / "without", ""),
        }
        taken: dict[str, list[tuple[float, float]]] = {"with": [], "without": []}
        own = []
        start(paths["with"], script)  # compiles what is not compiled yet
        for pair in range(options.pairs):
            for name in ("with", "without") if pair % 2 else ("without", "with"):
                taken[name].append(start(paths[name], script))
            own.append(own_cost(paths["without"]))
    clock, processor = (
        compare([each[which] for each in taken["with"]], [each[which] for each in taken["without"]])
        for which in (0, 1)
    )
    result = {
        "pairs": options.pairs,
        "own_p50_ms": round(1000 * statistics.median(own), 2),
        "own_p99_ms": round(1000 * measuring.percentile(own, 0.99), 2),
        "clock": clock,
        "processor": processor,
        "load_1min": measuring.load_1min(),
        "cores": len(os.sched_getaffinity(0)),
    }
    measuring.show(result, options.json)


if __name__ == "__main__":
    main()
