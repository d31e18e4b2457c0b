"""A DDP training with dropout that reads its data as the README says. Used by test_passes.

DATA    "skip": DistributedSampler, set_epoch, and the batches done are skipped; "stateful": a
        StatefulDataLoader of torchdata that the TrainState has
FACTS, FAULTS  as in train.py; places are "batch", before the forward pass, and "update", when the
        optimizer begins
LOADER_WORKERS  processes of the loader
"""

import hashlib
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import taskd
from testbed.script import RANK, fact, kill_self, planned_faults, strike

SAMPLES, BATCH, EPOCHS = 96, 8, 3
DATA = os.environ.get("DATA", "skip")
LOADER_WORKERS = int(os.environ.get("LOADER_WORKERS", "0"))
FAULTS = planned_faults(os.environ.get("FAULTS", ""))


class Noisy(Dataset):
    """As random augmentation makes them, in whichever process. A StatefulDataLoader has none."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        sample = torch.full((4,), index / SAMPLES)
        return sample + 0.1 * torch.randn(4) if DATA == "skip" else sample


def loader_and_sampler():
    data = Noisy()
    if DATA == "stateful":
        from torchdata.stateful_dataloader import StatefulDataLoader

        return StatefulDataLoader(data, BATCH, shuffle=True, num_workers=LOADER_WORKERS), None
    sampler = DistributedSampler(data)
    return DataLoader(data, BATCH, sampler=sampler, num_workers=LOADER_WORKERS), sampler


def here(place, step):
    for fault in FAULTS:
        if (fault.step, fault.place) == (step, place):
            strike(fault, step, {"kill": kill_self})


@taskd.recoverable
def train():
    fact("entered")
    dist.init_process_group("gloo")
    torch.manual_seed(1234)
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 16), torch.nn.Dropout(0.5), torch.nn.Linear(16, 1)
    )
    torch.manual_seed(99 + RANK)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader, sampler = loader_and_sampler()
    carried = {"loader": loader} if sampler is None else {}
    state = taskd.TrainState(model=model, optimizer=optimizer, epoch=0, batch=0, **carried)
    fact("restored", source=str(state.restore()))
    for epoch in range(state.epoch, EPOCHS):
        if sampler is not None:
            sampler.set_epoch(epoch)
        for number, samples in enumerate(loader):
            if sampler is not None and number < state.batch:
                continue
            here("batch", state.step)
            optimizer.zero_grad()
            ddp(samples).square().mean().backward()
            here("update", state.step)
            optimizer.step()
            state.batch = number + 1
            state.commit()
            fact("committed", step=state.step)
        state.epoch, state.batch = epoch + 1, 0
    data = b"".join(one.detach().numpy().tobytes() for one in model.parameters())
    return hashlib.sha256(data).hexdigest()[:16]


fact("returned", digest=train())
