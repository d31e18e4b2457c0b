"""A small training on a GPU that hurts itself as the scripts of tests/process do.

BACKEND  gloo or nccl. Several ranks may share one GPU: NCCL allows that to ranks of different
         hosts, so each says that it is one (NCCL_HOSTID)
LAYOUT   ddp, fsdp (FSDP2 over all ranks), or hsdp (2 x half of them)
AVERAGE  1: a plain value on the device follows the weights
FACTS, FAULTS, STEPS, HOLD_AT, SNAPSHOT_EVERY as in tests/process/scripts; "how" is kill, raise,
stop, "assert" (a kernel fails: no further call to the device succeeds in this process), or "memory"
(there is not enough of it on the device). The place "started" is behind the creation of the group,
before its first collective; its "step" is the number of faults that have happened before

No step waits for the device by itself: the host may be as far ahead of it as torch lets it.
"""

import faulthandler
import hashlib
import os
import signal
import time

import torch

from testbed.script import FACTS, RANK, fact, hold, kill_self, planned_faults, strike

if os.environ["BACKEND"] == "nccl" and torch.cuda.device_count() < int(os.environ["WORLD_SIZE"]):
    os.environ["NCCL_HOSTID"] = f"rank-{RANK}"

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import taskd

STEPS = int(os.environ.get("STEPS", "30"))
HIDDEN = int(os.environ.get("HIDDEN", "256"))
LAYOUT = os.environ.get("LAYOUT", "ddp")
SNAPSHOT_EVERY = int(os.environ.get("SNAPSHOT_EVERY", "0"))
AVERAGE = os.environ.get("AVERAGE") == "1"
FAULTS = planned_faults(os.environ.get("FAULTS", ""))
DEVICE = torch.device(os.environ.get("DEVICE", "cuda"), RANK % max(1, torch.cuda.device_count()))
VOCABULARY = 64


def fail():
    raise ValueError("a bad sample")


def fail_on_device():
    torch.zeros(4, device=DEVICE)[torch.tensor([VOCABULARY], device=DEVICE)]
    torch.cuda.synchronize()
    raise AssertionError("the device has not noticed")


def use_up_memory():
    torch.empty(1 << 50, dtype=torch.uint8, device=DEVICE)


HOW = {
    "kill": kill_self,
    "raise": fail,
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "assert": fail_on_device,
    "memory": use_up_memory,
}


def here(place, step):
    for fault in FAULTS:
        if (fault.step, fault.place) == (step, place):
            strike(fault, step, HOW)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.words = torch.nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(HIDDEN, HIDDEN) for _ in range(4))
        self.dropout = torch.nn.Dropout(0.1)
        self.step = 0

    def forward(self, words):
        x = self.words(words)
        for number, layer in enumerate(self.layers):
            x = x + self.dropout(torch.tanh(layer(x)))
            if number == 1:
                x.register_hook(lambda _: here("backward", self.step))
        here("forward", self.step)
        return x


def build():
    """The model that is trained, and what has the number of the step."""
    torch.manual_seed(1234)
    net = Net().to(DEVICE)
    torch.manual_seed(99 + RANK)
    if LAYOUT == "ddp":
        return DistributedDataParallel(net, bucket_cap_mb=0.5), net
    world = dist.get_world_size()
    mesh = (
        init_device_mesh(DEVICE.type, (2, world // 2), mesh_dim_names=("replicate", "shard"))
        if LAYOUT == "hsdp"
        else init_device_mesh(DEVICE.type, (world,))
    )
    for layer in net.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(net, mesh=mesh), net


def digest(model, optimizer):
    """Of what this rank goes on from: its part of weights and optimizer, its generators."""
    found = hashlib.sha256()
    memory = [value for state in optimizer.state.values() for _, value in sorted(state.items())]
    generators = [torch.get_rng_state()]
    if DEVICE.type == "cuda":
        generators.append(torch.cuda.get_rng_state(DEVICE))
    for tensor in [*model.parameters(), *memory, *generators]:
        own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        found.update(own.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return found.hexdigest()[:16]


@taskd.recoverable
def train():
    fact("entered")
    if DEVICE.type == "cuda":
        torch.cuda.set_device(DEVICE)
    dist.init_process_group(os.environ["BACKEND"])
    here("started", sum(name.startswith("fault-") for name in os.listdir(FACTS)))
    model, net = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    optimizer.register_step_pre_hook(lambda *_: here("optimizer", net.step))
    values = {"average": torch.zeros(8, device=DEVICE)} if AVERAGE else {}
    state = taskd.TrainState(
        model=model, optimizer=optimizer, snapshot_every=SNAPSHOT_EVERY, **values
    )
    restored = state.restore()
    fact("restored", step=state.step, source=str(restored))
    while state.step < STEPS:
        net.step = state.step
        hold(state.step)
        here("step", state.step)
        generator = torch.Generator().manual_seed(1000 * state.step + RANK)
        words = torch.randint(VOCABULARY, (64,), generator=generator).to(DEVICE, non_blocking=True)
        optimizer.zero_grad()
        with torch.autocast(DEVICE.type, torch.bfloat16):
            loss = model(words).float().square().mean()
        loss.backward()
        optimizer.step()
        if AVERAGE:
            state.average = 0.9 * state.average + 0.1 * net.layers[0].bias.detach()[:8]
        here("before-commit", state.step)
        state.commit()
        fact("committed", step=state.step)
    if AVERAGE:
        fact("average", device=str(state.average.device), value=state.average.tolist())
    return digest(model, optimizer)


if os.environ.get("DUMP_AFTER_S"):
    faulthandler.dump_traceback_later(float(os.environ["DUMP_AFTER_S"]))
torch.use_deterministic_algorithms(True)
began = time.monotonic()
result = train()
fact("returned", digest=result, took_s=time.monotonic() - began)
if os.environ.get("TASKD_PROCESS_ENABLE") != "on":
    os._exit(0)
