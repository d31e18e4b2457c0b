"""Some collectives of NCCL, and what the black box of this process has of them.

Several ranks may share one GPU; see train_on_device.py.
"""

import os

import torch

from testbed.script import RANK, fact

if torch.cuda.device_count() < int(os.environ["WORLD_SIZE"]):
    os.environ["NCCL_HOSTID"] = f"rank-{RANK}"

import torch.distributed as dist

import taskd
from taskd.native import collectives
from taskd.worker.life import current

DEVICE = torch.device("cuda", RANK % torch.cuda.device_count())


@taskd.recoverable
def run():
    torch.cuda.set_device(DEVICE)
    dist.init_process_group("nccl")
    size = dist.get_world_size()
    own = torch.arange(8.0, device=DEVICE) + RANK
    whole = torch.zeros(8 * size, device=DEVICE)
    sums = []
    for _ in range(3):
        dist.all_reduce(own)
        sums.append(own.sum().item())
    dist.all_gather_into_tensor(whole, own)
    sums.append(whole.sum().item())
    dist.reduce_scatter_tensor(own, whole)
    sums.append(own.sum().item())
    dist.broadcast(own, 0)
    if RANK == 0:
        dist.send(own, 1)
    else:
        dist.recv(own, 0)
    sums.append(own.sum().item())
    found = collectives.Collectives(current().box)
    fact(
        "seen",
        sums=sums,
        preloaded=collectives.is_preloaded(),
        calls=[{"name": call.name, "number": call.number} for call in found.calls()],
        communicators=[
            {"id": one.id, "name": one.name, "entered": one.entered, "left": one.left}
            for one in found.communicators()
        ],
    )


run()
