"""Reads what training scripts have noted with `testbed.script.fact`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pathlib


def facts_in(directory: pathlib.Path) -> list[dict]:
    """All facts in a folder, with their rank, in order of time; no line that a kill has cut off."""
    found = [
        json.loads(line) | {"rank": int(path.stem.partition("-")[0])}
        for path in directory.glob("*.jsonl")
        for line in path.read_text().splitlines(keepends=True)
        if line.endswith("\n")
    ]
    return sorted(found, key=lambda fact: fact["time"])
