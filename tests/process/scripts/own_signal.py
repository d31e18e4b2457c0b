"""A training that uses SIGRTMIN+9 itself: it sends it to itself in each step, and counts.

FACTS   see testbed.script
FAULTS  "rank@step:step"
"""

import os
import signal

import torch
import torch.distributed as dist

import taskd
from testbed.script import fact, is_first, kill_self, planned_faults

OWN = signal.SIGRTMIN + 9
FAULTS = planned_faults(os.environ.get("FAULTS", ""))
sent = received = 0


def count(_number, _frame):
    global received  # noqa: PLW0603
    received += 1


@taskd.recoverable
def train():
    global sent  # noqa: PLW0603
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    state = taskd.TrainState(model=ddp.module, optimizer=optimizer)
    state.restore()
    while state.step < 12:
        sent += 1
        os.kill(os.getpid(), OWN)
        for fault in FAULTS:
            if fault.step == state.step and is_first(fault.name):
                kill_self()
        optimizer.zero_grad()
        ddp(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        state.commit()


signal.signal(OWN, count)
fact("started")
train()
fact("returned", sent=sent, received=received, is_own=signal.getsignal(OWN) is count)
