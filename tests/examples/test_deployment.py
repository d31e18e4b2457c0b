"""examples/train_start.sh and pre_stop.sh are run for real on one node.

Of the Dockerfile everything but the downloads.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import torch.distributed

from taskd.checkpoint import folder
from tests.examples.test_examples import EXAMPLES, KILL_ONCE, finals
from tests.process import harness
from tests.process.harness import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

START = EXAMPLES / "train_start.sh"
PRE_STOP = EXAMPLES / "pre_stop.sh"
IN_BACKGROUND = 'trap \'\' INT QUIT; exec "$0" "$@"'
DOCKERFILE = EXAMPLES / "docker" / "Dockerfile"
SED_LINE = (
    "sed -i '/import os/i import taskd.python.adaptor.patch' "
    "$(pip3 show torch | grep Location | awk -F ' ' '{print $2}')/torch/distributed/run.py"
)


def programs(directory: pathlib.Path) -> str:
    """A PATH on which python3 is this interpreter."""
    directory.mkdir()
    link = directory / "python3"
    link.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    link.chmod(0o755)
    return f"{directory}{os.pathsep}{os.environ['PATH']}"


@contextlib.contextmanager
def node(
    tmp_path: pathlib.Path, script: str, *arguments: str, **env: str
) -> Iterator[tuple[harness.Job, harness.Output]]:
    """One node of a job, started as a pod starts it. The job's ranks run `script`.

    SIGINT and SIGQUIT are ignored, as in the background of a shell that is not interactive: under
    nohup, cron and many CIs.
    """
    with harness.job(tmp_path) as job:
        (tmp_path / "tiny.py").write_text(script)
        settings = {
            "PATH": programs(tmp_path / "bin"),
            "RANK": "0",
            "POD_IP": "127.0.0.1",
            "MASTER_PORT": str(job.master_port),
            "GPUS_PER_NODE": "2",
            "LAUNCHER": "python3 -m taskd.run",
            "MANAGER": str(harness.ROOT / "manager.py"),
            "PID_FILE": str(tmp_path / "torchrun.pid"),
        }
        start = harness.Output(
            ["sh", "-c", IN_BACKGROUND, "bash", str(START), "tiny.py", *arguments],
            job.env | settings | env,
            tmp_path / "start.out",
            tmp_path,
        )
        try:
            yield job, start
        finally:
            start.end()


@pytest.mark.parametrize("script", [START, PRE_STOP], ids=lambda path: path.name)
def test_the_scripts_of_a_pod_are_valid_bash(script: pathlib.Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True)
    assert os.access(script, os.X_OK)
    assert "set -euo pipefail" in script.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("preload", ["off", "on"])
def test_the_start_script_runs_a_job_of_one_node(tmp_path: pathlib.Path, preload: str) -> None:
    if preload == "on" and not (harness.ROOT / "taskd/python/cython_api/libs/libtaskd.so").exists():
        pytest.skip("libtaskd.so is not built in this checkout")
    script = """import os, sys, torch.distributed as dist
dist.init_process_group("gloo")
preloaded = os.environ.get("LD_PRELOAD")
place = f"rank {dist.get_rank()} of {dist.get_world_size()} {os.environ['MASTER_ADDR']}"
sys.stdout.write(f"{place} {preloaded}\\n")
dist.barrier()
dist.destroy_process_group()
"""
    with node(tmp_path, script, PRELOAD_LIBTASKD=preload) as (job, start):
        finished = start.wait(90)
        assert finished.returncode == 0, finished.output[-6000:]
        for rank in range(2):
            (line,) = [
                line
                for line in finished.output.splitlines()
                if line.startswith(f"rank {rank} of 2 127.0.0.1")
            ]
            assert ("libtaskd.so" in line) == (preload == "on")
        assert "ERROR: ld.so" not in finished.output
        assert job.leftovers() == set()


@pytest.mark.slow
def test_the_start_script_ends_with_the_exit_code_of_torchrun(tmp_path: pathlib.Path) -> None:
    with node(tmp_path, "raise SystemExit(3)") as (job, start):
        assert start.wait(90).returncode == 1, start.text[-6000:]
        assert job.leftovers() == set()


@pytest.mark.slow
def test_the_start_script_hands_a_sigterm_on(tmp_path: pathlib.Path) -> None:
    """Also where the manager has not heard of anybody yet, and would wait for the job."""
    script = "import signal\nprint('tiny runs', flush=True)\nsignal.pause()\n"
    nobody = f"TASKD_MANAGER_ADDR=127.0.0.1:{harness.free_port()}"
    launcher = f"env {nobody} python3 -m taskd.run"
    with node(tmp_path, script, LAUNCHER=launcher, GPUS_PER_NODE="1") as (job, start):
        start.wait_text("listens on", 60)
        start.wait_text("tiny runs", 60)
        os.kill(start.process.pid, signal.SIGTERM)
        assert start.wait(40).returncode != 0  # not the minute that is given to a manager otherwise
        assert "joined the manager" not in start.text
        assert job.leftovers() == set()


@pytest.mark.slow
def test_a_pod_that_is_to_end_saves_the_training_and_the_next_one_goes_on(
    tmp_path: pathlib.Path, char_gpt: str
) -> None:
    example = (str(EXAMPLES / "char_gpt.py"), "--steps", "6")
    saved, held, gate = (tmp_path / name for name in ("checkpoints", "held", "gate"))
    settings = {
        "TASKD_RECOVER_STRATEGY": "recover-in-place,dump",
        "TASKD_CHECKPOINT_DIR": str(saved),
        "TASKD_HANG_DETECTION": "off",
    }
    # Rank 1 waits in the middle of step 4, so that the job cannot be over before it is told to end.
    arguments = (str(held), "1", "optimizer", "4", *example)
    with node(tmp_path / "one", KILL_ONCE.read_text(), *arguments, HOLD=str(gate), **settings) as (
        job,
        start,
    ):
        start.wait_text("rank 1: optimizer 4 begins", 60)
        wait_until(job, held.exists)  # it tells first
        torchrun = int((job.directory / "torchrun.pid").read_text())
        env = job.env | {"PID_FILE": str(job.directory / "torchrun.pid")}
        hook = harness.Output(
            ["bash", str(PRE_STOP)], env, job.directory / "hook.out", job.directory
        )
        try:
            start.wait_text("is to end (SIGTERM): the job is to be saved first", 60)
            gate.touch()
            assert hook.wait(60).output.endswith("torchrun has ended\n")
        finally:
            hook.end()
        assert not pathlib.Path(f"/proc/{torchrun}").exists()
        (checkpoint,) = folder.scan(saved, "test-job", is_full=True).valid
        finished = start.wait(90)
        assert finished.returncode == 2, finished.output[-6000:]
        version = checkpoint.manifest.version
        assert (
            f"node 0 is to end (SIGTERM); step {version} was saved in {checkpoint.path}\n"
        ) in finished.output
        assert version in {3, 4, 5}
        assert not (job.directory / "torchrun.pid").exists()
        assert job.leftovers() == set()
    with node(
        tmp_path / "two", KILL_ONCE.read_text(), str(held), "-", "-", "0", *example, **settings
    ) as (job, start):
        finished = start.wait(90)
        assert finished.returncode == 0, finished.output[-6000:]
        assert (
            finished.output.count(
                f"starts at step {version}: read version {version} from {checkpoint.path}"
            )
            == 2
        )
        assert finals(finished.output) == [char_gpt]
        assert job.leftovers() == set()


def test_the_hook_ends_nothing_that_is_no_training(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "torchrun.pid"
    env = harness.environment(PID_FILE=str(path))
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, env=env) as other:
        for content in (None, "", "no number", str(other.pid), str(2**22 + 1)):
            if content is not None:
                path.write_text(f"{content}\n")
            hook = subprocess.run(
                ["bash", str(PRE_STOP)],
                env=env,
                check=True,
                capture_output=True,
                text=True,
                timeout=60,
            )
            assert (hook.stdout, hook.stderr) == (f"pre_stop: no training runs here ({path})\n", "")
        other.stdin.close()
        assert other.wait(60) == 0


def instructions() -> list[str]:
    """The Dockerfile without comments, one instruction a line."""
    text = re.sub(r"(?m)^\s*#.*\n", "", DOCKERFILE.read_text()).replace("\\\n", " ")
    return [line for line in text.splitlines() if line.strip()]


def test_the_dockerfile_is_well_formed() -> None:
    lines = instructions()
    words = [line.split()[0] for line in lines]
    assert set(words) <= {"ARG", "FROM", "RUN", "COPY", "WORKDIR", "EXPOSE", "ENV"}
    assert words[0] in {"ARG", "FROM"}
    assert "EXPOSE 9601" in lines
    stages = re.findall(r"FROM \S+ AS (\w+)", "\n".join(lines))
    assert set(re.findall(r"--from=(\w+)", "\n".join(lines))) <= set(stages)
    for line in lines:
        if line.startswith("RUN "):
            subprocess.run(["sh", "-n", "-c", line.removeprefix("RUN ")], check=True)
    for line in lines:
        if line.startswith("COPY ") and "--from" not in line:
            for source in line.split()[1:-1]:
                assert (harness.ROOT / source).exists(), source


def test_the_documented_sed_line_patches_a_copy_of_torchrun(tmp_path: pathlib.Path) -> None:
    assert f"RUN {SED_LINE}" in instructions()
    assert SED_LINE in (harness.ROOT / "README.md").read_text()
    original = pathlib.Path(torch.distributed.__file__).parent / "run.py"
    copy = tmp_path / "torch" / "distributed" / "run.py"
    copy.parent.mkdir(parents=True)
    shutil.copy(original, copy)
    pip = tmp_path / "bin" / "pip3"
    path = programs(tmp_path / "bin")
    pip.write_text(f"#!/bin/sh\necho 'Name: torch'\necho 'Location: {tmp_path}'\n")
    pip.chmod(0o755)
    subprocess.run(["sh", "-c", SED_LINE], check=True, env=os.environ | {"PATH": path})
    patched = copy.read_text()
    assert patched.replace("import taskd.python.adaptor.patch\n", "") == original.read_text()
    assert patched.count("import taskd.python.adaptor.patch\n") == 1
    assert "import taskd.python.adaptor.patch\nimport os\n" in patched
    compile(patched, str(copy), "exec")
