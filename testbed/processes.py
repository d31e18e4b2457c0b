"""One process with its output in a file, and what it is started with."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import select
import signal
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING

from taskd.agent.spawning import warmth
from testbed import proc
from testbed.patience import Patience
from testbed.warm import WarmParent

if TYPE_CHECKING:
    from collections.abc import Iterator

    from testbed.hosts import Host
    from testbed.warm import WarmProcess

ROOT = pathlib.Path(__file__).resolve().parents[1]

_KILLED_S = 20.0  # until a process that was killed is gone: it frees its memory first


def free_port() -> int:
    """A port that nobody else is given while this process lives.

    It stays bound: the kernel then gives it to no other socket that asks for any port. Servers that
    set SO_REUSEADDR (ZeroMQ, torch's store) may bind it all the same, because nobody listens on it.
    """
    probe = socket.socket()
    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    probe.bind(("127.0.0.1", 0))
    port = probe.getsockname()[1]
    probe.detach()  # nobody closes it
    return port


def environment(**extra: str) -> dict[str, str]:
    """A clean environment for one job on loopback.

    Nothing of ours inherited, and nothing that torch has set in this process.
    """
    env = {
        key: value
        for key, value in warmth.initial_environment().items()
        if not key.startswith(("TASKD_", "MINDX_", "TORCHELASTIC", "PYTEST_"))
    }
    for key in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "POD_IP"):
        env.pop(key, None)
    env |= {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])),
    }
    return env | extra


TORCHRUNS = WarmParent(environment())
MANAGERS = WarmParent(environment(), "manager")


def torchrun(script: str, *options: str, nproc: int, module: str = "taskd.run") -> list[str]:
    """The command. `module`: torch's own is "torch.distributed.run"."""
    return [sys.executable, "-m", module, f"--nproc-per-node={nproc}", *options, script]


@dataclasses.dataclass
class Finished:
    """What one process of the job printed, and how it ended."""

    returncode: int
    output: str

    @property
    def last_line(self) -> str:
        """The last line that is not empty."""
        return next((line for line in reversed(self.output.splitlines()) if line.strip()), "")


class Output:
    """A process whose output goes to a file, so that nobody has to drain a pipe.

    A command of this interpreter (`-m module …`, `script …`) is a fork of `warm`, if one is given
    and that looks the same.
    """

    def __init__(
        self,
        command: list[str],
        env: dict[str, str],
        path: pathlib.Path,
        cwd: pathlib.Path,
        *,
        warm: WarmParent | None = None,
        host: Host | None = None,
    ) -> None:
        """`host`: where it is to run, if not on this machine itself."""
        self.path = path
        path.touch()  # a fork takes its time to open it, and `text` may be asked for at once
        self.process: WarmProcess | subprocess.Popen[bytes]
        if warm is not None and command[0] == sys.executable and warm.can_start(env):
            self.process = warm.start(command[1:], env, path, cwd, host)
            self.pidfd = self.process.pidfd
            return
        with path.open("wb") as out:
            self.process = subprocess.Popen(
                command if host is None else [*host.prefix, *command],
                env=env,
                stdout=out,
                stderr=subprocess.STDOUT,
                cwd=cwd,
                start_new_session=True,
            )
        self.pidfd = os.pidfd_open(self.process.pid)

    @property
    def text(self) -> str:
        """What it has printed so far."""
        return self.path.read_text(errors="replace")

    def wait(self, timeout_s: float) -> Finished:
        """Its end. Raises TimeoutError: it has not come within so much of testbed.patience."""
        patience = self._patience(timeout_s)
        while not select.select([self.pidfd], [], [], patience.left_s())[0]:
            if not patience.left_s():
                raise TimeoutError(f"still running after {patience}:\n{self.text[-6000:]}")
        return Finished(self.process.wait(), self.text)

    def wait_text(self, text: str, timeout_s: float) -> None:
        """Until it has printed this. Raises TimeoutError: too late, or it has ended before."""
        patience = self._patience(timeout_s)
        while text not in self.text:
            ended = bool(select.select([self.pidfd], [], [], 0.02)[0])
            if text in self.text:
                return
            if ended or not patience.left_s():
                why = "ended" if ended else f"too late, after {patience}"
                raise TimeoutError(f"{why}, never said {text!r}:\n{self.text[-6000:]}")

    def _patience(self, limit_s: float) -> Patience:
        pid = self.process.pid
        return Patience(limit_s, lambda: {pid} | proc.descendants(pid))

    def end(self) -> None:
        """Kill it and its group, if it still runs, and give its descriptor back.

        Returns when all of them are gone. Twice is once.
        """
        if self.pidfd < 0:
            return
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            _await_end_of_group(self.process.pid)
        os.close(self.pidfd)
        self.pidfd = -1  # the number is soon that of something else


def _await_end_of_group(leader: int) -> None:
    """Until those who were killed with it are gone, too. Raises TimeoutError."""
    deadline = time.monotonic() + _KILLED_S
    while members := proc.group(leader):
        for pid in members:
            with contextlib.suppress(ProcessLookupError), _pidfd(pid) as pidfd:
                left_s = max(0.0, deadline - time.monotonic())
                if not select.select([pidfd], [], [], left_s)[0]:
                    raise TimeoutError(
                        f"{pid} was killed, and is still there: {proc.threads_of(pid)}"
                    )


@contextlib.contextmanager
def _pidfd(pid: int) -> Iterator[int]:
    """Raises ProcessLookupError: it is gone."""
    pidfd = os.pidfd_open(pid)
    try:
        yield pidfd
    finally:
        os.close(pidfd)
