"""What the step boundary costs.

`commit()` and the captures around it, in one process, with a real black box.

    python benchmarks/commit_cost.py [--commits 20000] [--steps 600]

Prints one table and one line of JSON. The rows of the first kind are the median over batches of 200
calls, one after the other. Those "in a step" are the median over the steps of a real training (the
model of benchmarks/workload.py), which has emptied the caches before.
"""

from __future__ import annotations

import argparse
import functools
import json
import random
import statistics
import time
from typing import TYPE_CHECKING, Any

import torch

from taskd.native.black_box import BlackBox
from taskd.worker import life as life_module
from taskd.worker.life import Interrupts, Life
from taskd.worker.state import step
from taskd.worker.train_state import TrainState

if TYPE_CHECKING:
    from collections.abc import Callable

BATCH = 200


def median_us(
    call: Callable[[], Any], calls: int, before: Callable[[], Any] | None = None
) -> float:
    """Median over batches of the time of one call.

    `before` runs ahead of each and its own time is taken off.
    """
    times = []
    for _ in range(max(1, calls // BATCH)):
        start = time.perf_counter()
        for _ in range(BATCH):
            if before is not None:
                before()
            call()
        times.append((time.perf_counter() - start) / BATCH * 1e6)
    own = 0.0 if before is None else median_us(before, calls)
    return round(statistics.median(times) - own, 2)


def make_state(
    layers: int, *, norm: bool = False
) -> tuple[TrainState, torch.nn.Module, torch.optim.Optimizer]:
    """A restored TrainState over a network of `layers` layers, with AdamW and a scheduler."""
    life = Life(0, 1, 0, box=BlackBox.create(), interrupts=Interrupts(in_recoverable=True))
    life_module.set_current(life)
    parts = [
        part
        for _ in range(layers)
        for part in (torch.nn.Linear(64, 64), *([torch.nn.BatchNorm1d(64)] if norm else []))
    ]
    model = torch.nn.Sequential(*parts)
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)
    state = TrainState(model=model, optimizer=optimizer, scheduler=scheduler, epoch=0)
    state.restore()
    return state, model, optimizer


def in_steps(steps: int, *, draws: bool) -> dict[str, float]:
    """Median time of commit() and of each hook between the parts of a real step.

    `draws`: which uses torch's generator (dropout).
    """
    life = Life(0, 1, 0, box=BlackBox.create(), interrupts=Interrupts(in_recoverable=True))
    life_module.set_current(life)
    model = torch.nn.Sequential(
        *(part for _ in range(5) for part in (torch.nn.Linear(512, 512), torch.nn.GELU()))
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    state = TrainState(model=model, optimizer=optimizer)
    state.restore()
    holding = state._holding  # noqa: SLF001
    holding.detach()
    where = "in a step that draws" if draws else "in a step"
    calls = {
        f"forward hook, {where}": functools.partial(step.capture_pending, life, holding),
        f"optimizer hook, {where}": functools.partial(step.begin_update, life, holding),
        f"commit, {where}": state.commit,
    }
    forward, update, commit = calls
    times: dict[str, list[float]] = {name: [] for name in calls}

    def timed(name: str) -> None:
        start = time.perf_counter()
        calls[name]()
        times[name].append((time.perf_counter() - start) * 1e6)

    generator = None if draws else torch.Generator()
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(torch.randn(8, 512, generator=generator)).square().mean()
        timed(forward)
        loss.backward()
        timed(update)
        optimizer.step()
        timed(commit)
    return {name: round(statistics.median(values), 2) for name, values in times.items()}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--commits", type=int, default=20_000)
    parser.add_argument("--steps", type=int, default=600)
    options = parser.parse_args()
    calls = options.commits
    torch.set_num_threads(1)
    import numpy as np  # noqa: PLC0415

    rows = {}
    state, _, _ = make_state(4)
    rows["commit, 8 parameters"] = median_us(state.commit, calls)
    state, _, _ = make_state(400)
    rows["commit, 800 parameters"] = median_us(state.commit, calls)
    state, _, _ = make_state(4)
    rows["commit, python RNG used in the step"] = median_us(state.commit, calls, random.random)
    rows["commit, numpy RNG used in the step"] = median_us(state.commit, calls // 4, np.random.rand)
    state, _, _ = make_state(50, norm=True)
    rows["commit, 50 batch norms"] = median_us(state.commit, calls // 10)
    state, _, _ = make_state(4)
    life, holding = life_module.current(), state._holding  # noqa: SLF001
    rows["forward hook"] = median_us(lambda: step.capture_pending(life, holding), calls)
    rows["optimizer hook"] = median_us(lambda: step.begin_update(life, holding), calls)

    rows.update(in_steps(options.steps, draws=False))
    rows.update(in_steps(options.steps, draws=True))
    print(f"{'what':<40}{'µs':>8}")
    for name, value in rows.items():
        print(f"{name:<40}{value:>8.2f}")
    print(json.dumps({"benchmark": "commit_cost", "torch": torch.__version__, "us": rows}))


if __name__ == "__main__":
    main()
