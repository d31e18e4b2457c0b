"""What a test has measured, for the page that `make test-gpu` writes."""

from __future__ import annotations

import json
import os
import statistics


def note(what: str, seconds: list[float]) -> None:
    """Seconds of each. Nothing happens where no page is written."""
    path = os.environ.get("TASKD_GPU_FIGURES")
    if path:
        line = {"what": what, "n": len(seconds), "median_s": statistics.median(seconds),
                "max_s": max(seconds)}  # fmt: skip
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
