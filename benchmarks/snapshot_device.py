"""What a snapshot of a state on a GPU costs.

Its rate against plain copies to the host, and the time of a training step with and without.

    python benchmarks/snapshot_device.py [--mb 2000] [--rounds 10] [--steps 60] [--json FILE]

Copy: rounds that alternate between a snapshot (two pinned buffers of 16 MiB in turn, then the
arena), `tensor.cpu()` for each tensor (pageable memory), and one copy into pinned memory that is
there already (the most that the link gives). Step: the same training with a snapshot at each step
and without, in blocks that alternate, in one process; the ratio of the medians.
"""

from __future__ import annotations

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

DEVICE = "cuda"
TENSORS, BLOCK = 80, 5


def copying(mb: int, rounds: int) -> dict[str, float]:
    """GB/s, medians."""
    count = mb * 10**6 // TENSORS // 4
    tensors = {str(i): torch.randn(count, device=DEVICE) for i in range(TENSORS)}
    total = sum(tensor.nbytes for tensor in tensors.values())
    pinned = torch.empty(count, pin_memory=True)
    snapshotter = Snapshotter(Arena.create, every=1)
    snapshotter.prepare(total)
    torch.cuda.synchronize()
    seconds: dict[str, list[float]] = {"snapshot": [], "commit": [], "pageable": [], "pinned": []}
    for version in range(rounds):
        began = time.perf_counter()
        assert snapshotter.commit(version, 0, tensors)
        seconds["commit"].append(time.perf_counter() - began)
        snapshotter.wait()
        seconds["snapshot"].append(time.perf_counter() - began)
        assert not snapshotter.problem, snapshotter.problem
        began = time.perf_counter()
        for tensor in tensors.values():
            tensor.cpu()
        seconds["pageable"].append(time.perf_counter() - began)
        began = time.perf_counter()
        for tensor in tensors.values():
            pinned.copy_(tensor, non_blocking=True)
        torch.cuda.synchronize()
        seconds["pinned"].append(time.perf_counter() - began)
    snapshotter.close()
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    return {
        "bytes": total,
        "commit_ms": round(medians["commit"] * 1e3, 3),
        **{
            f"{name}_gb_s": round(total / medians[name] / 1e9, 2)
            for name in ("snapshot", "pageable", "pinned")
        },
    }


def training(mb: int, steps: int) -> dict[str, float]:
    """Median time of a step, with and without."""
    width, layers = 4096, max(1, mb * 10**6 // (4096 * 4096 * 4 * 3))
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(layers))).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    batch = torch.randn(16384, width, device=DEVICE)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(DEVICE, torch.bfloat16):
            loss = model(batch).float().square().mean()
        loss.backward()
        snapshotter.wait()
        optimizer.step()

    snapshotter = Snapshotter(Arena.create, every=1)
    step()
    memory = [value for state in optimizer.state.values() for value in state.values()]
    state = {str(i): t.detach() for i, t in enumerate([*model.parameters(), *memory])}
    snapshotter.prepare(sum(tensor.nbytes for tensor in state.values()))
    times: dict[bool, list[float]] = {True: [], False: []}
    for number in range(steps):
        is_on = number // BLOCK % 2 == 0
        torch.cuda.synchronize()
        began = time.perf_counter()
        step()
        if is_on:
            snapshotter.commit(number, 0, state)
        torch.cuda.synchronize()
        if number % BLOCK:
            times[is_on].append(time.perf_counter() - began)
    snapshotter.wait()
    assert not snapshotter.problem, snapshotter.problem
    snapshotter.close()
    with_s, without_s = statistics.median(times[True]), statistics.median(times[False])
    return {
        "state_bytes": sum(tensor.nbytes for tensor in state.values()),
        "step_ms": round(without_s * 1e3, 2),
        "step_with_snapshot_ms": round(with_s * 1e3, 2),
        "copy_s": round(snapshotter.copy_s, 3),
    }


def main() -> int:
    """Measure and print."""
    parser = measuring.parser(__doc__)
    parser.add_argument("--mb", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    result = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "copying": copying(options.mb, options.rounds),
        "training": training(options.mb, options.steps),
    }
    measuring.show(result, options.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
