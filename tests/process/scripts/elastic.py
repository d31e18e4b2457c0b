"""A training whose world may get smaller, and whole again.

LAYOUT  "ddp", "fsdp", or "hsdp" over replicas of two ranks each
DATA    "elastic": a taskd.ElasticSampler; "divided": a DistributedSampler
SLEEP_S

It ends when there is a file named "stop" beside the facts.
"""

import contextlib
import hashlib
import os
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

import taskd
from taskd.worker.state.elastic_sampler import MicroBatch
from testbed.script import FACTS, fact
from tests.process import elastic_model

LAYOUT = os.environ.get("LAYOUT", "ddp")
DATA = os.environ.get("DATA", "elastic")
SLEEP_S = float(os.environ.get("SLEEP_S", "0.05"))


def wrapped(model):
    if LAYOUT == "ddp":
        return DistributedDataParallel(model)
    if LAYOUT == "fsdp":
        return fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    shape = (dist.get_world_size() // 2, 2)
    return fully_shard(model, mesh=init_device_mesh("cpu", shape, mesh_dim_names=("r", "s")))


def unsynchronised(parallel):
    if LAYOUT == "ddp":
        return parallel.no_sync()
    return contextlib.nullcontext()


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def batches(step):
    if DATA == "elastic":
        return SAMPLER.of(step)
    sampler = DistributedSampler(range(elastic_model.SIZE), seed=1)
    return [MicroBatch(list(sampler)[:4], 1.0, is_last=True)]


SAMPLER = elastic_model.sampler() if DATA == "elastic" else None


@taskd.recoverable
def train():
    fact("entered")
    dist.init_process_group("gloo")
    model, inputs, targets = elastic_model.make()
    parallel = wrapped(model)
    optimizer = elastic_model.optimizer_of(parallel)
    state = taskd.TrainState(model=model, optimizer=optimizer)
    restored = state.restore()
    fact(
        "restored", version=restored.version, source=restored.source, world_rank=dist.get_rank(),
        world=dist.get_world_size(), local=int(os.environ["LOCAL_RANK"]),
    )  # fmt: skip
    is_over = False
    while not is_over:
        optimizer.zero_grad()
        total, ends = torch.zeros(()), float(os.path.exists(f"{FACTS}/stop"))
        for batch in batches(state.step):
            with contextlib.nullcontext() if batch.is_last else unsynchronised(parallel):
                errors = parallel(inputs[batch.indices]) - targets[batch.indices]
                loss = errors.square().mean() * batch.weight
                loss.backward()
            total += loss.detach()
        said = torch.stack([total, torch.tensor(ends)])
        dist.all_reduce(said)
        optimizer.step()
        step, loss = state.step, said[0].item() / dist.get_world_size()
        is_over = bool(said[1])
        state.commit()
        fact("committed", step=step, loss=loss, world=dist.get_world_size(), pid=os.getpid())
        time.sleep(SLEEP_S)
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        digest.update(whole(tensor).detach().numpy().tobytes())
    return digest.hexdigest()


digest = train()
fact("returned", digest=digest, pid=os.getpid())
