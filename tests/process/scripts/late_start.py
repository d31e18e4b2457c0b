"""Three ranks that start anew together; one of the former processes is slow to end meanwhile.

FACTS   directory for <rank>-<pid>.jsonl and for markers

The first life of rank 0 fails before it says that it uses taskd, so that all start anew. That of
rank 2 does not end by SIGTERM. The second life of rank 1 dies at the beginning of its function.
"""

import os
import signal
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import taskd
from testbed.script import FACTS, RANK, fact, is_first, kill_self


def fail_together():
    """All of them are there, and none has a decorated function."""
    if RANK == 2:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    fact("first")
    is_first(f"ready-{RANK}")
    while RANK == 0 and not all(os.path.exists(f"{FACTS}/ready-{rank}") for rank in range(3)):
        time.sleep(0.01)
    if RANK == 0:
        os._exit(3)
    time.sleep(600)


if is_first(f"life-1-{RANK}"):
    fail_together()
fact("again")


@taskd.recoverable
def train():
    if RANK == 1 and is_first("died"):
        fact("fault")
        kill_self()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = taskd.TrainState(model=model, optimizer=optimizer)
    state.restore()
    while state.step < 5:
        optimizer.zero_grad()
        parallel(torch.randn(2, 4)).square().mean().backward()
        optimizer.step()
        state.commit()
    return model


fact("done", weights=train().weight.tolist())
