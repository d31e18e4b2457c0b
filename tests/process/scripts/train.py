"""A small DDP training that can hurt itself at a named place, once. Used by the crash matrix.

FACTS   directory for what happened (one file per rank, one JSON line per fact)
FAULTS  "rank@step:place:how" separated by ";". Each fires once per job (a marker file makes sure
        of that), unless `how` begins with "always-". "last-" waits until every other rank has
        committed the step, "told-" until FACTS/told or FACTS/told-<number of the fault> is there
        (`Job.tell`).
HOLD_AT see testbed.script
STEPS, SLEEP_S, LOADER_WORKERS, BATCH_NORM, OUTER_INIT, HIDDEN, CLOSURE, SAVE_EVERY, ON_DUMP
        knobs of the workload
ON_SIGTERM  a handler of its own: "flag" and "exit" (sys.exit) before the function is decorated,
        "late-exit" in the first step; "fork": none, but each step forks a child and terminates it
"""

import collections
import ctypes
import functools
import hashlib
import itertools
import os
import pathlib
import random
import signal
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import taskd
from testbed.facts import facts_in
from testbed.script import FACTS, RANK, fact, hold, is_told, kill_self, planned_faults, strike

STEPS = int(os.environ.get("STEPS", "12"))
SLEEP_S = float(os.environ.get("SLEEP_S", "0"))
HIDDEN = int(os.environ.get("HIDDEN", "32"))
LOADER_WORKERS = int(os.environ.get("LOADER_WORKERS", "0"))
BATCH_NORM = os.environ.get("BATCH_NORM") == "1"
CLOSURE = os.environ.get("CLOSURE") == "1"
# "1": before the function is called; "above": before it is even decorated
OUTER_INIT = os.environ.get("OUTER_INIT")
ON_SIGTERM = os.environ.get("ON_SIGTERM", "")
SAVE_EVERY = int(os.environ.get("SAVE_EVERY", "0"))
ON_DUMP = os.environ.get("ON_DUMP") == "1"
FAULTS = planned_faults(os.environ.get("FAULTS", ""))
entries = 0
is_broken = False  # this process is, and stays so


def fail():
    raise ValueError("a bad sample")


def fail_differently():
    raise ValueError(f"a bad sample at {time.time_ns()}")


def break_down():
    """Like a sticky error of a device: from now on no step begins in this process."""
    global is_broken  # noqa: PLW0603
    is_broken = True


class Odd(Exception):  # noqa: N818
    """Its text is no Unicode, its cause has none at all, and is caused by this one again."""

    def __str__(self):
        if self.__cause__ is not None:
            return "\udcff" * 10_000_000
        raise OSError


def fail_oddly():
    first, second = Odd(), Odd()
    first.__cause__, second.__context__ = second, first
    raise first


def crash():
    signal.signal(signal.SIGSEGV, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGSEGV)


def damage(*words):
    """Overwrite words of this process's own black box with a number that none of them can be.

    The offsets are those of csrc/include/taskd.h.
    """
    for name in os.listdir("/proc/self/fd"):
        if (
            "taskd-black-box" in os.readlink(f"/proc/self/fd/{name}")
            and int.from_bytes(os.pread(int(name), 8, 128), sys.byteorder) == os.getpid()
        ):
            for offset in words:
                os.pwrite(int(name), (-7).to_bytes(8, sys.byteorder, signed=True), offset)
                fact("damaged", offset=offset)
            return
    raise AssertionError("this process has no black box")


HOW = {
    "damage": lambda: damage(168),  # generation, and it goes on
    # version, phase, pid
    "damaged-kill": lambda: (damage(152, 144, 128), kill_self()),
    "kill": kill_self,
    "segv": crash,
    "null": lambda: ctypes.string_at(0),
    "abort": os.abort,
    "exit3": lambda: os._exit(3),
    "exit0": lambda: os._exit(0),
    "sysexit0": lambda: sys.exit(0),
    "raise": fail,
    "raise-differently": fail_differently,
    "break": break_down,
    "odd": fail_oddly,
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "sleep": lambda: time.sleep(100_000),
    "go-on": lambda: None,
    # A loop in C that never lets go of the interpreter lock.
    "spin": lambda: collections.deque(itertools.repeat(None), maxlen=0),
}


def here(place, step):
    """The place `place` of step `step` is reached: does a fault belong here?"""
    if place == "step":
        hold(step)
    for fault in FAULTS:
        if (fault.step, fault.place) == (step, place):
            strike(fault, step, HOW, functools.partial(await_moment, fault, step))
    if is_broken and place == "step":
        fail_differently()


def await_moment(fault, step):
    if fault.how.startswith("last-"):
        others = set(range(int(os.environ["WORLD_SIZE"]))) - {RANK}
        while not others <= who_committed(step + 1):
            time.sleep(0.001)
    if fault.how.startswith("told-"):
        while not is_told("told", f"told-{fault.number}"):
            time.sleep(0.001)


def who_committed(step):
    """The ranks that have said so."""
    found = facts_in(pathlib.Path(FACTS))
    return {said["rank"] for said in found if said["what"] == "committed" and said["step"] >= step}


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        # Registered in another order than used, so that DDP rebuilds its buckets after the first
        # step.
        self.last = torch.nn.Linear(HIDDEN, 4)
        self.first = torch.nn.Linear(16, HIDDEN)
        self.norm = torch.nn.BatchNorm1d(HIDDEN) if BATCH_NORM else torch.nn.Identity()
        self.middle = torch.nn.ModuleList(torch.nn.Linear(HIDDEN, HIDDEN) for _ in range(3))
        self.dropout = torch.nn.Dropout(0.1)
        self.step = 0
        self.first.weight.register_hook(lambda grad: here("backward", self.step))

    def forward(self, x):
        x = self.norm(torch.relu(self.first(x)))
        for layer in self.middle:
            x = self.dropout(torch.relu(layer(x)))
        here("forward", self.step)
        return self.last(x)


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 4096

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.randn(16, generator=generator), torch.randint(4, (1,), generator=generator)[0]


def batch(cursor):
    generator = torch.Generator().manual_seed(cursor)
    return torch.randn(8, 16, generator=generator), torch.randint(4, (8,), generator=generator)


def batches(start):
    sampler = [
        (step * dist.get_world_size() + RANK) * 8 % 4096 + i
        for step in range(start, STEPS)
        for i in range(8)
    ]
    loader = torch.utils.data.DataLoader(
        Samples(),
        batch_size=8,
        sampler=sampler,
        num_workers=LOADER_WORKERS,
        generator=torch.Generator(),
    )
    return iter(loader)


def init():
    here("before-init", 0)
    if any((fault.step, fault.place) == (0, "in-init") for fault in FAULTS):
        c10d = dist.distributed_c10d
        original = c10d._new_process_group_helper

        def helper(*args, **kwargs):
            here("in-init", 0)
            return original(*args, **kwargs)

        c10d._new_process_group_helper = helper
    dist.init_process_group("gloo")


def digest(model):
    data = b"".join(tensor.detach().numpy().tobytes() for tensor in model.state_dict().values())
    return hashlib.sha256(data).hexdigest()[:16]


def write_own(folder, model, step):
    """As frameworks do that have a format of their own."""
    (folder / f"iter_{step:07}" / f"mp_rank_{RANK:02}").mkdir(parents=True)
    torch.save(model.state_dict(), folder / f"iter_{step:07}" / f"mp_rank_{RANK:02}" / "model.pt")


def on_sigterm(*_):
    fact("handler")
    if "exit" in ON_SIGTERM:
        sys.exit(7)


def terminate_child():
    """A child gets SIGTERM within its first instructions; it is to die by that."""
    pid = os.fork()
    if pid == 0:
        time.sleep(60)
        os._exit(0)
    os.kill(pid, signal.SIGTERM)
    assert os.waitpid(pid, 0)[1] == signal.SIGTERM


if ON_SIGTERM in ("flag", "exit"):
    signal.signal(signal.SIGTERM, on_sigterm)

if OUTER_INIT == "above":
    init()
    here("above", 0)


@taskd.recoverable
def train():
    global entries  # noqa: PLW0603
    entries += 1
    fact("entered", entry=entries)
    here(f"entry-{entries}", 0)
    if not OUTER_INIT:
        init()
    torch.manual_seed(1234)
    model = Net()
    torch.manual_seed(99 + RANK)
    random.seed(7 + RANK)
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.01)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    optimizer.register_step_pre_hook(lambda *_: here("optimizer", model.step))
    state = taskd.TrainState(
        model=model, optimizer=optimizer, scheduler=scheduler, checkpoint_every=SAVE_EVERY,
        cursor=10_000 * RANK,  # in the data: each rank has its own
    )  # fmt: skip
    if ON_DUMP:
        state.on_dump(lambda folder: write_own(folder, model, state.step))
    restored = state.restore()
    fact("restored", step=state.step, source=str(restored))
    here(f"restored-{entries}", 0)
    source = batches(state.step) if LOADER_WORKERS else None
    while state.step < STEPS:
        model.step = state.step
        if ON_SIGTERM == "late-exit":
            signal.signal(signal.SIGTERM, on_sigterm)
        if ON_SIGTERM == "fork":
            terminate_child()
        here("step", state.step)
        state.cursor += 1
        inputs, labels = batch(state.cursor) if source is None else next(source)

        def closure(inputs=inputs, labels=labels):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(
                ddp(inputs * (1 + 0.01 * random.random())), labels
            )
            loss.backward()
            return loss

        if CLOSURE:
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
        scheduler.step()
        here("before-commit", state.step)
        state.commit()
        if SLEEP_S:
            time.sleep(SLEEP_S)
        fact("committed", step=state.step)
    here("after-last", STEPS)
    fact("done", step=state.step, digest=digest(model))
    return digest(model)


if OUTER_INIT == "1":
    init()
here("boot", 0)
result = train()
here("behind", STEPS)
fact("returned", digest=result)
sys.stdout.write(f"rank {RANK}: digest {result}\n")  # in one call: other ranks print as well
sys.stdout.flush()
