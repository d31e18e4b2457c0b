"""A small training whose state is sharded: HSDP (2 x 2) or FSDP2 (all ranks). Hurts itself as train.py does.

LAYOUT   hsdp or fsdp
FACTS, FAULTS, STEPS as in train.py
"""

import hashlib
import json
import os
import signal
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import taskd

RANK = int(os.environ["RANK"])
WORLD = int(os.environ["WORLD_SIZE"])
FACTS = os.environ["FACTS"]
STEPS = int(os.environ.get("STEPS", "12"))
FAULTS = [spec for spec in os.environ.get("FAULTS", "").split(";") if spec]


def fact(what, **fields):
    with open(f"{FACTS}/{RANK}.jsonl", "a", encoding="utf-8") as out:
        out.write(json.dumps({"what": what, "pid": os.getpid(), "time": time.monotonic(), **fields}) + "\n")


def here(place, step):
    for index, spec in enumerate(FAULTS):
        where, wanted_place, how = spec.split(":")
        rank, wanted_step = (int(part) for part in where.split("@"))
        if (rank, wanted_step, wanted_place) != (RANK, step, place):
            continue
        try:
            os.close(os.open(f"{FACTS}/fault-{index}", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            continue
        fact("fault", spec=spec, step=step)
        assert how == "kill"
        os.kill(os.getpid(), signal.SIGKILL)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(4))
        self.step = 0
        self.layers[1].register_forward_hook(lambda *_: here("forward", self.step))

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        x.register_hook(lambda grad: here("backward-begin", self.step))
        return x


def digest(model):
    data = b"".join(tensor.full_tensor().numpy().tobytes() for tensor in model.state_dict().values())
    return hashlib.sha256(data).hexdigest()[:16]


@taskd.recoverable
def train():
    dist.init_process_group("gloo")
    fact("entered")
    if os.environ["LAYOUT"] == "hsdp":
        mesh = init_device_mesh("cpu", (2, WORLD // 2), mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("shard",))
    torch.manual_seed(1234)
    model = Net()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.layers[0].register_full_backward_hook(lambda *_: here("backward-end", model.step))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    optimizer.register_step_pre_hook(lambda *_: here("before-vote", model.step))
    state = taskd.TrainState(model=model, optimizer=optimizer)
    optimizer.register_step_pre_hook(lambda *_: here("after-vote", model.step))
    restored = state.restore()
    optimizer.register_step_pre_hook(lambda *_: here("optimizer", model.step))
    fact("restored", step=state.step, source=str(restored))
    while state.step < STEPS:
        model.step = state.step
        here("step", state.step)
        generator = torch.Generator().manual_seed(1000 * state.step + RANK)
        optimizer.zero_grad()
        model(torch.randn(8, 16, generator=generator)).square().mean().backward()
        optimizer.step()
        here("before-commit", state.step)
        state.commit()
        fact("committed", step=state.step)
    result = digest(model)
    fact("done", step=state.step, digest=result)
    return result


result = train()
fact("returned", digest=result)
if os.environ.get("TASKD_PROCESS_ENABLE") != "on":
    os._exit(0)
