"""`--numa-binding`: each worker is executed as torch would do it, the replacement too."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import pytest

from tests.process import harness

if TYPE_CHECKING:
    import pathlib

pytestmark = pytest.mark.slow
# As torchrun, on a node with a device at each processor that this process may use.
TORCHRUN = """
import os, sys
from torch.numa import binding
binding._get_logical_cpus_to_bind_to = lambda **_: {min(os.sched_getaffinity(0))}
import taskd.run
taskd.run.main(sys.argv[1:])
"""
# What torch uses of it.
NUMACTL = """#!/bin/sh
echo "$1" >> bound
list=${1#--physcpubind=}
shift
exec taskset -c "$list" "$@"
"""
# Torch 2.9: no command, but the thread that starts the worker is bound meanwhile.
OLDER = """
import contextlib
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler as made

def asked(self, entrypoint, args, env, stdout, stderr, local_rank_id, numa_options):
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    self.proc = self._popen((entrypoint, *args), env)
    os.sched_setaffinity(0, before)

made.SubprocessHandler.__init__ = asked
"""


@pytest.fixture
def tools(tmp_path: pathlib.Path) -> pathlib.Path:
    """The folder of a numactl."""
    folder = tmp_path / "tools"
    folder.mkdir()
    (folder / "numactl").write_text(NUMACTL, encoding="utf-8")
    (folder / "numactl").chmod(0o755)
    return folder


def run_bound(job: harness.Job, torchrun: str, script: str) -> harness.Finished:
    command = [sys.executable, "-c", torchrun, "--numa-binding=node", "--nproc-per-node=2", script]
    env = job.env | {
        "TASKD_FORKSERVER": "fork"
    }  # what the program changes is no business of theirs
    agent = harness.Output(command, env, job.directory / "agent.out", job.directory)
    job.agents.append(agent)
    return agent.wait(120)


def test_bound_workers_are_replaced_by_bound_ones(
    tmp_path: pathlib.Path, tools: pathlib.Path
) -> None:
    path = f"{tools}{os.pathsep}{os.environ['PATH']}"
    with harness.job(tmp_path, FAULTS="1@5:forward:kill", PATH=path) as job:
        job.start_manager()
        finished = run_bound(job, TORCHRUN, str(harness.SCRIPTS / "train.py"))
        assert finished.returncode == 0, finished.output
        assert [one["strategy"] for one in job.recoveries()] == ["recover-in-place"]
        assert len(set(job.digests().values())) == 1
        first = min(os.sched_getaffinity(0))
        said = (job.directory / "bound").read_text(encoding="utf-8").split()
        assert said == [f"--physcpubind={first}"] * 3
        assert "its interpreter is executed by numactl" in finished.output


def test_so_are_those_of_a_torch_that_binds_its_own_thread(
    tmp_path: pathlib.Path, tools: pathlib.Path
) -> None:
    script = tmp_path / "shows.py"
    script.write_text("import os; print('may use', *os.sched_getaffinity(0))", encoding="utf-8")
    path = f"{tools}{os.pathsep}{os.environ['PATH']}"
    with harness.job(tmp_path, PATH=path) as job:
        job.start_manager()
        torchrun = TORCHRUN.replace("import taskd.run", f"{OLDER}import taskd.run")
        finished = run_bound(job, torchrun, str(script))
        assert finished.returncode == 0, finished.output
        first = min(os.sched_getaffinity(0))
        assert finished.output.count(f"may use {first}\n") == 2, finished.output


def test_without_a_manager_they_are_restarted(tmp_path: pathlib.Path, tools: pathlib.Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text(
        "import os, sys\nsys.exit(3 if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' else 0)",
        encoding="utf-8",
    )
    path = f"{tools}{os.pathsep}{os.environ['PATH']}"
    with harness.job(tmp_path, PATH=path, TASKD_MANAGER="off") as job:
        finished = run_bound(job, TORCHRUN, str(script))
        assert finished.returncode == 0, finished.output
        assert "Traceback" not in finished.output
        first = min(os.sched_getaffinity(0))
        said = (job.directory / "bound").read_text(encoding="utf-8").split()
        assert said == [f"--physcpubind={first}"] * 4
