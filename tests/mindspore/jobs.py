"""Jobs of MindSpore's own msrun, and what is asked of them."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pathlib
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
SCRIPT = pathlib.Path(__file__).parent / "scripts" / "train.py"
LIMIT_S = 1800.0  # of a job with forty restarts, on two cores that others use, too
MARK = "TASKD_TEST_JOB"


_RESERVED: list[int] = []  # descriptors, open as long as this process lives


def free_port() -> int:
    """A port that no other process of tests is given while this one lives.

    It is locked and not bound, as msrun may want it for itself alone; and the kernel gives it to
    nobody who asks for any port (its own begin at 32768).
    """
    for port in random.SystemRandom().sample(range(20_000, 30_000), 10_000):
        path = os.path.join(tempfile.gettempdir(), f"taskd-test-port-{port}")
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", port))
        except OSError:  # somebody else's
            os.close(lock)
            continue
        _RESERVED.append(lock)
        return port
    raise OSError("no port is free")


class Job:
    """A folder in which jobs of one name run, one after the other."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.log = path / "log"
        self.environment = {
            **os.environ,
            "PATH": f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOG_v": "3",
            "TASKD_PORT": str(free_port()), "TASKD_LOG_PATH": str(self.log),
            "TASKD_CHECKPOINT_DIR": str(self.checkpoints), "MINDX_TASK_ID": "ms",
            "STRUCK": str(path), MARK: str(path),
        }  # fmt: skip
        self.process: subprocess.Popen[str] | None = None
        self.output = ""
        self.runs = 0

    def start(
        self, ranks: int, script: pathlib.Path = SCRIPT, *arguments: str, tft: str = "{RSC:1}",
        **environment: str,
    ) -> Job:  # fmt: skip
        """Start msrun."""
        self.runs += 1
        command = [
            "msrun", f"--worker_num={ranks}", f"--local_worker_num={ranks}",
            f"--master_port={free_port()}", f"--log_dir={self.path / f'run{self.runs}'}",
            f"--join={not tft}", "--tail_worker_log=0", str(script), *arguments,
        ]  # fmt: skip
        return self._start(command, {"MS_ENABLE_TFT": tft, **environment})

    def start_alone(self, script: pathlib.Path = SCRIPT, **environment: str) -> Job:
        """Start the script without any launcher."""
        self.runs += 1
        folder = self.path / f"run{self.runs}"
        folder.mkdir()
        return self._start([sys.executable, str(script)], environment)

    def _start(self, command: list[str], environment: dict[str, str]) -> Job:
        self.process = subprocess.Popen(
            command, env={**self.environment, **environment}, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, cwd=self.path,
        )  # fmt: skip
        return self

    def end(self) -> int:
        """Its exit code. All that it has printed is in `output`."""
        assert self.process is not None
        self.output, _ = self.process.communicate(timeout=LIMIT_S)
        if not (self.path / f"run{self.runs}" / "worker_0.log").exists():
            (self.path / f"run{self.runs}" / "worker_0.log").write_text(self.output)
        return self.process.returncode

    # ------------------------------------------------------------------ what it has said

    def said(self, rank: int, run: int | None = None) -> str:
        """What all lives of this rank have printed in a run, the first one first."""
        folder = self.path / f"run{run or self.runs}"
        lives = sorted(
            folder.glob(f"worker_{rank}.log.*"), key=lambda path: int(path.suffix.lstrip("."))
        )
        last = folder / f"worker_{rank}.log"
        return "".join(path.read_text(errors="replace") for path in (*lives, last) if path.exists())

    def began_at(self, rank: int) -> list[int]:
        """After which step each life of the rank went on."""
        found = re.findall(
            r"taskd: rank \d+ (?:starts at|goes on after) step (\d+)", self.said(rank)
        )
        return [int(step) for step in found]

    def digests(self, ranks: int) -> set[str]:
        """Of the parameters, at the end, on all ranks."""
        return {
            digest
            for rank in range(ranks)
            for digest in re.findall(r"digest (\w+)", self.said(rank))[-1:]
        }

    def wait_for_step(self, step: int, rank: int = 0) -> None:
        """Until this rank has printed that it has done this step."""
        assert self.process is not None
        while f"step {step} " not in self.said(rank):
            assert self.process.poll() is None, "it ended too soon"
            time.sleep(0.02)  # a log file cannot be waited for

    @property
    def records(self) -> list[dict]:
        path = self.log / "recoveries.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    # ------------------------------------------------------------------ its processes

    def processes(self) -> dict[int, dict[str, str]]:
        """All that belong to it, with their environment."""
        found = {}
        for name in os.listdir("/proc"):
            with contextlib.suppress(OSError, ValueError):
                pid = int(name)
                text = pathlib.Path(f"/proc/{pid}/environ").read_text(errors="replace")
                pairs = dict(pair.split("=", 1) for pair in text.split("\0") if "=" in pair)
                if pairs.get(MARK) == str(self.path) and pid != os.getpid():
                    found[pid] = pairs
        return found

    def workers(self) -> dict[int, int]:
        """Process of each rank."""
        found = {}
        for pid, environment in self.processes().items():
            with contextlib.suppress(OSError):
                words = pathlib.Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                is_script = words[0].startswith(b"python") and words[1].endswith(b".py")
                if environment.get("MS_ROLE") == "MS_WORKER" and is_script:
                    found[int(environment["RANK_ID"])] = pid
        return found

    def check_nothing_is_left(self) -> None:
        """Ends what is left, and fails if that was anything."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.communicate()
        left = self.processes()
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        assert not left, f"left behind: {sorted(left)}"
