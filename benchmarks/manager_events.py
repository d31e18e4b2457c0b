"""What one recovery of a large job costs the manager's machine, without network.

Seconds for each kind of report of all ranks.

    python benchmarks/manager_events.py [--ranks 1024 4096 65536] [--per-node 64] [--json FILE]

Pure computation in one process. The events are those of a job that starts, loses a rank, recovers
and ends.
"""

from __future__ import annotations

import pathlib
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from typing import TYPE_CHECKING

from benchmarks import measuring
from taskd.core import events as ev
from taskd.core.faults import Fault, FaultKind
from taskd.core.job.machine import RecoveryMachine
from taskd.core.phase import JobPhase
from taskd.core.timeouts import Timeouts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

VICTIM = 5


def phases_of(ranks: int, per_node: int) -> Iterator[tuple[str, Callable[[], Iterator[ev.Event]]]]:
    """The events, in their order, by name."""
    nodes = ranks // per_node
    killed = Fault(FaultKind.KILLED, VICTIM, 0, "SIGKILL", version=5, signature="SIGKILL")

    def registrations() -> Iterator[ev.Event]:
        for node in range(nodes):
            reports = tuple(
                ev.WorkerReport(rank, 0, "running")
                for rank in range(node * per_node, (node + 1) * per_node)
            )
            yield ev.AgentRegistered(
                0.0, "r", node, f"agent {node}", nodes, ranks, 100, 0, 0, reports
            )

    def life(rank: int) -> int:
        return int(rank == VICTIM)

    yield "register", registrations
    yield "started", lambda: (ev.WorkerStarted(0.0, "s", rank, 0, 1) for rank in range(ranks))
    yield "declared", lambda: (ev.WorkerDeclared(0.0, "d", rank, 0, True) for rank in range(ranks))
    yield "holds", lambda: (ev.WorkerHolds(0.0, "h", rank, 0, "") for rank in range(ranks))
    yield "lost", lambda: iter([ev.WorkerLost(1.0, "l", VICTIM, 0, killed, 0.01, (5,))])
    yield (
        "stopped",
        lambda: (
            ev.WorkerPaused(2.0, "p", rank, life(rank), 1, None if life(rank) else 5, True)
            for rank in range(ranks)
        ),
    )
    yield (
        "recovered",
        lambda: (
            ev.WorkerRecovered(3.0, "c", rank, life(rank), 1, 6, 0.1, 0.1, 0.1)
            for rank in range(ranks)
        ),
    )
    yield (
        "returned",
        lambda: (ev.WorkerReturned(4.0, "t", rank, life(rank), 1, 10) for rank in range(ranks)),
    )


def measure(ranks: int, per_node: int) -> dict[str, float]:
    """Seconds by kind of report."""
    machine, found = RecoveryMachine("large", Timeouts.derive(30.0)), {}
    for name, events in phases_of(ranks, per_node):
        began = time.perf_counter()
        for event in events():
            machine.handle(event)
        found[name] = round(time.perf_counter() - began, 3)
    assert machine.phase is JobPhase.RELEASED, machine.phase
    return found


def main() -> None:
    """Measure, print, write."""
    parser = measuring.parser(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1024, 4096, 65536])
    parser.add_argument("--per-node", type=int, default=64)
    options = parser.parse_args()
    rows = {ranks: measure(ranks, options.per_node) for ranks in options.ranks}
    for ranks, row in rows.items():
        print(
            f"{ranks:6d} ranks: "
            + ", ".join(f"{name} {seconds:.3f} s" for name, seconds in row.items())
        )
    measuring.save(rows, options.json)


if __name__ == "__main__":
    main()
