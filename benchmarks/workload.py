"""The training that benchmarks/recovery.py runs, under taskd and under plain torchrun alike.

A DDP multi-layer perceptron (5 x 512 x 512, Adam: about 14 MB of state) on gloo. It writes one line
per commit into FACTS/<rank>.txt ("commit <step> <monotonic ns>") and hurts itself where KILLS says,
once per job: "rank@step:place" separated by ";", place one of forward, backward, optimizer,
before-commit, step; with ":raise" behind it by an exception, not by SIGKILL.

IMPORTS names modules that it imports first, separated by spaces. DEVICE is where it trains; "cpu".

MODE=taskd        taskd.recoverable and TrainState
MODE=checkpoint   neither: rank 0 saves a checkpoint every 50 steps, loaded at start (what a plain
                  torchrun job does)
MODE=alternating  blocks of steps with and without taskd's part in them, for benchmarks/overhead.py
MODE=marks        blocks of steps with and without marks and the runtime's pulse, for
                  benchmarks/marks.py
"""

import hashlib
import importlib
import os
import pathlib
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from testbed.script import RANK, is_first, kill_self, planned_faults, uninterrupted

for name in os.environ.get("IMPORTS", "").split():
    importlib.import_module(name)
MODE = os.environ["MODE"]
STEPS = int(os.environ["STEPS"])
FACTS = pathlib.Path(os.environ["FACTS"])
CHECKPOINT = FACTS / "checkpoint.pt"
CHECKPOINT_EVERY = int(os.environ.get("CHECKPOINT_EVERY", "50"))
MINE = {(fault.step, fault.place): fault for fault in planned_faults(os.environ.get("KILLS", ""))}
DEVICE = torch.device(os.environ.get("DEVICE", "cpu"))
BLOCK = 25  # steps; benchmarks/overhead.py pairs neighbouring blocks
out = (FACTS / f"{RANK}.txt").open("a", buffering=1)


def here(place, step):
    fault = MINE.get((step, place))
    if fault is None:
        return
    with uninterrupted():
        if not is_first(fault.name):
            return
        out.write(f"kill {step} {time.monotonic_ns()}\n")
        if fault.how != "raise":
            kill_self()
    raise RuntimeError(f"planned, in step {step}")


def build():
    torch.manual_seed(0)
    layers = [module for _ in range(5) for module in (torch.nn.Linear(512, 512), torch.nn.GELU())]
    model = torch.nn.Sequential(*layers).to(DEVICE)
    return model, torch.optim.Adam(model.parameters(), lr=1e-4)


def one_step(ddp, optimizer, step, position):
    position[0] = step
    here("step", step)
    generator = torch.Generator().manual_seed(1000 * step + RANK)
    optimizer.zero_grad()
    loss = ddp(torch.randn(8, 512, generator=generator).to(DEVICE)).square().mean()
    here("forward", step)
    loss.backward()
    optimizer.step()
    here("before-commit", step)


def prepare():
    dist.init_process_group("gloo")
    model, optimizer = build()
    position = [0]
    model[0].weight.register_hook(lambda _: here("backward", position[0]))
    optimizer.register_step_pre_hook(lambda *_: here("optimizer", position[0]))
    return model, optimizer, position


def finish(model):
    data = b"".join(parameter.detach().cpu().numpy().tobytes() for parameter in model.parameters())
    out.write(f"digest {hashlib.sha256(data).hexdigest()[:16]} {time.monotonic_ns()}\n")


def note(step):
    out.write(f"commit {step} {time.monotonic_ns()}\n")


def prepare_state():
    import taskd  # noqa: PLC0415

    model, optimizer, position = prepare()
    ddp = DistributedDataParallel(model)
    state = taskd.TrainState(model=model, optimizer=optimizer)
    state.restore()
    return model, optimizer, position, ddp, state


def with_taskd():
    import taskd  # noqa: PLC0415

    @taskd.recoverable
    def train():
        model, optimizer, position, ddp, state = prepare_state()
        while state.step < STEPS:
            one_step(ddp, optimizer, state.step, position)
            state.commit()
            note(state.step)
        return model

    finish(train())


def with_checkpoints():
    model, optimizer, position = prepare()
    step = 0
    if CHECKPOINT.exists():
        loaded = torch.load(CHECKPOINT)
        model.load_state_dict(loaded["model"])
        optimizer.load_state_dict(loaded["optimizer"])
        step = loaded["step"]
    ddp = DistributedDataParallel(model)
    while step < STEPS:
        one_step(ddp, optimizer, step, position)
        step += 1
        note(step)
        if RANK == 0 and step % CHECKPOINT_EVERY == 0:
            temporary = CHECKPOINT.with_suffix(".tmp")
            torch.save(
                {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step},
                temporary,
            )
            temporary.rename(CHECKPOINT)
    finish(model)
    dist.destroy_process_group()


def alternating():
    """Blocks of steps with taskd's hooks and commit, and without, in turn, in one process."""
    import taskd  # noqa: PLC0415
    from taskd.worker.state.hooks import attach  # noqa: PLC0415

    @taskd.recoverable
    def train():
        _, optimizer, position, ddp, state = prepare_state()
        holding = state._holding  # noqa: SLF001
        for step in range(STEPS):
            is_on = step // BLOCK % 2 == 0
            if step and step % BLOCK == 0:
                attach(holding) if is_on else holding.detach()
            one_step(ddp, optimizer, step, position)
            if is_on:
                state.commit()
            out.write(f"block {step // BLOCK} {time.monotonic_ns()}\n")

    train()


def with_and_without_marks():
    from benchmarks import marks_blocks  # noqa: PLC0415

    marks_blocks.run(prepare_state, one_step, out, STEPS, BLOCK)


{
    "taskd": with_taskd,
    "checkpoint": with_checkpoints,
    "alternating": alternating,
    "marks": with_and_without_marks,
}[MODE]()
