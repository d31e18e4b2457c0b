"""A training that is slow now and then, and never hangs: nobody may be taken for hanging.

FACTS         see testbed.script
STEPS, STEP_S the steps, and how long one takes (sleeping)
SLOW_SHARE    share of the steps in which one rank takes 20 times as long
FIRST_S       how much longer the first step takes on rank 1
SAVE_AT       steps before which rank 0 writes a checkpoint, separated by commas
SAVE_S        how long that takes
"""

import io
import os
import random
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import taskd
from testbed.script import RANK, fact

STEPS = int(os.environ["STEPS"])
STEP_S = float(os.environ["STEP_S"])
SLOW_SHARE = float(os.environ["SLOW_SHARE"])
FIRST_S = float(os.environ["FIRST_S"])
SAVE_AT = {int(step) for step in os.environ["SAVE_AT"].split(",") if step}
SAVE_S = float(os.environ["SAVE_S"])


class Slow:
    """Takes its time to be written, as a large model on a slow disk does."""

    def __reduce__(self):
        time.sleep(SAVE_S)
        return (Slow, ())


def work(step):
    """The part of a step that is this rank's own."""
    if step in SAVE_AT and RANK == 0:
        torch.save({"slow": Slow()}, io.BytesIO())
        fact("saved", step=step)
    if step == 0 and RANK == 1:
        time.sleep(FIRST_S)
    chance = random.Random(step)
    is_slow = chance.random() < SLOW_SHARE and chance.randrange(dist.get_world_size()) == RANK
    if is_slow:
        fact("slow", step=step)
    time.sleep(STEP_S * (20 if is_slow else 1))


@taskd.recoverable
def train():
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    model = torch.nn.Linear(16, 4)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    state = taskd.TrainState(model=model, optimizer=optimizer)
    state.restore()
    while state.step < STEPS:
        work(state.step)
        optimizer.zero_grad()
        ddp(torch.ones(8, 16)).sum().backward()
        optimizer.step()
        state.commit()
    fact("done", step=state.step)


train()
