"""How long the manager takes to plan the cut: one rank of the world is dead.

    python benchmarks/cut.py [--ranks 1024 8192 65536] [--repeats 5] [--json FILE]

`replicated`: one shard. `hsdp`: two replicas of each shard. `fsdp`: one shard per rank, and two
snapshots of each in node memory, one of which everybody goes back to. Seconds, median of the
repeats; `writers`: the plan of a dump from that state. Eight ranks per node.
"""

from __future__ import annotations

import pathlib
import statistics
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from benchmarks import measuring
from taskd.core.policy.cut import Copy, Cut, plan_cut, plan_writers

NEWEST, SNAPSHOTS = 1043, (1040, 1030)
PER_NODE = 8


def replicated(ranks: int) -> list[Copy]:
    """Every rank holds everything; rank 1 is new."""
    return [
        Copy(rank, None if rank == 1 else NEWEST, replaced=rank == 1, node=rank // PER_NODE)
        for rank in range(ranks)
    ]


def hsdp(ranks: int) -> list[Copy]:
    """The second half of the world holds what the first holds; rank 1 is new."""
    return [
        Copy(
            rank,
            None if rank == 1 else NEWEST,
            replaced=rank == 1,
            shard=str(rank % (ranks // 2)),
            node=rank // PER_NODE,
        )
        for rank in range(ranks)
    ]


def fsdp(ranks: int) -> list[Copy]:
    """Every rank holds a part; rank 1 is new."""
    return [
        Copy(
            rank,
            None if rank == 1 else NEWEST,
            replaced=rank == 1,
            shard=str(rank),
            snapshots=SNAPSHOTS,
            node=rank // PER_NODE,
        )
        for rank in range(ranks)
    ]


def measure(copies: list[Copy], repeats: int) -> tuple[float, float]:
    """Median seconds of plan_cut, and of plan_writers."""
    cuts, writers = [], []
    for _ in range(repeats):
        start = time.perf_counter()
        cut = plan_cut(copies, NEWEST)
        cuts.append(time.perf_counter() - start)
        assert isinstance(cut, Cut)
        assert cut.version is not None
        kept = {copy.rank for copy in copies if copy.clean and copy.version == cut.version}
        assert {move.rank for move in cut.moves} == {copy.rank for copy in copies} - kept
        start = time.perf_counter()
        written = plan_writers(copies, cut.version)
        writers.append(time.perf_counter() - start)
        assert isinstance(written, dict)
        assert sum(len(shards) for shards in written.values()) == len(
            {copy.shard for copy in copies}
        )
    return statistics.median(cuts), statistics.median(writers)


def main() -> None:
    """Measure and print."""
    parser = measuring.parser(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1024, 8192, 65536])
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    rows = []
    print(
        f"{'ranks':>8}"
        + "".join(f"{name:>12}{'writers':>10}" for name in ("replicated", "hsdp", "fsdp"))
    )
    for ranks in options.ranks:
        row = {"ranks": ranks}
        for world in (replicated, hsdp, fsdp):
            cut_s, writers_s = measure(world(ranks), options.repeats)
            row |= {
                f"{world.__name__}_s": round(cut_s, 4),
                f"{world.__name__}_writers_s": round(writers_s, 4),
            }
        rows.append(row)
        print(
            f"{ranks:>8}"
            + "".join(
                f"{row[f'{name}_s']:>12.3f}{row[f'{name}_writers_s']:>10.3f}"
                for name in ("replicated", "hsdp", "fsdp")
            )
        )
    measuring.save(rows, options.json)


if __name__ == "__main__":
    main()
