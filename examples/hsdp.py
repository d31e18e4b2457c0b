"""HSDP: the ranks of a row share the state among them, and every row holds all of it.

A killed rank gets its shard from the other row.

    TASKD_PROCESS_ENABLE=on python manager.py &
    TASKD_PROCESS_ENABLE=on python -m taskd.run --nproc-per-node=4 examples/hsdp.py

With 4 ranks: 0 and 1 are one row, 2 and 3 the other, so 0 and 2 hold the same. Runs the same under
plain torchrun, without recovery.
"""

import hashlib
import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import taskd

STEPS = 30


@taskd.recoverable
def train() -> str:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh(
        "cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard")
    )
    torch.manual_seed(0)
    hidden = [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(2)]
    model = torch.nn.Sequential(*hidden, torch.nn.Linear(64, 1))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    torch.manual_seed(1000 + rank)  # from here on each rank draws its own samples
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state = taskd.TrainState(model=model, optimizer=optimizer, loss=0.0)
    restored = state.restore()
    print(f"rank {rank} (pid {os.getpid()}) starts at step {state.step}: {restored}", flush=True)
    while state.step < STEPS:
        samples = torch.randn(32, 64)
        wanted = samples.square().mean(1, keepdim=True)
        optimizer.zero_grad()
        loss = (model(samples) - wanted).square().mean()
        loss.backward()
        optimizer.step()
        state.loss = loss.item()
        state.commit()
        if rank == 0 and state.step % 10 == 0:
            print(f"step {state.step:4d}  loss {state.loss:.4f}", flush=True)
    whole = [parameter.full_tensor().detach() for parameter in model.parameters()]
    return hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in whole)).hexdigest()[:16]


final_digest = train()
if dist.get_rank() == 0:
    print(f"final: digest {final_digest}", flush=True)
dist.destroy_process_group()
