"""Starts real jobs (manager, torchrun, workers) for tests and benchmarks, and looks at what they left behind."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import pathlib
import select
import signal
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING, TypeVar

from taskd.agent import spawn
from tests.process import warm

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

T = TypeVar("T")

ROOT = pathlib.Path(__file__).resolve().parents[2]
SCRIPTS = pathlib.Path(__file__).resolve().parent / "scripts"


_reserved: list[socket.socket] = []


def free_port() -> int:
    """A port that nobody else is given while this process lives.

    It stays bound: the kernel then gives it to no other socket that asks for any port. Servers that
    set SO_REUSEADDR (ZeroMQ, torch's store) may bind it all the same, because nobody listens on it.
    """
    probe = socket.socket()
    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    probe.bind(("127.0.0.1", 0))
    _reserved.append(probe)
    return probe.getsockname()[1]


def environment(**extra: str) -> dict[str, str]:
    """A clean environment for one job on loopback.

    Nothing of ours inherited, and nothing that torch has set in this process.
    """
    env = {
        key: value
        for key, value in spawn.initial_environment().items()
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


WARM = warm.WarmParent(environment())


def descendants(pid: int) -> set[int]:
    """All live processes below `pid`."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                stat = pathlib.Path(f"/proc/{entry}/stat").read_text()
                children.setdefault(int(stat.rpartition(")")[2].split()[1]), []).append(int(entry))
    found, todo = set(), [pid]
    while todo:
        for child in children.get(todo.pop(), ()):
            found.add(child)
            todo.append(child)
    return found


def state_of(pid: int) -> str:
    """The state letter of a process (proc(5): R, S, D, T, Z, ...)."""
    return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def marked(value: str) -> set[int]:
    """All live processes whose environment holds TASKD_TEST_MARK=value.

    Orphans of a job are found by it.
    """
    needle = f"TASKD_TEST_MARK={value}".encode()
    found = set()
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid():
            with contextlib.suppress(OSError):
                if (
                    needle in pathlib.Path(f"/proc/{entry}/environ").read_bytes().split(b"\0")
                    and state_of(int(entry)) != "Z"
                ):
                    found.add(int(entry))
    return found


def run_plainly(
    directory: pathlib.Path,
    script: str,
    *arguments: str,
    nproc: int,
    timeout_s: float = 120,
    **env: str,
) -> str:
    """Train without taskd: `nproc` processes with the variables that torchrun sets.

    Returns what they printed; all ended with 0.
    """
    group = {
        "WORLD_SIZE": str(nproc),
        "LOCAL_WORLD_SIZE": str(nproc),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    ranks = [
        Output(
            [sys.executable, script, *arguments],
            environment(**group, RANK=str(rank), LOCAL_RANK=str(rank), **env),
            directory / f"plain{rank}.out",
            directory,
            warm=True,
        )
        for rank in range(nproc)
    ]
    try:
        ended = [rank.wait(timeout_s) for rank in ranks]
    finally:
        for rank in ranks:
            rank.end()
    text = "\n".join(finished.output for finished in ended)
    assert all(finished.returncode == 0 for finished in ended), text[-6000:]
    return text


def once(folder: pathlib.Path, name: str, make: Callable[[], T]) -> T:
    """What `make` returns (as JSON), made by the first of several test processes that share `folder`; the others wait for it."""
    path = folder / f"{hashlib.sha256(name.encode()).hexdigest()[:16]}.json"
    with open(path.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            path.write_text(json.dumps(make()))
        return json.loads(path.read_text())


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

    With `warm`, a command of this interpreter (`-m module …`, `script …`) is a fork of the warm
    parent where that looks the same.
    """

    def __init__(
        self,
        command: list[str],
        env: dict[str, str],
        path: pathlib.Path,
        cwd: pathlib.Path,
        *,
        warm: bool = False,
    ) -> None:
        self.path = path
        if warm and command[0] == sys.executable and WARM.can_start(env):
            self.process = WARM.start(command[1:], env, path, cwd)
            self.pidfd = self.process.pidfd
            return
        with path.open("wb") as out:
            self.process = subprocess.Popen(
                command,
                env=env,
                stdout=out,
                stderr=subprocess.STDOUT,
                cwd=cwd,
                start_new_session=True,
            )
        self.pidfd = os.pidfd_open(self.process.pid)

    @property
    def text(self) -> str:
        return self.path.read_text(errors="replace")

    def wait(self, timeout_s: float) -> Finished:
        ready, _, _ = select.select([self.pidfd], [], [], timeout_s)
        if not ready:
            message = f"still running after {timeout_s} s:\n{self.text[-6000:]}"
            raise TimeoutError(message)
        return Finished(self.process.wait(), self.text)

    def wait_text(self, text: str, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while text not in self.text:
            ended = bool(select.select([self.pidfd], [], [], 0.02)[0])
            if text in self.text:
                return
            if ended or time.monotonic() > deadline:
                message = (
                    f"{'ended' if ended else 'too late'}, never said {text!r}:\n{self.text[-6000:]}"
                )
                raise TimeoutError(message)

    def end(self) -> None:
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        os.close(self.pidfd)


class Job:
    """One job on this machine: a manager (optional) and one or several torchruns."""

    def __init__(self, directory: pathlib.Path, **env: str) -> None:
        self.directory = directory
        self.facts_dir = directory / "facts"
        self.facts_dir.mkdir(parents=True, exist_ok=True)
        self.log_dir = directory / "log"
        self.mark = f"{os.getpid()}-{time.monotonic_ns()}"
        self.port = free_port()
        self.master_port = free_port()
        self.env = (
            environment(
                FACTS=str(self.facts_dir),
                TASKD_PORT=str(self.port),
                TASKD_PROCESS_ENABLE="on",
                MINDX_TASK_ID="test-job",
                TASKD_LOG_PATH=str(self.log_dir),
                TASKD_TEST_MARK=self.mark,
            )
            | env
        )
        self.manager: Output | None = None
        self.agents: list[Output] = []

    def start_manager(self, *arguments: str, prefix: tuple[str, ...] = (), **env: str) -> Output:
        """`prefix`: of the command, where it is to run elsewhere."""
        name = f"manager-{time.monotonic_ns()}.out"
        command = [*prefix, sys.executable, str(ROOT / "manager.py"), *arguments]
        self.manager = Output(command, self.env | env, self.directory / name, self.directory)
        return self.manager

    def start_agent(
        self,
        script: str,
        *script_args: str,
        nproc: int = 4,
        options: tuple[str, ...] = (),
        prefix: tuple[str, ...] = (),
        warm: bool = True,
        **env: str,
    ) -> Output:
        """`warm`: not an interpreter of its own, but a fork of one that has imported torch."""
        path = SCRIPTS / script
        if not any(
            option.startswith(("--standalone", "--rdzv", "--nnodes", "--master"))
            for option in options
        ):
            # torch's dynamic rendezvous would spend 1.5 s of processor time on looking at its own
            # stack.
            options = (
                "--nnodes=1",
                "--node-rank=0",
                "--master-addr=127.0.0.1",
                f"--master-port={self.master_port}",
                *options,
            )
        command = [
            *prefix,
            sys.executable,
            "-m",
            "taskd.run",
            f"--nproc-per-node={nproc}",
            *options,
            str(path),
            *script_args,
        ]
        if self.manager is not None and self.manager.process.poll() is None:
            # a warm agent and its first fault would be there before a cold manager
            self.manager.wait_text("listens on", 60)
        agent = Output(
            command,
            self.env | env,
            self.directory / f"agent{len(self.agents)}.out",
            self.directory,
            warm=warm,
        )
        self.agents.append(agent)
        return agent

    def run(
        self,
        script: str = "train.py",
        *,
        nproc: int = 4,
        timeout_s: float = 90,
        options: tuple[str, ...] = (),
        manager: bool = True,
        **env: str,
    ) -> Finished:
        """Manager and one torchrun; returns torchrun's end."""
        if manager:
            self.start_manager()
        agent = self.start_agent(script, nproc=nproc, options=options, **env)
        try:
            return agent.wait(timeout_s)
        except TimeoutError as error:
            raise TimeoutError(self.story()) from error

    def story(self) -> str:
        """What everybody said so far and what each rank noted last, for the message of a test that waited in vain."""
        said = [
            f"{process.path.name}:\n{process.text[-4000:]}"
            for process in [*self.agents, self.manager]
            if process is not None
        ]
        last = {
            fact["rank"]: f"rank {fact['rank']}, state {self._state(fact['pid'])}: {fact}"
            for fact in self.facts()
        }
        return "\n".join([*said, *(last[rank] for rank in sorted(last))])

    @staticmethod
    def _state(pid: int) -> str:
        try:
            return state_of(pid)
        except FileNotFoundError:
            return "gone"

    def facts(self, what: str | None = None) -> list[dict]:
        """What the workers noted, with their rank, in order of time."""
        found = []
        for path in self.facts_dir.glob("*.jsonl"):
            for line in path.read_text().splitlines():
                entry = json.loads(line) | {"rank": int(path.stem)}
                if what is None or entry["what"] == what:
                    found.append(entry)
        return sorted(found, key=lambda entry: entry["time"])

    def recoveries(self) -> list[dict]:
        """The JSON records that the manager wrote."""
        path = self.log_dir / "recoveries.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def digests(self) -> dict[int, str]:
        """Final digest of each rank that finished."""
        return {entry["rank"]: entry["digest"] for entry in self.facts("returned")}

    def leftovers(self) -> set[int]:
        """Processes of this job that are still there."""
        return marked(self.mark)

    def close(self) -> None:
        for process in [*self.agents, self.manager]:
            if process is not None:
                process.end()
        for pid in self.leftovers():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def job(directory: pathlib.Path, **env: str) -> Iterator[Job]:
    """A job that is cleaned up whatever happens."""
    running = Job(directory, **env)
    try:
        yield running
    finally:
        running.close()
