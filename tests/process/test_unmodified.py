"""Scripts that use nothing of taskd: all processes are restarted."""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
import tarfile
from typing import TYPE_CHECKING

import pytest

from tests.process import harness
from tests.process.harness import wait_until
from tests.process.test_recovery import RENDEZVOUS

if TYPE_CHECKING:
    import pathlib

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("options", RENDEZVOUS)
def test_an_unmodified_script_is_restarted_warm(
    tmp_path: pathlib.Path, options: tuple[str, ...]
) -> None:
    example = harness.ROOT / "examples" / "unmodified.py"
    with harness.job(tmp_path) as job:
        clean = harness.Output(
            [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--standalone",
                "--nproc-per-node=2",
                str(example),
                str(tmp_path / "clean.pt"),
            ],
            job.env,
            tmp_path / "clean.out",
            tmp_path,
            warm=harness.TORCHRUNS,
        )
        # unbuffered lines of two processes may share a line
        sums = re.compile(r"rank \d: weight sum -?\d+\.\d{6}")
        expected = sorted(sums.findall(clean.wait(60).output))
        clean.end()
        assert len(expected) == 2
        job.start_manager()
        agent = job.start_agent(
            "hurt_unmodified.py",
            str(example),
            str(tmp_path / "hurt.pt"),
            nproc=2,
            options=tuple(option.format(port=job.master_port) for option in options),
        )
        finished = agent.wait(60)
        assert finished.returncode == 0, finished.output[-6000:]
        assert sorted(sums.findall(finished.output)) == expected
        assert len(job.facts("fault")) == 1
        (record,) = job.recoveries()
        assert record["strategy"] == "restart"
        assert record["total_s"] > record["first_step_s"] > 0, record
        assert "starts at step 20" in finished.output
        assert job.leftovers() == set()


def test_forks_and_fresh_interpreters_meet_after_a_restart(tmp_path: pathlib.Path) -> None:
    """Of an unmodified script: the second node's has a module of its own beside it.

    Plain torchrun >= 2.6 fails here: the first attempt's addresses are in the store.
    """
    shutil.copy(harness.SCRIPTS / "hurt_unmodified.py", tmp_path)
    shutil.copy(tarfile.__file__, tmp_path)
    example = harness.ROOT / "examples" / "unmodified.py"
    with harness.job(tmp_path) as job:
        job.start_manager()
        options = ("--nnodes=2", "--master-addr=127.0.0.1", f"--master-port={job.master_port}")
        agents = [
            job.start_agent(
                script,
                str(example),
                str(tmp_path / "hurt.pt"),
                nproc=1,
                options=(*options, f"--node-rank={node_rank}"),
            )
            for node_rank, script in enumerate(
                ["hurt_unmodified.py", str(tmp_path / "hurt_unmodified.py")]
            )
        ]
        finished = [agent.wait(90) for agent in agents]
        assert [one.returncode for one in finished] == [0, 0], finished[0].output[-6000:]
        assert len(job.facts("fault")) == 1
        assert [record["strategy"] for record in job.recoveries()] == ["restart"]
        cold = "local rank 0 is not forked from the warm process"
        assert [cold in one.output for one in finished] == [False, True]


def test_an_unmodified_script_that_always_fails_ends_soon(tmp_path: pathlib.Path) -> None:
    with harness.job(tmp_path) as job:
        finished = job.run("broken.py", nproc=2)
        assert finished.returncode != 0
        assert "ModuleNotFoundError" in finished.output
        assert "ModuleNotFoundError" in finished.last_line, finished.last_line
        assert job.leftovers() == set()


@pytest.mark.parametrize(
    ("strategy", "no_dump"),
    [
        ("dump", "; and no dump: no live process uses taskd.recoverable"),
        ("elastic-training", ""),
    ],
)
def test_an_unmodified_script_that_may_not_be_restarted_ends_and_says_why(
    tmp_path: pathlib.Path, strategy: str, no_dump: str
) -> None:
    example = harness.ROOT / "examples" / "unmodified.py"
    with harness.job(tmp_path, TASKD_RECOVER_STRATEGY=strategy) as job:
        manager = job.start_manager()
        arguments = (str(example), str(tmp_path / "hurt.pt"))
        finished = job.start_agent("hurt_unmodified.py", *arguments, nproc=2).wait(60)
        assert finished.returncode == 1
        assert len(job.facts("fault")) == 1
        why = f"rank 1 ended with SIGKILL; no restart is allowed (recover-strategy){no_dump}"
        assert finished.last_line == f"taskd: job test-job has ended: {why}"
        assert manager.wait(60).returncode == 1
        assert "rank 1 killed (SIGKILL) at an unknown step, outside of" in manager.text
        assert job.leftovers() == set()


@pytest.mark.parametrize(
    "backend", ["static", pytest.param("c10d", marks=pytest.mark.extended("[static]"))]
)
def test_a_lost_node_ends_an_unmodified_script_and_the_reason_says_what_it_lacks(
    tmp_path: pathlib.Path, backend: str
) -> None:
    """Nobody can make it wait: what it holds is not known, and its processes do not stop."""
    example = harness.ROOT / "examples" / "unmodified.py"
    env = {"TASKD_RECOVER_STRATEGY": "recover", "TASKD_FAULT_TIMEOUT": "6"}
    with harness.job(tmp_path, **env) as job:
        manager = job.start_manager()

        def start(node_rank: int) -> harness.Output:
            place = f"127.0.0.1:{job.master_port}"
            options = [f"--node-rank={node_rank}", "--master-addr=127.0.0.1"]
            options.append(f"--master-port={job.master_port}")
            if backend == "c10d":
                options = ["--rdzv-backend=c10d", f"--rdzv-endpoint={place}", "--rdzv-id=one"]
                options.append(f"--rdzv-conf=is_host={int(node_rank == 0)}")
            return job.start_agent(
                "slow_unmodified.py",
                str(example),
                str(tmp_path / "hurt.pt"),
                nproc=1,
                options=("--nnodes=2", *options),
            )

        agents = [start(node_rank) for node_rank in range(2)]
        wait_until(job, lambda: len(job.facts("begun")) == 2)
        manager.wait_text("node 1 of 2 registered", 60)
        manager.wait_text("node 0 of 2 registered", 60)
        os.kill(agents[1].process.pid, signal.SIGKILL)
        late = start(1)
        ended = [agent.wait(90) for agent in (agents[0], late)]
        assert [one.returncode for one in ended] == [1, 1], job.story()
        assert manager.wait(60).returncode == 1
        assert "only a job that uses taskd.recoverable can wait" in manager.text
        assert "only a job that uses taskd.recoverable can wait" in ended[0].last_line
        assert job.leftovers() == set()


def test_a_script_that_executes_another_program_is_left_alone(tmp_path: pathlib.Path) -> None:
    """Its threads end at that, the one by which its death would be seen, too."""
    with harness.job(tmp_path) as job:
        finished = job.run("executed.py", nproc=2)
        assert finished.returncode == 0, finished.output[-3000:]
        assert {fact["pid"] for fact in job.facts("done")} == {
            fact["pid"] for fact in job.facts("executes")
        }
        assert len(job.facts("done")) == 2
        assert job.recoveries() == []
