"""A start script as the documentation of MindCluster has it, with nothing but its blanks filled in.

manager.py, the sed line, LD_PRELOAD and the arguments of torchrun are those of a reader who has
never heard of this implementation. torch is not edited: the sed line finds an overlay, links to all
of its files and a copy of run.py.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import torch

from tests.process import harness
from tests.process.harness import wait_for_step, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.slow

MANAGER = """
from taskd.api import init_taskd_manager, start_taskd_manager
import os
job_id=os.getenv("MINDX_TASK_ID")
node_nums=XX
proc_per_node=XX
init_taskd_manager({"job_id":job_id, "node_nums": node_nums, "proc_per_node": proc_per_node})
start_taskd_manager()
"""
IMAGE = (
    "sed -i '/import os/i import taskd.python.adaptor.patch' "
    "$(pip3 show torch | grep Location | awk -F ' ' '{print $2}')/torch/distributed/run.py"
)
START = """
export LD_PRELOAD=/usr/local/Ascend/cann/lib64/libmspti.so:TASKD/python/cython_api/libs/libtaskd.so
export TASKD_PROCESS_ENABLE="on"
# PyTorch
if [[ "${RANK}" == 0 ]]; then
    export MASTER_ADDR=${POD_IP}
    python manager.py &
fi
DISTRIBUTED_ARGS="--nproc_per_node $GPUS_PER_NODE --nnodes $NNODES --node_rank $NODE_RANK \
--master_addr $MASTER_ADDR --master_port $MASTER_PORT --max_restarts 32767"
torchrun $DISTRIBUTED_ARGS train.py
"""


def overlay_of_torch(folder: pathlib.Path) -> None:
    """`folder`/torch, which is torch in all but run.py."""
    real = pathlib.Path(torch.__file__).parent
    for part in (pathlib.Path("torch"), pathlib.Path("torch/distributed")):
        (folder / part).mkdir(parents=True)
        for entry in (real.parent / part).iterdir():
            if entry.name not in ("distributed", "run.py", "__pycache__"):
                (folder / part / entry.name).symlink_to(entry)
    run = folder / "torch/distributed/run.py"
    run.write_text((real / "distributed/run.py").read_text())


def programs(folder: pathlib.Path, torch_at: pathlib.Path) -> str:
    """A PATH on which python, pip3 and torchrun are those of the image."""
    folder.mkdir()
    for name, text in (
        ("python", f'#!/bin/sh\nexec "{sys.executable}" "$@"\n'),
        ("pip3", f"#!/bin/sh\necho 'Name: torch'\necho 'Location: {torch_at}'\n"),
        ("torchrun", f"#!{sys.executable}\nfrom torch.distributed.run import main\nmain()\n"),
    ):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


@contextlib.contextmanager
def started(folder: pathlib.Path, **env: str) -> Iterator[tuple[harness.Job, harness.Output]]:
    """The image is built and the script started, on the only node."""
    with harness.job(folder, **env) as job:
        overlay = folder / "site"
        overlay_of_torch(overlay)
        path = programs(folder / "bin", overlay)
        subprocess.run(["sh", "-c", IMAGE], check=True, env=os.environ | {"PATH": path})
        (folder / "manager.py").write_text(
            MANAGER.replace("node_nums=XX", "node_nums=1").replace("node=XX", "node=2")
        )
        start = START.replace("TASKD/", f"{harness.ROOT}/taskd/")
        (folder / "train_start.sh").write_text(start)
        (folder / "train.py").symlink_to(harness.SCRIPTS / "train.py")
        pod = {
            "PATH": path,
            "PYTHONPATH": os.pathsep.join((str(overlay), job.env["PYTHONPATH"])),
            "RANK": "0",
            "NODE_RANK": "0",
            "NNODES": "1",
            "GPUS_PER_NODE": "2",
            "POD_IP": "127.0.0.1",
            "MASTER_PORT": str(job.master_port),
        }
        settings = {name: text for name, text in job.env.items() if name != "TASKD_PROCESS_ENABLE"}
        shell = harness.Output(
            ["bash", "train_start.sh"], settings | pod | env, folder / "start.out", folder
        )
        try:
            yield job, shell
        finally:
            shell.end()


@pytest.mark.extended(
    "nearest: tests/examples/test_deployment.py: test_the_start_script_hands_a_sigterm_on; "
    "test_patch.py: test_sed_installs_it; test_one_command.py: test_a_killed_rank_is_replaced_*"
)
def test_a_rank_that_is_killed_is_replaced_and_training_goes_on(tmp_path: pathlib.Path) -> None:
    settings = {"STEPS": "60", "SLEEP_S": "0.05"}
    plain = tmp_path / "plain"
    plain.mkdir()
    script = str(harness.SCRIPTS / "train.py")
    harness.run_plainly(plain, script, nproc=2, FACTS=str(plain), **settings)
    expected = [fact for fact in harness.facts_in(plain) if fact["what"] == "returned"]
    with started(tmp_path / "job", **settings, HOLD_AT="50") as (job, shell):
        wait_for_step(job, 10)
        victim = {fact["rank"]: fact["pid"] for fact in job.facts("entered")}[1]
        os.kill(victim, signal.SIGKILL)
        job.tell()
        finished = shell.wait(90)
        assert finished.returncode == 0, finished.output[-6000:]
        assert job.digests() == {fact["rank"]: fact["digest"] for fact in expected}
        (record,) = job.recoveries()
        assert record["strategy"] == "recover-in-place"
        assert [(fault["rank"], fault["detail"]) for fault in record["faults"]] == [(1, "SIGKILL")]
        assert (record["steps_redone"], record["max_restarts"]) == (0, 32767)
        assert "listens on 127.0.0.1" in finished.output
        wait_until(job, lambda: not job.leftovers())


@pytest.mark.extended(
    "test_nobody_joins.py: test_a_manager_ends_soon_after_the_script_that_started_it"
)
def test_a_torchrun_that_does_not_start_leaves_no_manager_behind(tmp_path: pathlib.Path) -> None:
    with started(tmp_path, TASKD_JOIN_TIMEOUT="30", GPUS_PER_NODE="all") as (job, shell):
        assert shell.wait(60).returncode == 1
        assert "Unsupported nproc_per_node" in shell.text
        wait_until(job, lambda: not job.leftovers())
        assert "the manager ends: nobody has joined it within" in shell.text
