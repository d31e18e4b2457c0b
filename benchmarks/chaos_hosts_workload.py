"""The training that benchmarks/chaos_hosts.py runs: small steps, until it is told that it may end.

STEPS    so many at the most
STEP_S   how long each rank rests in a step
END      a file: once it is there, the training ends with the next step that is noted
FACTS    directory of what it notes, see testbed.script

Every 50 steps each rank notes a digest of all that it goes on from. Whether the end has come is
asked there, too, of all ranks together: all of them return after the same step.
"""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist

import taskd
from testbed.script import RANK, fact
from testbed.sharded import Net, digest, noisy_batch, shard

STEPS, STEP_S = int(os.environ["STEPS"]), float(os.environ["STEP_S"])
EVERY = 50
HIDDEN, LAYERS = 16, 4


def nothing(place: str, step: int) -> None:
    """Faults come from outside here."""


def is_to_end() -> bool:
    """What any rank has seen counts for all."""
    seen = torch.tensor(float(os.path.exists(os.environ["END"])))
    dist.all_reduce(seen, dist.ReduceOp.MAX)
    return bool(seen)


@taskd.recoverable
def train() -> str:
    dist.init_process_group("gloo")
    torch.manual_seed(1234)
    net = Net(HIDDEN, LAYERS, nothing)
    model = shard(net, "ddp")
    torch.manual_seed(99 + RANK)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    state = taskd.TrainState(model=model, optimizer=optimizer)
    state.restore()
    while state.step < STEPS:
        if state.step and state.step % EVERY == 0:
            fact("digest", step=state.step, digest=digest(model, optimizer, state.step))
            if is_to_end():
                break
        optimizer.zero_grad()
        model(noisy_batch(HIDDEN, state.step)).square().mean().backward()
        time.sleep(STEP_S)
        optimizer.step()
        state.commit()
    return digest(model, optimizer, state.step)


fact("entered")
fact("returned", digest=train())
