"""One job on this machine: starts its manager and its torchruns, and reads what they left behind.

directory/facts/    what the workers note: <rank>-<pid>.jsonl (testbed.script)
directory/log/      TASKD_LOG_PATH: the records of the manager
directory/*.out     what each process has printed
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from typing import TYPE_CHECKING, Any

from testbed.facts import facts_in
from testbed.patience import Patience
from testbed.proc import MARK_ENV, marked, state_of, threads_of
from testbed.processes import (
    MANAGERS,
    ROOT,
    TORCHRUNS,
    Finished,
    Output,
    environment,
    free_port,
    torchrun,
)

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Iterator

    from testbed.hosts import Host

_MANAGER_ENDS_S = 60.0  # after the last torchrun: it waits for nobody then
SCRIPTS = ROOT / "tests" / "process" / "scripts"  # trainings that are called by their name alone


class Job:
    """A manager (optional) and one or several torchruns.

    `env`: variables of all its processes. `directory` is made if it is not there.
    """

    def __init__(self, directory: pathlib.Path, **env: str) -> None:
        self.directory = directory
        self.facts_dir = directory / "facts"
        self.facts_dir.mkdir(parents=True, exist_ok=True)
        self.log_dir = directory / "log"
        self.mark = f"{os.getpid()}-{time.monotonic_ns()}"
        self.port = free_port()
        self.master_port = free_port()
        self.master = "127.0.0.1"
        self.env = environment(
            FACTS=str(self.facts_dir),
            TASKD_PORT=str(self.port),
            TASKD_PROCESS_ENABLE="on",
            TASKD_MANAGER="off",
            MINDX_TASK_ID="test-job",
            TASKD_LOG_PATH=str(self.log_dir),
        ) | {MARK_ENV: self.mark, **env}
        self.manager: Output | None = None
        self.agents: list[Output] = []

    def start_manager(self, *arguments: str, host: Host | None = None, **env: str) -> Output:
        """`host`: where it is to run, and to listen; else on this machine, for itself."""
        if host is not None:
            env = {"POD_IP": host.address} | env
        self.manager = Output(
            [sys.executable, str(ROOT / "manager.py"), *arguments],
            self.env | env,
            self.directory / f"manager-{time.monotonic_ns()}.out",
            self.directory,
            warm=MANAGERS,
            host=host,
        )
        return self.manager

    def start_node(
        self, script: str, node_rank: int, node_count: int, host: Host, **arguments: Any
    ) -> Output:
        """The torchrun of one node on a host of a bed, for the first time or again.

        The ranks meet on the host of the node 0 that was started last. `arguments`: of
        `start_agent`.
        """
        if node_rank == 0:
            self.master = host.address
        options = (
            f"--nnodes={node_count}",
            f"--node-rank={node_rank}",
            f"--master-addr={self.master}",
            f"--master-port={self.master_port}",
        )
        arguments = {"nproc": 2, "POD_IP": host.address} | arguments
        return self.start_agent(script, options=options, host=host, **arguments)

    def start_agent(
        self,
        script: str,
        *script_args: str,
        nproc: int = 4,
        options: tuple[str, ...] = (),
        host: Host | None = None,
        warm: bool = True,
        module: str = "taskd.run",
        cwd: pathlib.Path | None = None,
        **env: str,
    ) -> Output:
        """A torchrun. `warm`: not an interpreter of its own, but a fork that has imported torch.

        `host`: where it is to run. `module`: torch's own is "torch.distributed.run". `cwd`: its
        working directory, if not that of the job.
        """
        rendezvous = ("--standalone", "--rdzv", "--nnodes", "--master")
        if not any(option.startswith(rendezvous) for option in options):
            # torch's dynamic rendezvous would spend 1.5 s of processor time on its own stack
            master = ("--master-addr=127.0.0.1", f"--master-port={self.master_port}")
            options = ("--nnodes=1", "--node-rank=0", *master, *options)
        if self.manager is not None and self.manager.process.poll() is None:
            # a warm agent and its first fault would be there before a cold manager
            self.manager.wait_text("listens on", 60)
        command = torchrun(str(SCRIPTS / script), *options, nproc=nproc, module=module)
        agent = Output(
            [*command, *script_args],
            self.env | env,
            self.directory / f"agent{len(self.agents)}.out",
            self.directory if cwd is None else cwd,
            warm=TORCHRUNS if warm else None,
            host=host,
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
        """What everybody has printed and what each rank noted last, for the text of a failure."""
        said = [
            f"{process.path.name}:\n{process.text[-4000:]}"
            for process in [*self.agents, self.manager]
            if process is not None
        ]
        last = {
            fact["rank"]: f"rank {fact['rank']}, state {self._state(fact['pid'])}: {fact}"
            for fact in self.facts()
        }
        left = [f"pid {pid}: {threads_of(pid)}" for pid in sorted(self.leftovers())]
        return "\n".join([*said, *(last[rank] for rank in sorted(last)), *left])

    @staticmethod
    def _state(pid: int) -> str:
        try:
            return state_of(pid)
        except FileNotFoundError:
            return "gone"

    def tell(self, number: int | None = None) -> None:
        """What a fault with "told-", or a held step, waits for is there.

        `number`: of that fault, or that step.
        """
        (self.facts_dir / ("told" if number is None else f"told-{number}")).touch()

    def facts(self, what: str | None = None) -> list[dict]:
        """What the workers noted, with their rank, in order of time."""
        return [fact for fact in facts_in(self.facts_dir) if what in (None, fact["what"])]

    def recoveries(self) -> list[dict]:
        """The JSON records that the manager wrote.

        When all torchruns have ended it may still write the last one: then its end is awaited,
        also of one that a torchrun has started.
        """
        if self.agents and all(agent.process.poll() is not None for agent in self.agents):
            self._await_end()
        path = self.log_dir / "recoveries.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]  # one may be half there

    def _await_end(self) -> None:
        patience = self.patience(_MANAGER_ENDS_S)
        while self.leftovers():
            if not patience.left_s():
                raise TimeoutError(f"after {patience}, not all has ended:\n{self.story()}")
            time.sleep(0.02)

    def digests(self) -> dict[int, str]:
        """Final digest of each rank that finished."""
        return {fact["rank"]: fact["digest"] for fact in self.facts("returned")}

    def leftovers(self) -> set[int]:
        """Processes of this job that are still there."""
        return marked(self.mark)

    def patience(self, limit_s: float) -> Patience:
        """A limit for what its processes do."""
        return Patience(limit_s, self.leftovers)

    def close(self) -> None:
        """End all of it."""
        for process in [*self.agents, self.manager]:
            if process is not None:
                process.end()
        for pid in self.leftovers():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def job(directory: pathlib.Path, **env: str) -> Iterator[Job]:
    """A job that is cleaned up whatever happens. What fails within says how the job was then."""
    running = Job(directory, **env)
    try:
        yield running
    except (AssertionError, TimeoutError) as error:
        if sys.version_info >= (3, 11):
            error.add_note(running.story())
        raise
    finally:
        running.close()
