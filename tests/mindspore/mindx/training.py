"""Starts a script of this folder, one process for each rank, as the documented main.sh does."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import socket
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[3]
HERE = pathlib.Path(__file__).parent


class Training:
    """The processes of one start; the folder outlives them."""

    def __init__(self, folder: pathlib.Path, script: str = "script.py") -> None:
        self.folder, self.script = folder, HERE / script
        self.checkpoints = folder / "checkpoints"
        self.checkpoints.mkdir(exist_ok=True)
        self.ranks: list[subprocess.Popen] = []
        self.others: list[subprocess.Popen] = []
        self.output: list[list[str]] = []

    def start(self, world: int = 1, *arguments: str, **environment: object) -> None:
        common = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": f"{ROOT}:{ROOT / 'packages/mindx_elastic'}",
            "OMP_NUM_THREADS": "1",
            "GLOG_v": "3",  # errors
            "MINDX_ELASTIC_DIR": str(self.folder / "state"),
            "MINDX_FAULT_NPUS": str(self.folder / "fault-npus"),
            "MINDX_TASK_ID": "job-1",
            "RANK_SIZE": str(world),
            **{name: str(value) for name, value in environment.items()},
        }
        if world > 1:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            common |= {
                "MS_SCHED_HOST": "127.0.0.1",
                "MS_SCHED_PORT": str(port),
                "MS_WORKER_NUM": str(world),
            }
            self.others.append(self._process({**common, "MS_ROLE": "MS_SCHED"}, arguments, "sched"))
        self.output = [[] for _ in range(world)]
        self.ranks = []
        for rank in range(world):
            # %d in a value stands for the rank.
            mine = {name: value.replace("%d", str(rank)) for name, value in common.items()}
            own = {"RANK_ID": str(rank), "MS_NODE_ID": str(rank), "DEVICE_ID": str(rank)}
            if world > 1:
                own["MS_ROLE"] = "MS_WORKER"
            self.ranks.append(self._process({**mine, **own}, arguments, None))

    def group_file(self, rank: int) -> pathlib.Path:
        path = self.folder / f"device{rank}" / "group_info.pb"
        path.parent.mkdir(exist_ok=True)
        return path

    def _process(self, environment, arguments, log):
        """`log`: the name of a file; None: the test reads what it says."""
        with contextlib.ExitStack() as stack:
            target = subprocess.PIPE
            if log is not None:
                target = stack.enter_context(open(self.folder / log, "w"))
            return subprocess.Popen(
                [sys.executable, "-u", self.script, self.checkpoints, *arguments],
                env=environment,
                cwd=self.folder,
                stdout=target,
                stderr=subprocess.STDOUT,
                text=True,
            )

    def until(self, rank: int, line: str) -> None:
        for one in self.ranks[rank].stdout:
            self.output[rank].append(one)
            if one.startswith(line):
                return
        pytest.fail(f"rank {rank} ended without {line!r}:\n{self.text(rank)[-4000:]}")

    def terminate(self, *ranks: int) -> None:
        for rank in ranks:
            self.ranks[rank].send_signal(signal.SIGTERM)

    def wait(self) -> list[int]:
        for rank, process in enumerate(self.ranks):
            self.output[rank] += process.stdout.readlines()
            process.wait()
        codes = [process.returncode for process in self.ranks]
        self.end()
        return codes

    def run(self, world: int = 1, *arguments: str, **environment: object) -> str:
        """To the end, all of it well: what it says last."""
        self.start(world, *arguments, **environment)
        codes = self.wait()
        assert codes == [0] * world, self.text()[-4000:]
        return self.output[0][-1].strip() if world == 1 else self._last_lines()

    def _last_lines(self) -> str:
        return " ".join(
            next(line.strip() for line in reversed(one) if line.startswith("digest"))
            for one in self.output
        )

    def text(self, rank: int = 0) -> str:
        return "".join(self.output[rank])

    def end(self) -> None:
        for process in [*self.ranks, *self.others]:
            if process.poll() is None:
                process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
        self.others = []

    def breakpoint_files(self, rank: int = 0) -> list[pathlib.Path]:
        folder = self.checkpoints / f"rank_{rank}"
        return sorted(folder.glob("*_breakpoint.ckpt"), key=lambda one: one.stat().st_mtime)

    def drafts(self) -> list[pathlib.Path]:
        return sorted(self.checkpoints.rglob(".mindx-*"))
