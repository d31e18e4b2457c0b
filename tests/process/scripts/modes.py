"""A training whose rank 0 is called out of two context managers of torch before their ends.

Rank 1 ends itself in step 3 if FAULT is "1", when rank 0 has come to where it waits to be called.
"""

import os
import time

import torch
import torch.distributed as dist

import taskd
from testbed.script import FACTS, RANK, fact, is_first, kill_self

left = []


@taskd.recoverable
def train() -> str:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    layer = torch.nn.Linear(8, 8)
    model = torch.nn.parallel.DistributedDataParallel(layer)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    state = taskd.TrainState(model=model, optimizer=optimizer)
    state.restore()
    while state.step < 6:
        if state.step == 3 and os.environ["FAULT"] == "1" and is_first(f"fault-{RANK}"):
            if RANK == 1:
                while not os.path.exists(f"{FACTS}/left"):
                    time.sleep(0.001)
                fact("fault")
                kill_self()
            # What an interrupt in the middle of their ends leaves. That of autocast keeps weights
            # of this step that it has cast.
            left.extend((torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad()))
            left[0].__enter__()
            layer(torch.ones(1, 8))
            left[1].__enter__()
            fact("left")
            is_first("left")
            while True:
                time.sleep(0.001)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(torch.full((2, 8), 1.0 + RANK)).square().mean()
        loss.backward()
        optimizer.step()
        state.commit()
    return repr([parameter.tolist() for parameter in layer.parameters()])


fact("entered")
fact("returned", digest=train())
