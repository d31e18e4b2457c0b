"""What a snapshot costs.

Rate of the copy against memcpy, what commit() blocks, memory, and the time of a training step with
and without.

    python benchmarks/snapshot.py [--mb 200] [--rounds 40] [--tensors 160] [--blocks 60]
                                  [--batch 64] [--json FILE]

Copy: rounds that alternate between memcpy of all tensors into an arena's buffer (C, one call per
tensor, nothing else) and a snapshot of the same tensors into the same kind of memory; each touches
more than the caches hold, so both are cold. `copy` is the time in the copying thread, `whole` that
from the beginning of commit() to the end of wait(). Step time: blocks of steps with a snapshot at
each step alternate with blocks without, in one process; the figure is the ratio of the medians of
neighbouring blocks, of the time on the wall and of the CPU time of the training thread. The copying
thread wants a core: where all are busy with others, it takes its time from the training. The load
is stated.
"""

from __future__ import annotations

import ctypes
import os
import pathlib
import statistics
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
import torch

from benchmarks import measuring
from taskd.native.arena import Arena
from taskd.worker.saving.copier import Snapshotter

STEPS = 6  # of a block
PRECISION = 4


def p99(values: list[float]) -> float:
    return statistics.quantiles(values, n=100)[98] if len(values) > 1 else values[0]


def spread(values: list[float]) -> dict[str, float]:
    return {
        "median": round(statistics.median(values), PRECISION),
        "p99": round(p99(values), PRECISION),
    }


def state_of(mb: int, count: int) -> dict[str, torch.Tensor]:
    """Tensors of a model of `mb` megabytes: half of them small, as biases and norms are."""
    small = {f"layer.{i}.bias": torch.randn(1024) for i in range(count // 2)}
    left = mb * 10**6 - sum(tensor.nbytes for tensor in small.values())
    number = count - count // 2
    return small | {f"layer.{i}.weight": torch.randn(left // number // 4) for i in range(number)}


def copying(mb: int, rounds: int, count: int) -> dict:
    tensors = state_of(mb, count)
    total = sum(tensor.nbytes for tensor in tensors.values())
    plain = Arena.create(total).memory
    assert plain is not None
    snapshotter = Snapshotter(Arena.create, every=1)
    snapshotter.prepare(total)
    memcpy_s, copy_s, whole_s, blocked_s = [], [], [], []
    for version in range(rounds):
        target = plain.address + plain.buffer_start(version % 2)
        start = time.perf_counter()
        for tensor in tensors.values():
            ctypes.memmove(target, tensor.data_ptr(), tensor.nbytes)
            target += tensor.nbytes
        memcpy_s.append(time.perf_counter() - start)
        start = time.perf_counter()
        assert snapshotter.commit(version, 0, tensors)
        blocked_s.append(time.perf_counter() - start)
        snapshotter.wait()
        whole_s.append(time.perf_counter() - start)
        copy_s.append(snapshotter.copy_s)
        assert not snapshotter.problem, snapshotter.problem
    arena = snapshotter.arena
    memory = os.fstat(arena.fd).st_blocks * 512
    snapshotter.close()
    skip = 2  # the first rounds meet pages that this process has not mapped
    memcpy_s, copy_s, whole_s, blocked_s = (
        memcpy_s[skip:],
        copy_s[skip:],
        whole_s[skip:],
        blocked_s[skip:],
    )
    ratios = [plain_s / ours_s for plain_s, ours_s in zip(memcpy_s, copy_s, strict=True)]
    result = {
        "state_mb": round(total / 1e6, 1),
        "tensors": count,
        "rounds": rounds,
        "memcpy_gb_per_s": spread([total / 1e9 / value for value in memcpy_s])["median"],
        "copy_gb_per_s": spread([total / 1e9 / value for value in copy_s])["median"],
        "copy_rate_of_memcpy_percent": {
            "median": round(100 * statistics.median(ratios), 1),
            "p1": round(100 * sorted(ratios)[len(ratios) // 100], 1),
        },
        "memcpy_ms": spread([1e3 * value for value in memcpy_s]),
        "copy_ms": spread([1e3 * value for value in copy_s]),
        "whole_ms": spread([1e3 * value for value in whole_s]),
        "blocked_ms": spread([1e3 * value for value in blocked_s]),
        "blocked_percent_of_copy": round(
            100 * statistics.median(blocked_s) / statistics.median(copy_s), 2
        ),
        "memory_percent_of_two_shards": round(100 * memory / (2 * total), 2),
    }
    plain.close()
    arena.close()
    return result


def overhead(on: list[list[float]], off: list[list[float]]) -> dict:
    ratios = [statistics.median(a) / statistics.median(b) for a, b in zip(on, off, strict=True)]
    return {
        "median": round(100 * (statistics.median(ratios) - 1), 2),
        "quartiles": [round(100 * (value - 1), 2) for value in statistics.quantiles(ratios, n=4)],
        "pairs": len(ratios),
    }


def training(mb: int, blocks: int, batch: int) -> dict:
    """AdamW keeps three copies of the parameters: those of `mb` / 3 MB."""
    width = 1024
    layers = max(1, round(mb * 1e6 / 3 / 4 / width**2))
    model = torch.nn.Sequential(
        *(part for _ in range(layers) for part in (torch.nn.Linear(width, width), torch.nn.GELU()))
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    snapshotter = Snapshotter(Arena.create, every=1)
    optimizer.register_step_pre_hook(lambda *_: snapshotter.wait())
    snapshotter.prepare(mb * 10**6 + layers * width * 12)  # biases come on top
    walls: dict[bool, list[list[float]]] = {True: [], False: []}
    threads: dict[bool, list[list[float]]] = {True: [], False: []}
    copies, version, is_on = [], 0, False
    for _ in range(blocks + 2):  # the first two warm up
        is_on = not is_on
        wall, thread = [], []
        for _ in range(STEPS):
            start = time.perf_counter(), time.thread_time()
            optimizer.zero_grad()
            model(torch.randn(batch, width)).square().mean().backward()
            optimizer.step()
            version += 1
            if is_on:
                tensors = dict(model.named_parameters())
                for i, values in enumerate(optimizer.state.values()):
                    tensors |= {f"optimizer.{i}.{key}": value for key, value in values.items()}
                assert snapshotter.commit(version, 0, tensors)
            wall.append(time.perf_counter() - start[0])
            thread.append(time.thread_time() - start[1])
        snapshotter.wait()
        assert not snapshotter.problem, snapshotter.problem
        if is_on:
            copies.append(snapshotter.copy_s)
        walls[is_on].append(wall[1:])  # the first of a block follows one of the other kind
        threads[is_on].append(thread[1:])
        if version == 2 * STEPS:
            snapshotter.waited_s = 0.0
    size = snapshotter.newest.data_bytes
    snapshotter.close()
    snapshotter.arena.close()
    steps = {
        name: spread([1e3 * value for took in walls[which][1:] for value in took])
        for name, which in (("on", True), ("off", False))
    }
    return {
        "state_mb": round(size / 1e6, 1),
        "step_ms": steps,
        "copy_ms": spread([1e3 * value for value in copies[1:]]),
        "waited_ms_per_step": round(1e3 * snapshotter.waited_s / (len(copies[1:]) * STEPS), 3),
        "overhead_percent": overhead(walls[True][1:], walls[False][1:]),
        "overhead_of_the_thread_percent": overhead(threads[True][1:], threads[False][1:]),
    }


def main() -> None:
    parser = measuring.parser(__doc__)
    parser.add_argument("--mb", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--tensors", type=int, default=160)
    parser.add_argument("--blocks", type=int, default=60)
    parser.add_argument("--batch", type=int, default=64)
    options = parser.parse_args()
    torch.set_num_threads(1)
    load = [os.getloadavg()[0]]
    result = {
        "benchmark": "snapshot",
        "torch": torch.__version__,
        "cores": os.cpu_count(),
        "copy": copying(options.mb, options.rounds, options.tensors),
        "training": training(options.mb, options.blocks, options.batch),
    }
    result["load_before_and_after"] = [*load, os.getloadavg()[0]]
    measuring.show(result, options.json)


if __name__ == "__main__":
    main()
