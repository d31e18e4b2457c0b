"""A worker of `launcher.py`: commits steps of four numbers into node memory, as a TrainState does.

    worker.py FOLDER       STEPS, FAULTS, GATE in the environment

GATE: a file that is waited for in step 5.
FAULTS: "rank@step:what" and so on: "kill", "exit", "raise", "stop". Each happens once in a job.
"""

from __future__ import annotations

import os
import pathlib
import signal
import sys
import time
from typing import Any

import numpy as np

from taskd.checkpoint import flat_memory
from taskd.checkpoint.flat import Layout
from taskd.checkpoint.flat_memory import Origin
from taskd.config.msrun import door, own_rank
from taskd.mindspore.link import of_process
from taskd.mindspore.memory import Memory
from taskd.native.black_box import Phase


class Numbers:
    """What `taskd.mindspore.content.Content` is to a network."""

    layout = (Layout("numbers", "F64", (4,), 0, 32),)
    size_bytes = 32

    def __init__(self) -> None:
        self.values = np.zeros(4)

    def copy_into(self, target: Any) -> None:
        target[:] = self.values.tobytes()


def strike(folder: pathlib.Path, rank: int, step: int) -> None:
    for fault in filter(None, os.environ.get("FAULTS", "").split(",")):
        place, what = fault.split(":")
        marker = folder / f"struck-{fault}"
        if place != f"{rank}@{step}" or marker.exists():
            continue
        marker.touch()
        if what == "raise":
            raise ValueError("the script's own")
        if what == "exit":
            os._exit(7)
        os.kill(os.getpid(), signal.SIGKILL if what == "kill" else signal.SIGSTOP)


def step_of(folder: pathlib.Path, rank: int) -> int:
    path = folder / f"step-{rank}"
    return int(path.read_text()) if path.exists() else -1


def write_step(folder: pathlib.Path, rank: int, step: int) -> None:
    new = folder / f".step-{rank}"
    new.write_text(str(step))
    new.rename(folder / f"step-{rank}")


def main() -> None:
    folder = pathlib.Path(sys.argv[1])
    rank = own_rank()
    assert rank is not None
    link = of_process(door(), rank)
    assert link is not None
    numbers, steps = Numbers(), int(os.environ["STEPS"])
    memory = Memory(link.arenas, numbers)  # type: ignore[arg-type]
    step = max(link.arenas.versions(), default=0)
    if step:
        _, state = flat_memory.open_snapshot(link.arenas, step)
        numbers.values = np.frombuffer(state.data).copy()
    print(f"rank {rank} goes on after step {step} with {numbers.values[0]:g}", flush=True)
    origin = Origin(
        str(folder / "saved"), link.job_id, "one", link.world_size, link.generation, "x 1"
    )
    began, first = step, True
    write_step(folder, rank, step)
    while step < steps:
        strike(folder, rank, step)
        while step == 5 and "GATE" in os.environ and not os.path.exists(os.environ["GATE"]):
            time.sleep(0.002)
        while any(step_of(folder, other) < step for other in range(link.world_size)):
            time.sleep(0.002)  # a collective: nobody is more than a step ahead
        numbers.values += 1
        step += 1
        memory.take(step, origin, {})
        link.box.mark_version(step)
        link.box.mark_phase(Phase.STEP)
        if first and link.generation:
            link.report_first_step(began, 0.0, 0.0)
        first = False
        write_step(folder, rank, step)
        time.sleep(0.02)
    (folder / f"ended-{rank}").touch()
    print(f"rank {rank} ended at {step} with {numbers.values[0]:g}", flush=True)


if __name__ == "__main__":
    main()
