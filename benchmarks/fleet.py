"""The manager of a large job: a real manager.py, and agents imitated on real sockets.

    python benchmarks/fleet.py [--agents 256 1024 4096] [--per-node 8] [--faults 10]
                               [--steady-s 20] [--processes 4] [--profile FILE] [--json FILE]

For each number of agents, with hang detection on and heartbeats with the marks of all ranks, as
often as agents of such a job send them (`taskd.testing.fleet` says what is imitated):

- join: from the first connection until the last agent was accepted; all come at once;
- steady: the manager's share of a core, and how soon it answers heartbeats, over --steady-s;
- faults: one rank dies; from the agent's report until the last agent has its `Interrupt`, and its
  `Resume`. In between each of the ranks says that it has stopped;
- how many agents register again when the connection of one breaks.

The agents need about as much of the processor as the manager: on two cores the times say what both
need, and the seconds of processor time what the manager needs. --profile: with cProfile, for
whoever looks for what is slow; the figures are void then.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import pathlib
import random
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from typing import TYPE_CHECKING

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from benchmarks import measuring
from taskd.clock import MonotonicClock
from taskd.core.timeouts import Timeouts
from taskd.testing.fleet import Fleet, ImitatedAgent

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.connection import Connection

JOB_ID = "fleet"
LIMIT_S = 60.0  # for each thing that is waited for
BETWEEN_S = 2.0  # between faults
SPARE_DESCRIPTORS = 200
SEED = 7
FLEET_NICE = 5  # agents stand for other hosts, which leave the manager its processor


class TooLongError(Exception):
    """What is measured did not come within `LIMIT_S`."""


def agents_of_process(
    pipe: Connection, address: str, node_ranks: range, count: int, per_node: int
) -> None:
    """Imitate these agents, and answer what comes through the pipe."""
    os.nice(FLEET_NICE)
    gc.disable()  # a look at all that a thousand agents have takes 0.1 s, in which none can read
    clock = MonotonicClock()
    began_at = clock.now()
    fleet = Fleet(
        [ImitatedAgent(JOB_ID, rank, count, per_node, clock) for rank in node_ranks], address, clock
    )
    while True:
        fleet.turn(at_most_s=0.02)
        if pipe.poll():
            pipe.send(began_at if (asked := pipe.recv()) == "began_at" else answer(fleet, asked))


def answer(fleet: Fleet, asked: object) -> object:
    """What is to be told of these agents, or when was done to one what is asked for."""
    agents = fleet.agents
    match asked:
        case "accepted":
            return [agent.accepted_at for agent in agents.values()]
        case "registrations":
            return sum(agent.registrations for agent in agents.values())
        case "answered_s":
            seconds = [one for agent in agents.values() for one in agent.answered_s]
            for agent in agents.values():
                agent.answered_s.clear()
            return seconds
        case ("told", str(order), int(generation)):
            return [agent.told_at.get((order, generation)) for agent in agents.values()]
        case ("kill", int(node_rank), int(rank)):
            at = MonotonicClock().now()
            agents[node_rank].kill(rank)
            return at
        case ("hang up", int(node_rank)):
            return fleet.hang_up(node_rank)
    raise ValueError(asked)


class Processes:
    """The processes with the agents."""

    def __init__(self, pipes: dict[Connection, range]) -> None:
        self._pipes = pipes

    def ask(self, request: object) -> list:
        """What each of them answers."""
        for pipe in self._pipes:
            pipe.send(request)
        return [pipe.recv() for pipe in self._pipes]

    def ask_one(self, node_rank: int, request: object) -> object:
        """What the one with this agent answers."""
        pipe = next(pipe for pipe, ranks in self._pipes.items() if node_rank in ranks)
        pipe.send(request)
        return pipe.recv()

    def times(self, request: object) -> list[float]:
        """The times that all agents tell, once all of them know one. Raises `TooLongError`."""
        until = time.monotonic() + LIMIT_S
        while time.monotonic() < until:
            times = [at for answer in self.ask(request) for at in answer]
            if None not in times:
                return times
            time.sleep(0.1)
        missing = sum(at is None for at in times)
        raise TooLongError(f"{request}: {missing} of {len(times)} agents after {LIMIT_S:.0f} s")


@contextlib.contextmanager
def a_manager(port: int, profile: pathlib.Path | None) -> Iterator[subprocess.Popen]:
    """A manager that listens."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {
            **os.environ,
            "TASKD_PROCESS_ENABLE": "on",
            "TASKD_BIND_ADDR": "127.0.0.1",
            "TASKD_PORT": str(port),
            "TASKD_LOG_PATH": folder,
            "TASKD_LOG_STDOUT": "False",
            "MINDX_TASK_ID": JOB_ID,
        }
        profiler = ["-m", "cProfile", "-o", str(profile)] if profile else []
        command = [sys.executable, *profiler, str(ROOT / "manager.py")]
        with subprocess.Popen(command, env=environment, cwd=ROOT) as manager:
            until = time.monotonic() + LIMIT_S
            while not _listens(port):
                if time.monotonic() > until or manager.poll() is not None:
                    raise TooLongError("the manager does not listen")
                time.sleep(0.1)
            try:
                yield manager
            finally:
                manager.send_signal(signal.SIGTERM)


def _listens(port: int) -> bool:
    wanted = f"0100007F:{port:04X} 00000000:0000 0A"
    return wanted in pathlib.Path("/proc/net/tcp").read_text()


@contextlib.contextmanager
def some_agents(port: int, count: int, per_node: int, processes: int) -> Iterator[Processes]:
    """All agents, connecting."""
    context = multiprocessing.get_context("spawn")
    pipes, started = {}, []
    step = -(-count // processes)
    for first in range(0, count, step):
        ours, theirs = context.Pipe()
        node_ranks = range(first, min(first + step, count))
        arguments = (theirs, f"127.0.0.1:{port}", node_ranks, count, per_node)
        process = context.Process(target=agents_of_process, args=arguments, daemon=True)
        process.start()
        pipes[ours] = node_ranks
        started.append(process)
    try:
        yield Processes(pipes)
    finally:
        for process in started:
            process.kill()
            process.join()


def processor_s(pid: int) -> float:
    """Seconds of processor time that a process has used."""
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory_mb(pid: int, field: str) -> int:
    """`field` of /proc/PID/status: VmRSS, VmHWM."""
    lines = pathlib.Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) // 1024


def measure(count: int, options) -> dict:
    """The row of so many agents; what was not reached is told under `not_reached`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    row: dict = {"agents": count, "world_size": count * options.per_node}
    row["heartbeat_s"] = Timeouts.derive().of_job(count).heartbeat_s
    row["load_1min"] = measuring.load_1min()
    with (
        a_manager(port, options.profile) as manager,
        some_agents(port, count, options.per_node, options.processes) as agents,
    ):
        try:
            _measure(row, manager.pid, agents, options)
        except TooLongError as error:
            row["not_reached"] = str(error)
        row["memory_peak_mb"] = memory_mb(manager.pid, "VmHWM")
        row["load_1min_after"] = measuring.load_1min()
    return row


def _measure(row: dict, pid: int, agents: Processes, options) -> None:
    count, per_node = row["agents"], options.per_node
    began_s = processor_s(pid)
    accepted = agents.times("accepted")
    row["join_s"] = round(max(accepted) - min(agents.ask("began_at")), 2)
    row["join_processor_s"] = round(processor_s(pid) - began_s, 2)
    time.sleep(3 * BETWEEN_S)
    agents.ask("answered_s")
    before_s, at = processor_s(pid), time.monotonic()
    time.sleep(options.steady_s)
    lasted_s = time.monotonic() - at
    row["steady_processor"] = round((processor_s(pid) - before_s) / lasted_s, 3)
    answered_s = [seconds for answer in agents.ask("answered_s") for seconds in answer]
    row["answers_per_s"] = round(len(answered_s) / lasted_s)
    row["answered"] = measuring.spread(answered_s)
    row["memory_mb"] = memory_mb(pid, "VmRSS")
    interrupts, resumes, used, chosen = [], [], [], random.Random(SEED)
    for generation in range(1, options.faults + 1):
        node_rank = chosen.randrange(count)
        before_s = processor_s(pid)
        rank = node_rank * per_node + chosen.randrange(per_node)
        at = agents.ask_one(node_rank, ("kill", node_rank, rank))
        resumed = agents.times(("told", "Resume", generation))
        interrupted = agents.times(("told", "Interrupt", generation))
        used.append(processor_s(pid) - before_s)
        interrupts.append(max(interrupted) - at)
        resumes.append(max(resumed) - at)
        row["interrupt_of_last"] = measuring.spread(interrupts)
        row["resume_of_last"] = measuring.spread(resumes)
        row["processor_s_per_fault"] = round(sum(used) / len(used), 2)
        time.sleep(BETWEEN_S)
    before = sum(agents.ask("registrations"))
    agents.ask_one(1, ("hang up", 1))  # the first of a process has the context of the others
    time.sleep(2 * BETWEEN_S)
    after = 1 + sum(agents.ask("registrations"))  # 1: of the one that is gone
    row["register_again_after_a_disconnect"] = after - before


def main() -> None:
    """Measure, print, write."""
    parser = measuring.parser(__doc__)
    parser.add_argument("--agents", type=int, nargs="+", default=[256, 1024, 4096])
    parser.add_argument("--per-node", type=int, default=8)
    parser.add_argument("--faults", type=int, default=10)
    parser.add_argument("--steady-s", type=float, default=20.0)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--profile", type=pathlib.Path)
    options = parser.parse_args()
    needed = max(options.agents) * 2 + SPARE_DESCRIPTORS  # each has a connection and an event
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(needed, hard), hard))
    conditions = {**measuring.conditions(), "processes": options.processes}
    del conditions["world_size"]
    rows = []
    for count in options.agents:
        rows.append(measure(count, options))
        print(rows[-1], flush=True)
    measuring.save({**conditions, "jobs": rows}, options.json)


if __name__ == "__main__":
    main()
