"""Programs that call torchrun in their own process: workers have nothing of what those have done.

As `accelerate launch` does, which builds torchrun's arguments and calls its `run`.
"""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING

import pytest

from tests.process import harness

if TYPE_CHECKING:
    import pathlib

pytestmark = pytest.mark.slow
# What a script and its launcher both import.
SETTINGS = """
import os
RANK = int(os.environ.get("RANK", -1))
"""
LAUNCHER = """
import os, sys, tempfile
import taskd.python.adaptor.patch
import torch
from torch.distributed import run
import settings
torch.set_default_dtype(torch.float64)
scratch = tempfile.TemporaryDirectory(prefix="scratch", dir=os.getcwd())
run.run(run.parse_args(sys.argv[1:]))
print("its folder", "is there" if os.path.isdir(scratch.name) else "was deleted")
"""
SCRIPT = """
import os, runpy, sys
import torch
import settings
print(f"rank {os.environ['RANK']} is {settings.RANK}, {torch.get_default_dtype()}", flush=True)
runpy.run_path(sys.argv[1], run_name="__main__")
"""


def test_its_workers_are_no_copies_of_it_and_one_that_is_killed_is_replaced(
    tmp_path: pathlib.Path,
) -> None:
    for name, text in (("settings", SETTINGS), ("launcher", LAUNCHER), ("script", SCRIPT)):
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
    with harness.job(tmp_path, FAULTS="1@5:forward:kill") as job:
        job.start_manager().wait_text("listens on", 60)
        place = ("--master-addr=127.0.0.1", f"--master-port={job.master_port}")
        size = ("--nnodes=1", "--node-rank=0", "--nproc-per-node=2", *place)
        training = ("script.py", str(harness.SCRIPTS / "train.py"))
        command = [sys.executable, "launcher.py", *size, *training]
        warm = harness.TORCHRUNS
        program = harness.Output(command, job.env, tmp_path / "out", tmp_path, warm=warm)
        job.agents.append(program)
        finished = program.wait(90)
        assert finished.returncode == 0, finished.output[-6000:]
        said = re.findall(r"rank (\d) is (-?\d), torch\.float(\d\d)", finished.output)
        assert sorted(said) == [("0", "0", "32"), ("1", "1", "32"), ("1", "1", "32")]
        assert "its folder is there" in finished.output
        assert "forkserver started by exec: torchrun was called by " in finished.output
        (record,) = job.recoveries()
        assert record["strategy"] == "recover-in-place"
        assert len(set(job.digests().values())) == 1
        assert job.leftovers() == set()
