"""What the measurements share: options, the conditions of the machine, figures, their output."""

from __future__ import annotations

import argparse
import json
import math
import os
import pathlib
import socket
import statistics
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
RANKS = 4


def parser(text: str | None) -> argparse.ArgumentParser:
    """Of a benchmark with this docstring, with --json FILE, which `show` is given."""
    made = argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--json", type=pathlib.Path, metavar="FILE")
    return made


def save(result: dict | list, file: pathlib.Path | None) -> None:
    """Write it as JSON, if there is a file for it."""
    if file:
        file.write_text(json.dumps(result, indent=1) + "\n")


def show(result: dict, file: pathlib.Path | None) -> None:
    """Print it as JSON, and `save` it."""
    print(json.dumps(result, indent=1))
    save(result, file)


def percentile(values: list[float], fraction: float) -> float:
    """Nearest rank: a value that was measured."""
    return sorted(values)[max(0, math.ceil(fraction * len(values)) - 1)]


def spread(times_s: list[float]) -> dict[str, float]:
    """How long something took, over all measurements."""
    return {
        "p50_s": round(statistics.median(times_s), 3),
        "p99_s": round(percentile(times_s, 0.99), 3),
        "min_s": round(min(times_s), 3),
        "max_s": round(max(times_s), 3),
    }


def load_1min() -> float:
    """Of the machine: processes that want to run."""
    return round(os.getloadavg()[0], 2)


def conditions() -> dict:
    """What a figure depends on, besides the code."""
    began = time.perf_counter()
    socket.getnameinfo(("127.0.0.1", 1), 0)
    return {
        "world_size": RANKS,
        "cores": len(os.sched_getaffinity(0)),
        "load_1min": load_1min(),
        "reverse_dns_of_loopback_s": round(time.perf_counter() - began, 4),
    }
