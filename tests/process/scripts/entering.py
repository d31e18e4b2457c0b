"""A script whose ranks come to their function at different times, or not at all.

Used by tests/process/test_entering.py.

CASE   "slow"       rank 1 dies inside; rank 2 is then still setting up, for SETUP_S
       "evaluate"   nobody calls the decorated function
       "one leaves" rank 1 exits with 0 before its function, in its first life

Rank 1 does so when FACTS/told is there (`Job.tell`).
"""

import os
import sys
import time

import torch
import torch.distributed as dist

import taskd
from testbed.script import FACTS, RANK, fact, is_first, kill_self

CASE = os.environ["CASE"]


def wait_for(name):
    while not os.path.exists(f"{FACTS}/{name}"):
        time.sleep(0.01)


@taskd.recoverable
def train():
    fact("entered")
    if CASE == "slow" and RANK == 1:
        wait_for("told")
        if is_first("fault"):
            fact("fault")
            kill_self()
    dist.init_process_group("gloo")
    model = torch.nn.Linear(2, 2)
    state = taskd.TrainState(model=model)
    state.restore()
    while state.step < 5:
        dist.all_reduce(torch.ones(1))
        state.commit()
    fact("done")


fact("began")
if CASE == "slow" and RANK == 2:
    wait_for("fault")
    time.sleep(float(os.environ["SETUP_S"]))
if CASE == "one leaves" and RANK == 1:
    wait_for("told")
    if is_first("fault"):
        fact("fault")
        sys.exit(0)
if CASE != "evaluate":
    train()
