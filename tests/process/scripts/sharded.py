"""A small training whose state is sharded in one of many ways. Hurts itself as train.py does.

LAYOUT   hsdp (2 x 2), fsdp (all ranks), tp (TP 2 x DP 2), zero (DDP, optimizer memory divided
         between 2 ranks, twice), stages (plain tensors that differ: two parts of a model, each on
         2 ranks that average their gradients by themselves), or FSDP1: flat-FULL_SHARD (or another
         strategy; HYBRID_SHARD is 2 x 2), flat-FULL_SHARD-orig with use_orig_params
FACTS, FAULTS, STEPS as in train.py, but "how" is "kill"; "together": when all of FAULTS have come
to their places; "stop": by SIGSTOP; "late": when half of the ranks have committed this step; or, at
place "vote", "break": nobody dies, but the vote, which has passed for all others, breaks. At place
"before-anybody" a rank dies at the head of its restore(), when all others wait for it in theirs
HOLD_AT  see testbed.script
SNAPSHOT_EVERY, SNAPSHOT_BUDDY ("1"); STEP_S, seconds that a step takes longer; NOISE ("1"): every
rank draws from its own global generator in each step
"""

import hashlib
import os
import pathlib
import signal
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import taskd
from taskd.worker.state.agreement import Agreement
from testbed import sharded
from testbed.facts import facts_in
from testbed.script import FACTS, RANK, fact, hold, is_first, planned_faults, uninterrupted

WORLD = int(os.environ["WORLD_SIZE"])
STEPS = int(os.environ.get("STEPS", "12"))
NOISE = os.environ.get("NOISE") == "1"
STEP_S = float(os.environ.get("STEP_S", "0"))
FAULTS = os.environ.get("FAULTS", "")
MINE = planned_faults(FAULTS)


def here(place, step):
    for fault in MINE:
        if (fault.step, fault.place) == (step, place):
            with uninterrupted():
                if is_first(fault.name):
                    strike(fault, step)


def strike(fault, step):
    how = fault.how
    while how == "together" and not all(
        os.path.exists(f"{FACTS}/fault-{other}") for other in range(len(FAULTS.split(";")))
    ):
        time.sleep(0.001)
    while how == "late" and count("committed", step + 1) < WORLD // 2:
        time.sleep(0.001)
    while fault.place == "before-anybody" and count("waits", step) < WORLD - 1:
        time.sleep(0.001)
    fact("fault", spec=fault.spec, step=step)
    if how == "break":
        original_all_reduce(torch.ones(1))  # nobody else takes part, and one of them dies
    assert how in ("kill", "together", "late", "stop"), how
    os.kill(os.getpid(), signal.SIGSTOP if how == "stop" else signal.SIGKILL)


def count(what, step):
    found = facts_in(pathlib.Path(FACTS))
    return sum(fact["what"] == what and fact["step"] == step for fact in found)


original_all_reduce = dist.all_reduce
votes_at = []  # the step whose vote comes next


def all_reduce(tensor, *args, **kwargs):
    work = original_all_reduce(tensor, *args, **kwargs)
    if votes_at:
        here("vote", votes_at.pop())
    return work


dist.all_reduce = all_reduce
original_gather = Agreement.gather


def gather(self, text):
    fact("waits", step=0)
    return original_gather(self, text)


Agreement.gather = gather


class Net(sharded.Net):
    def one_layer(self, layer, x):
        return torch.relu(layer(x))


def build():
    """The model, its optimizer, and the numbers of this rank's part of the model and of its data.

    The part is None where DTensors or torch's optimizer tell.
    """
    layout = os.environ["LAYOUT"]
    pairs = (
        [dist.new_group([first, first + 1]) for first in range(0, WORLD, 2)]
        if layout in ("zero", "stages")
        else []
    )
    part = RANK // 2 if layout == "stages" else None
    torch.manual_seed(1234 + (part or 0))
    model = Net(16, 4, here)
    if layout in ("hsdp", "fsdp") or layout.startswith("flat"):
        model = sharded.shard(model, layout)
    elif layout == "tp":
        mesh = init_device_mesh("cpu", (2, WORLD // 2), mesh_dim_names=("dp", "tp"))
        plan = {
            f"layers.{index}": ColwiseParallel() if index % 2 == 0 else RowwiseParallel()
            for index in range(4)
        }
        parallelize_module(model, mesh["tp"], plan)
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(
                lambda own: dist.all_reduce(own.grad.to_local(), group=mesh.get_group("dp"))
            )
        return (
            model,
            torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False),
            None,
            mesh.get_local_rank("dp"),
        )
    elif layout == "stages":
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(
                lambda own: dist.all_reduce(own.grad, group=pairs[part])
            )
    else:
        assert layout == "zero", layout
        for layer in model.layers:
            for parameter in layer.parameters():
                parameter.register_post_accumulate_grad_hook(lambda own: dist.all_reduce(own.grad))
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.AdamW, process_group=pairs[RANK // 2], lr=1e-2
        )
        return model, optimizer, None, RANK
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2), part, RANK


def digest(model):
    """Of all ranks' shards together; with FSDP1 of this rank's."""
    if isinstance(model, FullyShardedDataParallel):
        return hashlib.sha256(
            b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
        ).hexdigest()[:16]
    tensors = [
        tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        for tensor in model.state_dict().values()
    ]
    data = b"".join(tensor.numpy().tobytes() for tensor in tensors)
    return hashlib.sha256(data).hexdigest()[:16]


@taskd.recoverable
def train():
    dist.init_process_group("gloo")
    fact("entered")
    model, optimizer, part, data = build()
    net = model.module if isinstance(model, FullyShardedDataParallel) else model
    net.layers[0].register_full_backward_hook(lambda *_: here("backward-end", net.step))
    optimizer.register_step_pre_hook(lambda *_: here("before-vote", net.step))
    optimizer.register_step_pre_hook(lambda *_: votes_at.append(net.step))
    state = taskd.TrainState(
        model=model,
        optimizer=optimizer,
        shard_id=part,
        snapshot_every=int(os.environ.get("SNAPSHOT_EVERY", "0")),
        snapshot_buddy=os.environ.get("SNAPSHOT_BUDDY") == "1",
    )
    torch.manual_seed(99 + RANK)
    here("before-anybody", state.step)
    restored = state.restore()
    optimizer.register_step_pre_hook(lambda *_: here("optimizer", net.step))
    fact("restored", step=state.step, source=str(restored))
    while state.step < STEPS:
        net.step = state.step
        hold(state.step)
        here("step", state.step)
        generator = torch.Generator().manual_seed(1000 * state.step + data)
        optimizer.zero_grad()
        noise = torch.rand(8, 16) if NOISE else 0.0
        model(torch.randn(8, 16, generator=generator) + noise).square().mean().backward()
        if net is not model:
            model.clip_grad_norm_(1.0)
        time.sleep(STEP_S)
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
