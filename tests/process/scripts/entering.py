"""A script whose ranks come to their function at different times, or not at all.

Used by tests/process/test_entering.py.

CASE   "slow"       rank 1 dies inside; rank 2 is then still setting up, for SETUP_S
       "evaluate"   nobody calls the decorated function
       "one leaves" rank 1 exits with 0 before its function, in its first life
"""

import json
import os
import pathlib
import signal
import sys
import time

import torch
import torch.distributed as dist

import taskd

RANK = int(os.environ["RANK"])
FACTS = pathlib.Path(os.environ["FACTS"])
CASE = os.environ["CASE"]


def fact(what):
    with (FACTS / f"{RANK}.jsonl").open("a") as out:
        out.write(json.dumps({"what": what, "pid": os.getpid(), "time": time.monotonic()}) + "\n")


def first_time(name):
    try:
        os.close(os.open(FACTS / name, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


@taskd.recoverable
def train():
    fact("entered")
    if CASE == "slow" and RANK == 1 and first_time("fault"):
        fact("fault")
        os.kill(os.getpid(), signal.SIGKILL)
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
    while not (FACTS / "fault").exists():
        time.sleep(0.01)
    time.sleep(float(os.environ["SETUP_S"]))
if CASE == "one leaves" and RANK == 1 and first_time("fault"):
    fact("fault")
    sys.exit(0)
if CASE != "evaluate":
    train()
