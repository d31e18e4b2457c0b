"""Reads its data by a DataLoader, in three passes of six batches for each rank.

FAULTS  see testbed.script; place: "forward"
CASE    "stateful": a StatefulDataLoader of torchdata, shuffled, which the TrainState carries;
        "sampler": a DistributedSampler, and batches that are done are skipped;
        "shuffled": one whose order nothing carries
"""

import itertools
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import taskd
from testbed.script import RANK, die_if_due, fact

PASSES, BATCHES, BATCH, CASE = 3, 6, 4, os.environ["CASE"]


def samples() -> list[int]:
    """Of all ranks, or those of this one where the loader divides nothing."""
    size = BATCHES * BATCH
    if CASE == "sampler":
        return list(range(dist.get_world_size() * size))
    return list(range(RANK * size, (RANK + 1) * size))


def loader_of(data: list[int]) -> DataLoader:
    if CASE == "stateful":
        from torchdata.stateful_dataloader import StatefulDataLoader

        return StatefulDataLoader(data, BATCH, shuffle=True, num_workers=1)
    if CASE == "sampler":
        return DataLoader(data, BATCH, sampler=DistributedSampler(data, seed=1))
    return DataLoader(data, BATCH, shuffle=True)


@taskd.recoverable
def train() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    loader = loader_of(samples())
    carried = {"loader": loader} if CASE == "stateful" else {}
    state = taskd.TrainState(model=model, optimizer=optimizer, epoch=0, done=0, **carried)
    state.restore()
    while state.epoch < PASSES:
        if CASE == "sampler":
            loader.sampler.set_epoch(state.epoch)
        batches = iter(loader)
        if CASE == "sampler":
            batches = itertools.islice(batches, state.done, None)
        for ids in batches:
            die_if_due("forward", state.step)
            optimizer.zero_grad()
            ddp(ids[:, None].float()).square().mean().backward()
            optimizer.step()
            state.done += 1
            # behind commit() the note of a survivor that is called out would be missing
            fact("commits", step=state.step, ids=ids.tolist())
            state.commit()
        state.epoch, state.done = state.epoch + 1, 0
    fact("returned", weights=model.weight.tolist())


train()
