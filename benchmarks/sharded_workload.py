"""The training that benchmarks/sharded_recovery.py and benchmarks/kill_everything.py run.

FSDP2 or HSDP, gloo, AdamW, noise drawn in each step.

LAYOUT       hsdp (2 x half of the ranks) or fsdp (all ranks) HIDDEN, LAYERS, STEPS, SNAPSHOT_EVERY,
CHECKPOINT_EVERY KILLS        "rank@step:place" separated by ";": SIGKILL by its own hand, once per
job. Places: step, forward, backward-begin, backward-end, before-vote DIGESTS=1    the SHA-256 of
all that this rank holds (its part of weights and optimizer memory, the step, its generator) goes
with each commit and restore FACTS        directory: <rank>-<pid>.jsonl, one JSON line per fact, in
one write. A process that is killed in the middle of one loses only this one.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import taskd

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
FACTS = os.environ["FACTS"]
LAYOUT, STEPS = os.environ["LAYOUT"], int(os.environ["STEPS"])
HIDDEN, LAYERS = int(os.environ["HIDDEN"]), int(os.environ["LAYERS"])
SNAPSHOT_EVERY, CHECKPOINT_EVERY = (
    int(os.environ.get("SNAPSHOT_EVERY", "0")),
    int(os.environ.get("CHECKPOINT_EVERY", "0")),
)
DIGESTS = os.environ.get("DIGESTS") == "1"
KILLS = [spec for spec in os.environ.get("KILLS", "").split(";") if spec]
MINE = {
    spec.partition("@")[2]: number
    for number, spec in enumerate(KILLS)
    if int(spec.partition("@")[0]) == RANK
}
NOTES = os.open(
    f"{FACTS}/{RANK}-{os.getpid()}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644
)


def fact(what: str, **fields) -> None:
    os.write(
        NOTES, (json.dumps({"what": what, "time": time.monotonic(), **fields}) + "\n").encode()
    )


def here(place: str, step: int) -> None:
    number = MINE.get(f"{step}:{place}")
    if number is None:
        return
    try:
        os.close(os.open(f"{FACTS}/kill-{number}", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return
    fact("fault", number=number, step=step, place=place)
    os.kill(os.getpid(), signal.SIGKILL)


class Net(torch.nn.Module):
    """Linear layers, and places to die at."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(HIDDEN, HIDDEN) for _ in range(LAYERS))
        self.step = 0
        self.layers[1].register_forward_hook(lambda *_: here("forward", self.step))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Residual, so that a step does not lose the differences between states."""
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        x.register_hook(lambda _: here("backward-begin", self.step))
        return x


def build() -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(1234)
    model = Net()
    sizes, names = (
        ((2, WORLD // 2), ("replicate", "shard")) if LAYOUT == "hsdp" else ((WORLD,), ("shard",))
    )
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    torch.manual_seed(99 + RANK)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4)


def digest(model: Net, optimizer: torch.optim.Optimizer, step: int) -> str:
    """Of all that this rank goes on from."""
    found = hashlib.sha256(f"{step}".encode())
    memory = [value for state in optimizer.state.values() for _, value in sorted(state.items())]
    for tensor in [*model.parameters(), *memory, torch.get_rng_state()]:
        own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        found.update(own.detach().contiguous().view(-1).view(torch.uint8).numpy())
    return found.hexdigest()[:16]


@taskd.recoverable
def train() -> str:
    dist.init_process_group("gloo")
    model, optimizer = build()
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
        generator = torch.Generator().manual_seed(1000 * state.step + RANK)
        optimizer.zero_grad()
        model(
            torch.randn(8, HIDDEN, generator=generator) * (1 + 0.01 * torch.rand(()))
        ).square().mean().backward()
        optimizer.step()
        state.commit()
        fact("committed", step=state.step, **said())
    return digest(model, optimizer, state.step)


fact("entered")
result = train()
fact("returned", digest=result)
with open(f"/proc/{os.getpid()}/status", encoding="ascii") as status:
    fact(
        "memory",
        rss_mb=next(int(line.split()[1]) // 1024 for line in status if line.startswith("VmHWM")),
    )
