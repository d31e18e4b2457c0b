"""Evaluates every 4 steps, with a collective, and keeps the best model on the disk.

FAULTS  see testbed.script; places: "evaluation" (before its collective), "forward"
CASE    "head": as docs/operations.md says it; "behind": behind commit(), where a fault that comes
        before the next commit takes the result back, and nobody evaluates again
"""

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import taskd
from testbed.script import FACTS, RANK, die_if_due, fact

EVERY, STEPS, CASE = 4, 11, os.environ["CASE"]
BEST = f"{FACTS}/best.pt"


def data(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(seed))
    return x, x.sum(1, keepdim=True)


def evaluate(state: taskd.TrainState, model: torch.nn.Module) -> None:
    with torch.no_grad():
        x, y = data(1000 + RANK)
        loss = (model(x) - y).square().mean()
    die_if_due("evaluation", state.step)
    dist.all_reduce(loss)
    if loss.item() < state.best:
        state.best = loss.item()
        if RANK == 0:
            torch.save({"loss": state.best, "step": state.step}, BEST)
    fact("evaluated", step=state.step)


@taskd.recoverable
def train() -> float:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    state = taskd.TrainState(model=model, optimizer=optimizer, best=float("inf"), evaluated=0)
    state.restore()
    while state.step < STEPS:
        is_due = state.step and state.step % EVERY == 0 and state.evaluated != state.step
        if is_due and CASE == "head":
            state.evaluated = state.step
            evaluate(state, model)
        x, y = data(100 * state.step + RANK)
        optimizer.zero_grad()
        loss = (ddp(x) - y).square().mean()
        die_if_due("forward", state.step)
        loss.backward()
        optimizer.step()
        state.commit()
        if CASE == "behind" and state.step % EVERY == 0:
            evaluate(state, model)
    fact("returned", best=state.best, weights=model.weight.tolist())
    return state.best


train()
