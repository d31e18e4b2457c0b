"""The training that benchmarks/soak.py runs: tiny steps, and a death every few of them.

LAYOUT          see testbed.sharded
SNAPSHOT_EVERY  as TrainState takes it
KILLS           how many deaths there are (0: none) in a training that is long enough for
KILLS_PLANNED
SEED, SPARED    what the deaths are drawn from, and the rank that never dies
STEP_S          how long a step takes: for deaths at any moment of it
FACTS           directory of what it notes, see testbed.script

A rank ends itself with SIGKILL, once per death. After each restore() a process notes its memory,
descriptors and threads.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel

import taskd
from benchmarks.soak_plan import ANY, free_kb, plan_kills, size_of, steps_for
from taskd.worker.process import flight
from testbed.script import RANK, fact, is_first, kill_self, uninterrupted
from testbed.sharded import Net, digest, noisy_batch, shard

STEP_S = float(os.environ["STEP_S"])
STEPS = steps_for(int(os.environ["KILLS_PLANNED"]))
PLANNED = plan_kills(
    int(os.environ["KILLS"]),
    int(os.environ["WORLD_SIZE"]),
    int(os.environ["SPARED"]),
    os.environ["SEED"],
)
MINE = {kill.step: kill for kill in PLANNED if kill.rank == RANK}
HIDDEN, LAYERS = 16, 4
RING, READS = 2000, 4  # entries of torch's flight recorder; how often it is read


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
    with uninterrupted():
        if not is_first(f"fault-{kill.number}"):
            return
        fact("fault", number=kill.number, step=step, place=kill.place)
        if kill.place == ANY:
            die_in(kill.moment * STEP_S)
        else:
            kill_self()


def stall() -> None:
    """Stand still until taskd has read torch's flight recorder, full, a few times.

    It does so whenever a step takes long, on a slow machine now and then: 11 MB for a moment, and
    allocators keep some of the pages. What is taken for that once is taken here, before the
    samples that are compared.
    """
    nothing = torch.zeros(1)
    for _ in range(RING):
        dist.all_reduce(nothing)
    with mock.patch.object(flight, "calls", wraps=flight.calls) as read:
        while read.call_count < READS:
            time.sleep(0.1)


@taskd.recoverable
def train() -> str:
    dist.init_process_group("gloo")
    torch.manual_seed(1234)
    net = Net(HIDDEN, LAYERS, here)
    model = shard(net, os.environ["LAYOUT"])
    torch.manual_seed(99 + RANK)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    net.layers[0].register_full_backward_hook(lambda *_: here("backward-end", net.step))
    # before TrainState's own hook, which votes
    optimizer.register_step_pre_hook(lambda *_: here("before-vote", net.step))
    every = int(os.environ["SNAPSHOT_EVERY"])
    state = taskd.TrainState(model=model, optimizer=optimizer, snapshot_every=every)
    state.restore()
    if state.step == 0:
        stall()
    optimizer.register_step_pre_hook(lambda *_: here("optimizer", net.step))
    fact("restored", step=state.step, **size_of(os.getpid(), free_kb()))
    began, first = time.monotonic(), state.step
    while state.step < STEPS:
        net.step = state.step
        here("step", state.step)
        optimizer.zero_grad()
        model(noisy_batch(HIDDEN, state.step)).square().mean().backward()
        if isinstance(model, FullyShardedDataParallel):
            model.clip_grad_norm_(1.0)
        optimizer.step()
        here("before-commit", state.step)
        state.commit()
    fact("trained", step_s=(time.monotonic() - began) / max(1, STEPS - first))
    return digest(model, optimizer, state.step)


fact("entered")
fact("returned", digest=train())
