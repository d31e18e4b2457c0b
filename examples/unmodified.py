"""A script without one word of taskd.

Checkpoints of its own, as it would have under plain torchrun.

Under taskd a death restarts all ranks warm, within about a second, and the script resumes from its
newest checkpoint.
"""

import os
import pathlib
import sys

import torch
import torch.distributed as dist

CHECKPOINT = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "checkpoint.pt")
STEPS, EVERY = 40, 10

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
step = 0
if CHECKPOINT.exists():
    saved = torch.load(CHECKPOINT)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    step = saved["step"]
print(f"rank {rank} (pid {os.getpid()}) starts at step {step}", flush=True)
ddp = torch.nn.parallel.DistributedDataParallel(model)
while step < STEPS:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    optimizer.zero_grad()
    ddp(torch.randn(4, 8, generator=generator)).square().mean().backward()
    optimizer.step()
    step += 1
    if step % EVERY == 0:
        if rank == 0:
            torch.save(
                {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step},
                CHECKPOINT.with_suffix(".tmp"),
            )
            CHECKPOINT.with_suffix(".tmp").rename(CHECKPOINT)
        dist.barrier()
print(f"rank {rank}: weight sum {model.weight.sum().item():.6f}", flush=True)
dist.destroy_process_group()
