"""The training that benchmarks/soak.py runs: tiny steps, and a death every few of them.

LAYOUT       ddp, hsdp (2 x half of the ranks), fsdp (all ranks), or FSDP1: flat-FULL_SHARD,
flat-HYBRID_SHARD (2 x half), with -orig for use_orig_params SNAPSHOT_EVERY KILLS        how many
deaths there are (0: none) in a training that is long enough for KILLS_PLANNED SEED, SPARED what the
deaths are drawn from, and the rank that never dies STEP_S       how long a step takes: for deaths
at any moment of it FACTS        directory: <rank>-<pid>.jsonl, one JSON line per fact, in one write

A rank ends itself with SIGKILL, once per death. After each restore() a process notes its memory,
descriptors and threads.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import signal
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import taskd
from benchmarks.soak_plan import ANY, plan_kills, size_of, steps_for

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
FACTS, LAYOUT = os.environ["FACTS"], os.environ["LAYOUT"]
SNAPSHOT_EVERY, STEP_S = int(os.environ["SNAPSHOT_EVERY"]), float(os.environ["STEP_S"])
STEPS = steps_for(int(os.environ["KILLS_PLANNED"]))
MINE = {
    kill.step: kill
    for kill in plan_kills(
        int(os.environ["KILLS"]), WORLD, int(os.environ["SPARED"]), os.environ["SEED"]
    )
    if kill.rank == RANK
}
HIDDEN, LAYERS = 16, 4
NOTES = os.open(
    f"{FACTS}/{RANK}-{os.getpid()}.jsonl",
    os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC,
    0o644,
)


def fact(what: str, **fields: object) -> None:
    os.write(
        NOTES, (json.dumps({"what": what, "time": time.monotonic(), **fields}) + "\n").encode()
    )


class SignalEvent(ctypes.Structure):
    """struct sigevent of <signal.h>: its head, and room for the rest."""

    _fields_ = (
        ("value", ctypes.c_void_p),
        ("signo", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("rest", ctypes.c_byte * 48),
    )


class TimerSpec(ctypes.Structure):
    """struct itimerspec of <time.h>."""

    _fields_ = (
        ("interval_s", ctypes.c_long),
        ("interval_ns", ctypes.c_long),
        ("value_s", ctypes.c_long),
        ("value_ns", ctypes.c_long),
    )


def die_in(delay_s: float) -> None:
    """The kernel sends SIGKILL then, whoever runs and whatever is locked."""
    libc = ctypes.CDLL(None, use_errno=True)
    timer = ctypes.c_void_p()
    event = SignalEvent(signo=signal.SIGKILL, notify=0)
    spec = TimerSpec(value_ns=1 + int(delay_s * 1e9))
    if libc.timer_create(
        time.CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(timer)
    ) or libc.timer_settime(timer, 0, ctypes.byref(spec), None):
        raise OSError(ctypes.get_errno(), "timer_create or timer_settime")


def here(place: str, step: int) -> None:
    """Die, if it is time to."""
    kill = MINE.get(step)
    if kill is None or place != ("step" if kill.place == ANY else kill.place):
        return
    try:
        os.close(os.open(f"{FACTS}/kill-{kill.number}", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return
    fact("fault", number=kill.number, step=step, place=kill.place)
    if kill.place == ANY:
        die_in(kill.moment * STEP_S)
    else:
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


def wrap(net: Net) -> torch.nn.Module:
    """As LAYOUT says."""
    if LAYOUT == "ddp":
        return DistributedDataParallel(net, bucket_cap_mb=0.001)
    replicated = LAYOUT == "hsdp" or "HYBRID" in LAYOUT
    mesh = (
        init_device_mesh("cpu", (2, WORLD // 2), mesh_dim_names=("replicate", "shard"))
        if replicated
        else None
    )
    if LAYOUT.startswith("flat-"):
        return wrap_flat(net, mesh)
    mesh = mesh or init_device_mesh("cpu", (WORLD,), mesh_dim_names=("shard",))
    for layer in net.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def wrap_flat(net: Net, mesh: DeviceMesh | None) -> torch.nn.Module:
    """FSDP1: a unit for every layer but the last, and one for that."""
    _, strategy, *orig = LAYOUT.split("-")
    options = {
        "sharding_strategy": ShardingStrategy[strategy],
        "use_orig_params": bool(orig),
        "device_id": torch.device("cpu"),
        "device_mesh": mesh,
    }
    for index in range(LAYERS - 1):
        net.layers[index] = FullyShardedDataParallel(net.layers[index], **options)
    return FullyShardedDataParallel(net, **options)


def digest(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> str:
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
    torch.manual_seed(1234)
    net = Net()
    model = wrap(net)
    torch.manual_seed(99 + RANK)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    net.layers[0].register_full_backward_hook(lambda *_: here("backward-end", net.step))
    # before TrainState's own hook, which votes
    optimizer.register_step_pre_hook(lambda *_: here("before-vote", net.step))
    state = taskd.TrainState(model=model, optimizer=optimizer, snapshot_every=SNAPSHOT_EVERY)
    state.restore()
    optimizer.register_step_pre_hook(lambda *_: here("optimizer", net.step))
    fact("restored", step=state.step, **size_of(os.getpid()))
    began, first = time.monotonic(), state.step
    while state.step < STEPS:
        net.step = state.step
        here("step", state.step)
        generator = torch.Generator().manual_seed(1000 * state.step + RANK)
        optimizer.zero_grad()
        model(
            torch.randn(8, HIDDEN, generator=generator) * (1 + 0.01 * torch.rand(()))
        ).square().mean().backward()
        if isinstance(model, FullyShardedDataParallel):
            model.clip_grad_norm_(1.0)
        optimizer.step()
        here("before-commit", state.step)
        state.commit()
    fact("trained", step_s=(time.monotonic() - began) / max(1, STEPS - first))
    return digest(model, optimizer, state.step)


fact("entered")
fact("returned", digest=train())
