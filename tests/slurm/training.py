"""A training that examples/slurm/job.sbatch starts on a real Slurm, and what is asked of it."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import TYPE_CHECKING

from taskd.checkpoint import folder
from testbed.facts import facts_in
from testbed.proc import MARK_ENV, marked
from testbed.processes import ROOT, environment

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Callable

    from taskd.checkpoint.folder import Checkpoint
    from testbed.slurm import Cluster

NODES, SPARES, PROCESSES = 2, 1, 2  # that train, that wait, of each node
SCRIPT = ROOT / "examples" / "slurm" / "job.sbatch"
TRAINING = ROOT / "tests" / "process" / "scripts" / "train.py"
NAME = "my-training"  # as the script has it
STEPS = {"STEPS": "100"}
LIMIT_S = 150  # for what takes 20 s on a machine that has nothing else to do


class Training:
    """See the module. `folder`: where jobs are submitted, one after the other."""

    def __init__(self, cluster: Cluster, folder: pathlib.Path, **env: str) -> None:
        """`env`: besides what follows from the size."""
        self.cluster, self.folder = cluster, folder
        self.job = 0  # the newest; 0: none yet, or it has ended
        self.facts_dir, self.programs = folder / "facts", folder / "bin"
        self.mark = f"{os.getpid()}-{time.monotonic_ns()}"
        for made in (self.facts_dir, self.programs):
            made.mkdir()
        for name in ("python", "python3"):
            (self.programs / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
            (self.programs / name).chmod(0o755)
        settings = {
            "FACTS": str(self.facts_dir),
            "SLEEP_S": "0.1",
            "SPARES": str(SPARES),
            "PROCESSES": str(PROCESSES),
            "TRAINING": str(TRAINING),
            "LAUNCHER": "python3 -m taskd.run",
            "MANAGER": str(ROOT / "manager.py"),
            "TASKD_FAULT_TIMEOUT": "6",
            "TASKD_LOG_PATH": str(folder / "log"),
            MARK_ENV: self.mark,
        }
        self.env = environment(**(settings | STEPS | env))
        self.env["PATH"] = f"{self.programs}{os.pathsep}{self.env['PATH']}"
        del self.env["GLOO_SOCKET_IFNAME"]  # each node has an address that its name resolves to

    def submit(self, *options: str, script: pathlib.Path = SCRIPT) -> int:
        """The number of the job. Its output goes to one file, whichever job it is."""
        size = (f"--nodes={NODES + SPARES}", "--gpus-per-node=0")
        where = (f"--chdir={self.folder}", f"--output={self.folder}/output")
        self.job = self.cluster.submit(script, *size, *where, *options, env=self.env)
        return self.job

    @property
    def text(self) -> str:
        """What all of it has printed."""
        output = self.folder / "output"
        return output.read_text(errors="replace") if output.exists() else ""

    def facts(self, what: str) -> list[dict]:
        return [fact for fact in facts_in(self.facts_dir) if fact["what"] == what]

    def digests(self) -> dict[int, str]:
        return {fact["rank"]: fact["digest"] for fact in self.facts("returned")}

    def records(self) -> list[dict]:
        """What the managers have written of recoveries."""
        path = self.folder / "log" / "recoveries.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def checkpoints(self) -> tuple[Checkpoint, ...]:
        """The whole ones, the newest first."""
        return folder.scan(self.folder / "checkpoints", NAME, is_full=True).valid

    def leftovers(self) -> set[int]:
        return marked(self.mark)

    def wait_until(
        self, is_so: Callable[[], object], what: str, timeout_s: float = LIMIT_S
    ) -> None:
        """Fails when the time is over, and when the job has ended before."""
        deadline = time.monotonic() + timeout_s
        looks = 0
        while not is_so():
            looks += 1
            has_ended = looks % 30 == 0 and self.job and self.cluster.has_ended(self.job)
            is_late = time.monotonic() > deadline or (has_ended and not is_so())
            assert not is_late, f"never: {what}\n{self.text[-6000:]}"
            time.sleep(0.1)  # between two looks at files

    def wait_for_step(self, step: int) -> None:
        """Until every rank has committed it."""
        world = set(range(NODES * PROCESSES))

        def everyone() -> bool:
            found = self.facts("committed")
            return {fact["rank"] for fact in found if fact["step"] >= step} == world

        self.wait_until(everyone, f"step {step}")

    def wait_text(self, text: str) -> None:
        self.wait_until(lambda: text in self.text, text)

    def end(self, job: int, timeout_s: float = LIMIT_S) -> dict[str, str]:
        """What Slurm says of the job when it has ended; nothing of it is left anywhere."""
        try:
            about = self.cluster.wait(job, timeout_s)
        except TimeoutError as error:
            raise TimeoutError(f"{error}\n{self.text[-6000:]}") from error
        self.job = 0
        self.wait_until(lambda: not self.leftovers(), "no process of the job", 30)
        return about
