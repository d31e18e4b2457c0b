"""How fast a dump is written, against dd on the same disk.

    python benchmarks/dump.py [--megabytes 400] [--ranks 3] [--pairs 7] [--directory DIR]

A replicated state is written and published by as many processes as are said, which share its bytes;
`dd conv=fsync` writes the same bytes from one file to another. Both alternate in one run, on the
disk of DIR; the time of a dump is from the moment at which all processes are told to begin to the
return of publish(), with everything on the disk. Figure: the ratio of the rates of each pair,
median over the pairs.
"""

from __future__ import annotations

import multiprocessing
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from typing import TYPE_CHECKING

from benchmarks import measuring

if TYPE_CHECKING:
    import argparse

TENSORS = 48  # weights and Adam's moments of a small transformer: some large, many small
SMALL = 100


def draft_of(directory: pathlib.Path, version: int, ranks: int):
    from taskd.checkpoint.draft import Draft  # noqa: PLC0415
    from taskd.checkpoint.names import Kind  # noqa: PLC0415

    return Draft(
        directory, "benchmark", Kind.DUMP, version, "benchmark", tuple(range(ranks)), 0, ranks
    )


def writer(rank: int, options: argparse.Namespace, directory: pathlib.Path, pipe) -> None:
    import torch  # noqa: PLC0415

    from taskd.checkpoint.publish import publish  # noqa: PLC0415
    from taskd.checkpoint.save import write  # noqa: PLC0415

    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(1)
    elements = options.megabytes * 1_000_000 // 4 // TENSORS
    state = {
        f"large.{number}": torch.randn(elements // 512, 512, generator=generator)
        for number in range(TENSORS)
    }
    state |= {f"small.{number}": torch.randn(512, generator=generator) for number in range(SMALL)}
    pipe.send(sum(tensor.nbytes for tensor in state.values()))
    while (order := pipe.recv()) is not None:
        kind, version = order
        draft = draft_of(directory, version, options.ranks)
        if kind == "write":
            write(draft, rank, state)
            pipe.send("written")
        else:
            pipe.send(publish(draft))


def dump(pipes: list, directory: pathlib.Path, version: int) -> float:
    began = time.perf_counter()
    for pipe in pipes:
        pipe.send(("write", version))
    for pipe in pipes:
        pipe.recv()
    pipes[0].send(("publish", version))
    path = pipes[0].recv()
    took = time.perf_counter() - began
    shutil.rmtree(directory / path)
    return took


def dd(source: pathlib.Path, directory: pathlib.Path) -> float:
    target = directory / "dd"
    began = time.perf_counter()
    subprocess.run(
        ["dd", f"if={source}", f"of={target}", "bs=1M", "conv=fsync"],
        check=True,
        capture_output=True,
    )
    took = time.perf_counter() - began
    target.unlink()
    return took


def main() -> None:
    """Measure and print."""
    parser = measuring.parser(__doc__)
    parser.add_argument("--megabytes", type=int, default=400)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--directory", type=pathlib.Path, default=pathlib.Path())
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="taskd-dump-", dir=options.directory.resolve()) as name:
        directory = pathlib.Path(name)
        context = multiprocessing.get_context("spawn")
        ends = [context.Pipe() for _ in range(options.ranks)]
        processes = [
            context.Process(target=writer, args=(rank, options, directory, end[1]))
            for rank, end in enumerate(ends)
        ]
        for process in processes:
            process.start()
        pipes = [end[0] for end in ends]
        size = {pipe.recv() for pipe in pipes}.pop()
        source = directory / "source"
        with source.open("wb") as file:
            for _ in range(size >> 20):
                file.write(bytes(range(256)) * 4096)
            file.write(bytes(size & 0xFFFFF))
        # not counted: the first allocation of blocks is slower
        dump(pipes, directory, 0), dd(source, directory)
        pairs = []
        for number in range(1, options.pairs + 1):
            times = {"dump": dump(pipes, directory, number)} if number % 2 else {}
            times["dd"] = dd(source, directory)
            if "dump" not in times:
                times["dump"] = dump(pipes, directory, number)
            pairs.append(times)
        for pipe in pipes:
            pipe.send(None)
        for process in processes:
            process.join()
    ratios = sorted(times["dd"] / times["dump"] for times in pairs)
    result = {
        "megabytes": round(size / 1e6),
        "ranks": options.ranks,
        "pairs": len(pairs),
        "dd_mb_per_s": round(statistics.median(size / times["dd"] / 1e6 for times in pairs)),
        "dump_mb_per_s": round(statistics.median(size / times["dump"] / 1e6 for times in pairs)),
        "ratio_median": round(statistics.median(ratios), 3),
        "ratio_lowest": round(ratios[0], 3),
        "ratio_highest": round(ratios[-1], 3),
    }
    measuring.show(result, options.json)


if __name__ == "__main__":
    main()
