"""The smallest recoverable DDP script.

A comment marks each of the six lines that taskd adds to a plain one.
"""

import torch
import torch.distributed as dist

import taskd  # + 1


@taskd.recoverable  # + 2
def train() -> torch.nn.Module:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = taskd.TrainState(model=model, optimizer=optimizer)  # + 3
    state.restore()  # + 4
    while state.step < 100:  # + 5  for step in range(100):
        optimizer.zero_grad()
        ddp(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        state.commit()  # + 6
    return model


trained = train()
print(f"rank {dist.get_rank()}: weight sum {trained.weight.sum().item():.6f}", flush=True)
