"""What one recovery of a large job costs the manager's machine, without network.

    python benchmarks/manager_events.py [--ranks 1024 4096 65536] [--per-node 8] [--repeats 3]
                                        [--json FILE]

Pure computation in one process; seconds of processor time. The events are those of a job that
starts, trains, loses a rank, recovers and ends. Where the ranks of a node report the same at the
same time, that is one event, as agents of large jobs tell it; the report of each rank counts. Of
what ranks wait for, `lost` is the decision on a dead rank, up to the order to stop, and `planned`
what follows from the last stop, up to the order to go on.
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
from taskd.core.marks import Mark
from taskd.core.phase import JobPhase
from taskd.core.timeouts import Timeouts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

VICTIM = 5


def phases_of(ranks: int, per_node: int) -> Iterator[tuple[str, list[ev.Event]]]:
    """The events, in their order, by name."""
    nodes = [range(first, first + per_node) for first in range(0, ranks, per_node)]
    everybody = [rank for node in nodes for rank in node]
    killed = Fault(FaultKind.KILLED, VICTIM, 0, "SIGKILL", version=5, signature="SIGKILL")

    def life(rank: int) -> int:
        return int(rank == VICTIM)

    def of_each(report: Callable[[int], ev.WorkerEvent]) -> list[ev.Event]:
        """What all ranks of a node report; the one with the victim tells of each by itself."""
        first, *others = nodes
        shared = (
            ev.SharedReport(1.0, "s", tuple((rank, 0) for rank in node), report(node[0]))
            for node in others
        )
        return [*shared, *map(report, first)]

    def paused(rank: int) -> ev.WorkerEvent:
        return ev.WorkerPaused(2.0, "p", rank, life(rank), 1, None if life(rank) else 5, True)

    yield (
        "register",
        [
            ev.AgentRegistered(
                0.0, "r", number, f"agent {number}", len(nodes), ranks, 100, 0, 0,
                tuple(ev.WorkerReport(rank, 0, "running") for rank in node),
            )
            for number, node in enumerate(nodes)
        ],
    )  # fmt: skip
    yield "started", [ev.WorkerStarted(0.0, "s", rank, 0, 1) for rank in everybody]
    yield "declared", [ev.WorkerDeclared(0.0, "d", rank, 0, True) for rank in everybody]
    yield "holds", [ev.WorkerHolds(0.0, "h", rank, 0, "") for rank in everybody]
    yield (
        "heartbeats",
        [
            ev.AgentHeard(
                0.5, "b", number,
                tuple(Mark(rank, 0, 0, 5, "forward", 0.05, 0.01, 0.02) for rank in node),
            )
            for number, node in enumerate(nodes)
        ],
    )  # fmt: skip
    yield "lost", [ev.WorkerLost(1.0, "l", VICTIM, 0, killed, 0.01, (5,))]
    *stops, last = of_each(paused)
    yield "stopped", stops
    yield "planned", [last]
    yield (
        "recovered",
        of_each(lambda rank: ev.WorkerRecovered(3.0, "c", rank, life(rank), 1, 6, 0.1, 0.1, 0.1)),
    )
    yield "returned", [ev.WorkerReturned(4.0, "t", rank, life(rank), 1, 10) for rank in everybody]


def reports_in(event: ev.Event) -> int:
    """How many ranks say something with it."""
    if isinstance(event, ev.SharedReport):
        return len(event.lives)
    if isinstance(event, ev.AgentRegistered):
        return len(event.workers)
    return len(event.marks) if isinstance(event, ev.AgentHeard) else 1


def measure(ranks: int, per_node: int) -> dict[str, float]:
    """Seconds by kind of report, and all reports per second."""
    machine, found, count = RecoveryMachine("large", Timeouts.derive(30.0)), {}, 0
    for name, events in phases_of(ranks, per_node):
        began = time.process_time()
        for event in events:
            machine.handle(event)
        found[name] = round(time.process_time() - began, 4)
        count += sum(map(reports_in, events))
    assert machine.phase is JobPhase.RELEASED, machine.phase
    found["reports_per_s"] = round(count / sum(found.values()))
    return found


def main() -> None:
    """Measure, print, write."""
    parser = measuring.parser(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1024, 4096, 65536])
    parser.add_argument("--per-node", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    rows = {}
    for ranks in options.ranks:
        rows[ranks] = [measure(ranks, options.per_node) for _ in range(options.repeats)]
        for row in rows[ranks]:
            shown = ", ".join(f"{name} {value}" for name, value in row.items())
            print(f"{ranks:6d} ranks: {shown}", flush=True)
    measuring.save({**measuring.conditions(), "ranks": rows}, options.json)


if __name__ == "__main__":
    main()
