"""What can be seen of examples/slurm/job.sbatch without a Slurm; tests/slurm have a real one."""

from __future__ import annotations

import re
import subprocess

from taskd.config import names
from tests.examples.test_examples import EXAMPLES

SCRIPT = EXAMPLES / "slurm" / "job.sbatch"
LINES = SCRIPT.read_text().splitlines()


def test_it_is_valid_bash() -> None:
    subprocess.run(["bash", "-n", str(SCRIPT)], check=True)


def test_slurm_reads_all_of_its_options() -> None:
    """It stops at the first line that is neither empty nor a comment."""
    first = next(n for n, line in enumerate(LINES) if line and not line.startswith("#"))
    options = " ".join(line for line in LINES[:first] if line.startswith("#SBATCH"))
    assert not [line for line in LINES[first:] if "#SBATCH" in line]
    for option in ("--no-kill", "--requeue", "--open-mode=append", "--signal=B:USR1@"):
        assert f" {option}" in options
    step = SCRIPT.read_text().partition("\nsrun ")[2].partition("&\n")[0]
    assert {"--no-kill", "--kill-on-bad-exit=0"} <= set(step.split())


def test_it_sets_nothing_that_taskd_does_not_know() -> None:
    known = {value for name, value in vars(names).items() if name.endswith("_ENV")}
    assert set(re.findall(r"\bTASKD_[A-Z_]+", SCRIPT.read_text())) <= known
