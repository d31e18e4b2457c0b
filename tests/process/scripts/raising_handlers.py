"""A training whose signal handlers raise: where its state is parked, and where it waits.

What taskd calls there sends the signals: a scheduler that is set back, an object that is freed.

FACTS   see testbed.script
FAULTS  "rank@step:step"
"""

import os
import signal

import torch
import torch.distributed as dist

import taskd
from testbed.script import fact, is_first, kill_self, planned_faults

FAULTS = planned_faults(os.environ.get("FAULTS", ""))
calls = []


def give_up(number, _frame):
    calls.append(number)
    raise RuntimeError(f"signal {signal.Signals(number).name} has come")


class Scheduler:
    """Is set back where its entry is parked."""

    is_used = False

    def state_dict(self):
        return {}

    def load_state_dict(self, _state):
        if self.is_used:
            os.kill(os.getpid(), signal.SIGCHLD)

    def get_last_lr(self):
        return []


class Loader:
    """Is freed while its process waits for the next entry, unless the function has returned."""

    is_over = False

    def __del__(self):
        if not self.is_over:
            os.kill(os.getpid(), signal.SIGALRM)


@taskd.recoverable
def train():
    fact("entered", calls=list(calls))
    dist.init_process_group("gloo")
    loader = Loader()
    ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 1))
    optimizer, scheduler = torch.optim.SGD(ddp.parameters(), lr=0.1), Scheduler()
    state = taskd.TrainState(model=ddp.module, optimizer=optimizer, scheduler=scheduler)
    state.restore()
    scheduler.is_used = True
    while state.step < 12:
        for fault in FAULTS:
            if fault.step == state.step and is_first(fault.name):
                kill_self()
        optimizer.zero_grad()
        ddp(torch.ones(4, 8)).square().mean().backward()
        optimizer.step()
        state.commit()
    loader.is_over = True
    fact("returns", is_own=signal.getsignal(signal.SIGCHLD) is give_up)


for taken in (signal.SIGCHLD, signal.SIGALRM):
    signal.signal(taken, give_up)
fact("started")
train()
fact("ended", is_own=signal.getsignal(signal.SIGCHLD) is give_up)
