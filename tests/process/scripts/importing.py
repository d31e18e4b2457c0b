"""A small DDP training that imports modules from elsewhere (IMPORTS) and notes who imported them.

Each of these modules has WHO: the name of the process that its code has run in. From step 5 on it
waits for the file `go` beside its facts. RECOVERABLE=1: with taskd's decorator.

What a fork writes to is copied, page by page, in a page fault each: it notes how many there were
until its own imports were done, and how many a look at the names of all modules costs.
"""

import hashlib
import importlib
import os
import random
import resource
import sys

import beside_importing
import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import taskd
from taskd.imported import namespace
from taskd.worker.process import runtime
from testbed.script import FACTS, RANK, fact

FAULTS_BEFORE = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
IS_RECOVERABLE = os.environ.get("RECOVERABLE") == "1"
# Seeded before they are imported: what an import draws changes what is drawn here.
random.seed(RANK)
np.random.seed(RANK)  # noqa: NPY002
torch.manual_seed(RANK)
modules = [importlib.import_module(name) for name in os.environ["IMPORTS"].split(",")]
drawn = [random.random(), float(np.random.rand()), torch.rand(1).item()]  # noqa: NPY002
current = runtime.current()


def faults_of_a_look() -> int:
    """Page faults of a look at all names of all modules."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for module in list(sys.modules.values()):
        list(namespace(module).values())
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


fact(
    "imported",
    who={module.__name__: module.WHO for module in [*modules, beside_importing]},
    asked=current is not None and current._imports is not None,
    faults_before=FAULTS_BEFORE,
    faults_of_a_look=faults_of_a_look(),
)


def train():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters())
    torch.manual_seed(RANK)
    state = None
    done = 0
    if IS_RECOVERABLE:
        state = taskd.TrainState(model=model, optimizer=optimizer)
        state.restore()
        done = state.step
    for step in range(done, 10):
        while step == 5:  # all ranks agree when it is over
            go = torch.tensor(float(os.path.exists(f"{FACTS}/go")))
            dist.broadcast(go, 0)
            if go:
                break
        ddp(torch.rand(2, 4) + random.random()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if state is not None:
            state.commit()
    digest = hashlib.sha256(repr(drawn).encode())
    for tensor in model.state_dict().values():
        digest.update(tensor.numpy().tobytes())
    fact("returned", digest=digest.hexdigest())


if __name__ == "__main__":
    (taskd.recoverable(train) if IS_RECOVERABLE else train)()
    sys.exit(0)
