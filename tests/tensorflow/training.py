"""examples/tensorflow/resnet.py as tests start it, and what it has printed."""

from __future__ import annotations

import os
import pathlib
import re
import select
import signal
import sys
import time

from testbed import proc
from testbed.processes import ROOT, Finished, Output, environment

SCRIPT = ROOT / "examples" / "tensorflow" / "resnet.py"
HALT = pathlib.Path(__file__).parent / "halt.py"
STEPS, EVERY, KEPT = 60, 10, 3  # the example's own
LIMIT_S = 900  # TensorFlow takes 6 s to import on an idle core, and minutes on a busy one
GRACE_S = 600  # for a save, which takes less than a second on an idle core


class Run:
    """One command, from its start to its end."""

    def __init__(self, output: Output, halts: pathlib.Path) -> None:
        self._output, self._halts = output, halts

    @property
    def pid(self) -> int:
        """Of the command itself."""
        return self._output.process.pid

    def halted(self, place: int | str) -> int:
        """The pid of the training, when it has stopped itself at this place. See halt.py."""
        deadline, path = time.monotonic() + LIMIT_S, self._halts / str(place)
        while not (path.exists() and path.read_text().endswith("\n")):
            assert not self.has_ended(0.02), f"ended before {place}:\n{self._output.text[-6000:]}"
            assert time.monotonic() < deadline, f"never at {place}:\n{self._output.text[-6000:]}"
        pid = int(path.read_text())
        while proc.state_of(pid) != "T":
            assert not self.has_ended(0.02), self._output.text[-6000:]
            assert time.monotonic() < deadline, proc.state_of(pid)
        return pid

    def wait_text(self, text: str) -> None:
        """Until this has been printed."""
        self._output.wait_text(text, LIMIT_S)

    def has_ended(self, within_s: float) -> bool:
        """Whether the command has."""
        return bool(select.select([self._output.pidfd], [], [], within_s)[0])

    def end(self) -> Finished:
        """Its natural end."""
        return self._output.wait(LIMIT_S)

    def kill(self) -> None:
        """If it still runs. Twice is once."""
        self._output.end()


class Training:
    """One folder of checkpoints, and the runs that fill it."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder, self.checkpoints = folder, folder / "checkpoints"
        self._halts = folder / "halts"
        self._halts.mkdir()
        self._runs: list[Run] = []

    def script(self, *places: int | str) -> list[str]:
        """What an interpreter is given to train, and to stop at these places once."""
        named = ",".join(str(place) for place in places)
        wrapper = [str(HALT), str(self._halts), named] if places else []
        options = [f"--restore-path={self.checkpoints}", f"--steps={STEPS}"]
        return [*wrapper, str(SCRIPT), *options, f"--save-every={EVERY}"]

    def start(self, *places: int | str, max_restarts: int = 3) -> Run:
        """Under taskd.rerun."""
        launcher = [sys.executable, "-m", "taskd.rerun", f"--max-restarts={max_restarts}", "--"]
        return self.execute([*launcher, sys.executable, *self.script(*places)])

    def execute(self, command: list[str], **variables: str) -> Run:
        """Any command, in this folder."""
        env = environment(TF_CPP_MIN_LOG_LEVEL="2", TASKD_GRACE_S=str(GRACE_S), **variables)
        path = self.folder / f"run-{len(self._runs)}.txt"
        self._runs.append(Run(Output(command, env, path, self.folder), self._halts))
        return self._runs[-1]

    def close(self) -> None:
        """Nobody is left."""
        for run in self._runs:
            run.kill()


def kill(pid: int) -> None:
    """SIGKILL, and it has taken effect."""
    handle = os.pidfd_open(pid)
    try:
        signal.pidfd_send_signal(handle, signal.SIGKILL)
        assert select.select([handle], [], [], LIMIT_S)[0]
    finally:
        os.close(handle)


def digest(text: str) -> str:
    """Of all weights and of the optimizer, as the training says at its end."""
    (found,) = re.findall(r"^final: digest ([0-9a-f]{16})$", text, re.MULTILINE)
    return found


def steps(text: str) -> list[list[int]]:
    """What each process has done, in the order of the processes."""
    found: dict[str, list[int]] = {}
    for pid, number in re.findall(r"^pid (\d+) step (\d+) loss", text, re.MULTILINE):
        found.setdefault(pid, []).append(int(number))
    return list(found.values())


def said(text: str) -> list[str]:
    """What taskd.rerun and the training have said but for steps, pids and folders."""
    pattern = r"^(?:taskd: |going on|starting|SIG\w+: saved|.* cannot be read).*"
    lines = re.findall(pattern, text, re.MULTILINE)
    return [re.sub(r"pid \d+", "pid", re.sub(r"[^ (]*/(ckpt-\d+)", r"\1", line)) for line in lines]
