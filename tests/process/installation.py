"""An installed taskd: the metadata by which torch finds it, in a folder of its own."""

from __future__ import annotations

import os
import pathlib
import re

from tests.process import harness

_TABLE = '[project.entry-points."torchrun.handlers"]\n'


def entry_points() -> dict[str, str]:
    """What pyproject.toml says, name to object."""
    text = pathlib.Path(harness.ROOT, "pyproject.toml").read_text()
    table = text[text.index(_TABLE) + len(_TABLE) :].partition("\n[")[0]
    return dict(re.findall(r'(?m)^(\w+) = "(.+)"$', table))


def install(
    folder: pathlib.Path, points: dict[str, str] | None = None, root: pathlib.Path = harness.ROOT
) -> str:
    """Write it; returns a PYTHONPATH that has it and the package in `root`."""
    metadata = folder / "taskd-0.1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: taskd\nVersion: 0.1.0\n")
    lines = [f"{name} = {target}\n" for name, target in (points or entry_points()).items()]
    (metadata / "entry_points.txt").write_text("".join(["[torchrun.handlers]\n", *lines]))
    path = (str(folder), str(root), harness.environment()["PYTHONPATH"])
    return os.pathsep.join(path)
