"""How long a job stands still when a whole node is lost and a spare takes its place.

    python benchmarks/node_loss.py [--losses 30] [--fault-timeout 6] [--imports MODULES]
                                   [--json FILE]

2 nodes x 2 ranks, gloo, DDP, on this machine, and one spare torchrun; the manager is a process of
its own. The torchrun of a node gets SIGKILL, and its ranks end with it; then the next spare is
started. Two jobs: one loses node 1 again and again, one loses in turn the node that hosts the store
at which the ranks meet (node 0 first). Reported: seconds from the kill to the first new commit of
the slowest rank; the same without detection (the lease of a node is the fault timeout, and nobody
can know sooner that a host is gone); steps redone; whether the final digest equals that of a run
without losses. --imports: what the script imports first, "sklearn.ensemble" for example, which a
spare should have imported before it is needed.
"""

from __future__ import annotations

import json
import os
import pathlib
import signal
import sys
import tempfile
import time
from typing import TYPE_CHECKING

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from benchmarks.measuring import conditions, load_1min, parser, save, spread
from benchmarks.recovery import (
    WORKLOAD,
    Commits,
    Kill,
    is_beyond,
    read_facts,
    steps_redone,
    times_to_commit,
)
from testbed.job import Job
from testbed.processes import Output, torchrun

if TYPE_CHECKING:
    from collections.abc import Callable

SPACING = 200  # steps between losses
LIMIT_S = 120  # for each thing that is waited for
END_S = 1800  # for the end of a job
LOOK_S = 0.005
_END_BYTES = 256


class NodeJob(Job):
    """Two nodes of two ranks, and spares."""

    def __init__(
        self, directory: pathlib.Path, steps: int, fault_timeout_s: float, imports: str
    ) -> None:
        super().__init__(
            directory,
            MODE="taskd",
            IMPORTS=imports,
            STEPS=str(steps),
            TASKD_RECOVER_STRATEGY="recover",
            TASKD_FAULT_TIMEOUT=str(fault_timeout_s),
        )
        self.spares = 0

    def start(self, node_rank: int, **env: str) -> Output:
        """One more torchrun."""
        options = (
            "--nnodes=2",
            f"--node-rank={node_rank}",
            "--master-addr=127.0.0.1",
            f"--master-port={self.master_port}",
        )
        command = torchrun(WORKLOAD, *options, nproc=2)
        number = len(self.agents)
        # each on a host of its own: one that loses two places is offered none any more
        env = self.env | {"TASKD_HOST": f"host{number}"} | env
        path = self.directory / f"torchrun{number}.out"
        self.agents.append(Output(command, env, path, self.directory))
        return self.agents[-1]

    def start_spare(self) -> Output:
        """Returns when it waits."""
        assert self.manager is not None
        spare = self.start(len(self.agents), TASKD_SPARE="1")
        self.spares += 1
        said = "(1 wait now)"
        self.await_fact(lambda: self.manager.text.count(said) == self.spares, "no spare")
        return spare

    def await_fact(self, fact: Callable[[], bool], what: str) -> None:
        """Raises SystemExit: it did not come."""
        deadline = time.monotonic() + LIMIT_S
        while not fact():
            if time.monotonic() > deadline:
                raise SystemExit(f"{what} within {LIMIT_S} s:\n{self.story()}")
            time.sleep(LOOK_S)

    def newest_step(self) -> int:
        """Of any rank. Reads the ends of the files, which grow to megabytes."""
        newest = -1
        for path in self.facts_dir.glob("[0-9]*.txt"):
            with path.open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - _END_BYTES))
                lines = file.read().split(b"\n")[1:-1]  # whole ones
            steps = (int(line.split()[1]) for line in lines if line.startswith(b"commit"))
            newest = max(newest, *steps, -1)
        return newest


def run(
    base: pathlib.Path,
    steps: int,
    losses: int,
    nodes: tuple[int, ...],
    fault_timeout_s: float,
    imports: str,
) -> tuple[Commits, set[str], list[Kill], list[dict]]:
    """One job that loses these nodes in turn: commits, digests, kills, the manager's records."""
    job = NodeJob(base, steps, fault_timeout_s, imports)
    kills: list[Kill] = []
    try:
        job.start_manager().wait_text("listens on", LIMIT_S)
        agents = {node_rank: job.start(node_rank) for node_rank in range(2)}
        for number in range(1, losses + 1):
            spare = job.start_spare()
            job.await_fact(lambda: job.newest_step() >= SPACING * number, "no steps")  # noqa: B023
            lost = nodes[number % len(nodes)]
            kills.append((time.monotonic_ns(), job.newest_step()))
            os.kill(agents[lost].process.pid, signal.SIGKILL)
            agents[lost] = spare
            job.await_fact(lambda: len(job.recoveries()) == number, "no recovery")  # noqa: B023
        for node_rank, agent in agents.items():
            finished = agent.wait(END_S)
            if finished.returncode != 0:
                raise SystemExit(f"node {node_rank} failed:\n{finished.output[-4000:]}")
        commits, _, digests = read_facts(job.facts_dir)
        return commits, digests, kills, job.recoveries()
    finally:
        job.close()


def main() -> None:
    """Measure, print, and write."""
    options = parser(__doc__)
    options.add_argument("--losses", type=int, default=30)
    options.add_argument("--fault-timeout", type=float, default=6.0)
    options.add_argument("--imports", default="", help="modules, separated by spaces")
    given = options.parse_args()
    before, rows = conditions(), []
    steps = SPACING * (given.losses + 1)
    with tempfile.TemporaryDirectory(prefix="taskd-bench-") as name:
        base = pathlib.Path(name)
        how = (given.fault_timeout, given.imports)
        _, expected, _, _ = run(base / "clean", steps, 0, (), *how)
        for what, nodes in (("node 1", (1,)), ("the node of the store", (1, 0))):
            told = (steps, given.losses, nodes, *how)
            commits, digests, kills, records = run(base / what, *told)
            assert all(record["strategy"] == "recover" for record in records), records
            times = times_to_commit(commits, kills, is_beyond)
            rows.append(
                {"what": what, "n": len(times), **spread(times)}
                | {
                    "without_detection": spread(
                        [record["total_s"] - record["detect_s"] for record in records]
                    ),
                    "steps_redone": steps_redone(commits),
                    "digest_equal": digests == expected,
                    "times_s": [round(took, 3) for took in times],
                }
            )
            print(json.dumps(rows[-1]), flush=True)
    measured = before | {
        "load_1min_after": load_1min(),
        "fault_timeout_s": given.fault_timeout,
        "imports": given.imports,
    }
    save({"conditions": measured | {"nodes": 2}, "rows": rows}, given.json)


if __name__ == "__main__":
    main()
