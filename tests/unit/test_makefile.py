"""`make` alone lists every target with a line, and does nothing else."""

import pathlib
import re
import subprocess

ROOT = pathlib.Path(__file__).resolve().parents[2]
TEXT = (ROOT / "Makefile").read_text(encoding="utf-8")
UNLISTED = {"all"}  # what people type who do not know that make lists the targets


def test_make_lists_the_targets() -> None:
    said = subprocess.run(
        ["make", "--no-print-directory"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    listed = dict(re.findall(r"(?m)^  ([a-z-]+) +(\S.*)$", said))
    phony = re.search(r"(?ms)^\.PHONY: (.*?[^\\])$", TEXT)
    assert phony is not None
    targets = set(phony[1].replace("\\", " ").split())
    assert set(listed) == targets - UNLISTED
    assert {"format", "lint", "unit", "test", "coverage", "mutants"} <= set(listed)
    assert "CONTRIBUTING.md" in said


def test_what_the_targets_run_exists() -> None:
    paths = set(re.findall(r"(?<![\w./$)])(?:tests|benchmarks|examples)/[\w/]+(?:\.\w+)*", TEXT))
    assert {"tests/mutants.py", "tests/unit/core", "benchmarks/recovery.py"} <= paths
    assert not {path for path in paths if not (ROOT / path).exists()}
