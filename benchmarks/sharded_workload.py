"""The training that benchmarks/sharded_recovery.py and benchmarks/kill_everything.py run.

FSDP2 or HSDP, gloo, AdamW, noise drawn in each step.

LAYOUT            hsdp or fsdp, see testbed.sharded
HIDDEN, LAYERS    of the model
STEPS, SNAPSHOT_EVERY, CHECKPOINT_EVERY
KILLS             "rank@step:place" separated by ";": SIGKILL by its own hand, once per job. Places:
                  step, forward, backward-begin, backward-end, before-vote
DIGESTS=1         the SHA-256 of all that this rank holds goes with each commit and restore
FACTS             directory of what it notes, see testbed.script
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

import taskd
from testbed.proc import status_of
from testbed.script import RANK, fact, is_first, kill_self, planned_faults, uninterrupted
from testbed.sharded import Net, digest, noisy_batch, shard

STEPS, HIDDEN = int(os.environ["STEPS"]), int(os.environ["HIDDEN"])
SNAPSHOT_EVERY = int(os.environ.get("SNAPSHOT_EVERY", "0"))
CHECKPOINT_EVERY = int(os.environ.get("CHECKPOINT_EVERY", "0"))
DIGESTS = os.environ.get("DIGESTS") == "1"
MINE = {(fault.step, fault.place): fault for fault in planned_faults(os.environ.get("KILLS", ""))}


def here(place: str, step: int) -> None:
    fault = MINE.get((step, place))
    if fault is None:
        return
    with uninterrupted():
        if is_first(fault.name):
            fact("fault", number=fault.number, step=step, place=place)
            kill_self()


@taskd.recoverable
def train() -> str:
    dist.init_process_group("gloo")
    torch.manual_seed(1234)
    model = Net(HIDDEN, int(os.environ["LAYERS"]), here)
    shard(model, os.environ["LAYOUT"])
    torch.manual_seed(99 + RANK)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model.layers[0].register_full_backward_hook(lambda *_: here("backward-end", model.step))
    # before TrainState's own hook, which votes
    optimizer.register_step_pre_hook(lambda *_: here("before-vote", model.step))
    state = taskd.TrainState(
        model=model,
        optimizer=optimizer,
        snapshot_every=SNAPSHOT_EVERY,
        checkpoint_every=CHECKPOINT_EVERY,
    )
    restored = state.restore()

    def said() -> dict[str, str]:
        return {"digest": digest(model, optimizer, state.step)} if DIGESTS else {}

    fact("restored", step=state.step, source=str(restored), **said())
    while state.step < STEPS:
        model.step = state.step
        here("step", state.step)
        optimizer.zero_grad()
        model(noisy_batch(HIDDEN, state.step)).square().mean().backward()
        optimizer.step()
        state.commit()
        fact("committed", step=state.step, **said())
    return digest(model, optimizer, state.step)


fact("entered")
result = train()
fact("returned", digest=result)
fact("memory", rss_mb=int(status_of(os.getpid())["VmHWM"].split()[0]) // 1024)
