"""A loop as users of mindio_ttp write it, which can hurt itself at a named place, once.

FACTS, FAULTS   see testbed.script
SAVE      folder of its checkpoints (default: here)
STEPS     how many
LAYOUT    "whole": each rank holds all of the optimizer's state; "parts": every second rank
          holds the same half of it (ZeRO-1 with replicas)
WITHOUT   handlers that are not registered, by name, separated by ","
BAD       what the script does wrong: see `misuse`
"""

import hashlib
import io
import os
import pathlib
import signal
import time
from types import SimpleNamespace

import torch
import torch.distributed as dist
from mindio_ttp import controller_ttp
from mindio_ttp import framework_ttp as ttp
from torch.nn.parallel import DistributedDataParallel

from testbed.script import RANK, fact, kill_self, planned_faults, strike

WORLD = int(os.environ["WORLD_SIZE"])
SAVE = pathlib.Path(os.environ.get("SAVE", "checkpoints"))
PARTS = 2 if os.environ.get("LAYOUT") == "parts" else 1
WITHOUT = os.environ.get("WITHOUT", "").split(",")
BAD = os.environ.get("BAD", "")
FAULTS = planned_faults(os.environ.get("FAULTS", ""))
PART = RANK % PARTS
args = SimpleNamespace(
    iteration=0, train_iters=int(os.environ.get("STEPS", "12")), is_rebooted=False
)
entries = 0


def fail():
    raise ValueError("a bad sample")


def fail_memory():
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    raise RuntimeError("UCE ERROR, device error type 507053")


def hang():
    """Where nothing reaches the main thread."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    time.sleep(600)


def notify():
    assert controller_ttp.tft_notify_controller_dump() == 0


HOW = {
    "kill": kill_self,
    "raise": fail,
    "uce": fail_memory,
    "notify": notify,
    "hang": hang,
}


def here(place, step):
    """Does a fault belong here?"""
    for fault in FAULTS:
        if (fault.step, fault.place) == (step, place):
            strike(fault, step, HOW)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        # registered in another order than used, so that DDP rebuilds its buckets
        self.last = torch.nn.Linear(32, 4)
        self.first = torch.nn.Linear(16, 32)
        self.middle = torch.nn.ModuleList(torch.nn.Linear(32, 32) for _ in range(2))
        self.dropout = torch.nn.Dropout(0.1)

    def forward(self, x):
        x = torch.relu(self.first(x))
        for layer in self.middle:
            x = self.dropout(torch.relu(layer(x)))
        here("forward", args.iteration)
        return self.last(x)


def parts():
    """The parameters by the part of the optimizer's state that belongs to them."""
    parameters = list(model.parameters())
    return [parameters[part::PARTS] for part in range(PARTS)]


def gather_parameters():
    """From those whose optimizer has written them."""
    if PARTS > 1:
        for part, parameters in enumerate(parts()):
            for parameter in parameters:
                dist.broadcast(parameter.data, src=part)


# ---------------------------------------------------------------------- handlers


def note(handler, **fields):
    fact("handler", handler=handler, **fields)
    here(handler, args.iteration)


def stop(given, ctx):
    note("stop", ctx=ctx)


def clean(is_uce_error, given, ctx):
    note("clean", is_uce=is_uce_error)
    return 0


def rebuild(fault_ranks, given, ctx):
    note("rebuild", ranks=fault_ranks, is_default_there=dist.is_initialized())
    args.is_rebooted = False


def pack():
    data = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict()], data)
    return torch.frombuffer(bytearray(data.getvalue()), dtype=torch.uint8)


def unpack(data):
    states = torch.load(io.BytesIO(data.numpy().tobytes()), weights_only=True)
    model.load_state_dict(states[0])
    optimizer.load_state_dict(states[1])


def repair(step, need_rebuild, error_ranks, repair_info, given, ctx):
    note("repair", step=step, need_rebuild=need_rebuild, error_ranks=error_ranks,
         info={**repair_info, "repair_type": ttp.RepairType(repair_info["repair_type"]).name},
         is_given=given is step_args, type=ttp.tft_get_repair_type())  # fmt: skip
    group = dist.new_group(repair_info["rank_list"], use_local_synchronization=True)
    for source, target in zip(repair_info["src"], repair_info["dst"], strict=True):
        if source == RANK:
            data = pack()
            dist.send(torch.tensor([data.numel()]), target, group=group)
            dist.send(data, target, group=group)
        else:
            size = torch.zeros(1, dtype=torch.int64)
            dist.recv(size, source, group=group)
            data = torch.zeros(int(size), dtype=torch.uint8)
            dist.recv(data, source, group=group)
            unpack(data)


def rollback(step, given, ctx):
    note("rollback", step=step)
    args.iteration = step
    gather_parameters()


def save(step, save_info, given, ctx):
    note("save", step=step, info=save_info, rank=dist.get_rank())
    folder = SAVE / f"tmp_{step:07}"
    folder.mkdir(parents=True, exist_ok=True)
    torch.save([model.state_dict(), optimizer.state_dict()], folder / f"part_{PART}.pt")
    group = dist.new_group(save_info[0]["ranks"], use_local_synchronization=True)
    written = torch.ones(1)
    dist.all_reduce(written, group=group)
    fact("saved", count=int(written))


def rename(step, given):
    note("rename", step=step)
    (SAVE / f"tmp_{step:07}").rename(SAVE / f"iter_{step:07}")


def load_checkpoint():
    """The newest that has its name."""
    for folder in sorted(SAVE.glob("iter_*"), reverse=True)[:1]:
        for part in range(PARTS):
            states = torch.load(folder / f"part_{part}.pt", weights_only=True)
            if part == PART:
                optimizer.load_state_dict(states[1])
            with torch.no_grad():
                named = dict(model.named_parameters())
                for name in list(named)[part::PARTS]:
                    named[name].copy_(states[0][name])
        args.iteration = int(folder.name.removeprefix("iter_"))


def digest():
    data = b"".join(tensor.detach().numpy().tobytes() for tensor in model.state_dict().values())
    return hashlib.sha256(data).hexdigest()[:16]


# ---------------------------------------------------------------------- training


def misuse(what, step):
    """Where BAD says so."""
    if what != BAD or step % 4 != 3:
        return
    fact("misused", how=BAD)
    if BAD == "start twice":
        ttp.tft_start_updating_os()


@ttp.tft_exception_handler
def train(model, optimizer):
    global entries  # noqa: PLW0603
    entries += 1
    fact("entered", entry=entries, step=args.iteration)
    if args.is_rebooted:
        raise RuntimeError("ARF FINISH")
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.001)
    while args.iteration < args.train_iters:
        here("step", args.iteration)
        # generators of its own for the data; dropout draws from torch's
        generator = torch.Generator().manual_seed(1000 * args.iteration + RANK)
        inputs = torch.randn(8, 16, generator=generator)
        labels = torch.randint(4, (8,), generator=generator)
        model.zero_grad()
        torch.nn.functional.cross_entropy(ddp(inputs), labels).backward()
        here("backward", args.iteration)
        if BAD != "end without start":
            ttp.tft_start_updating_os(args.iteration)
        misuse("start twice", args.iteration)
        here("optimizer", args.iteration)
        optimizer.step()
        args.iteration += 1
        ttp.tft_end_updating_os(args.iteration)
        fact("committed", step=args.iteration)
        here("gather", args.iteration)
        gather_parameters()
        ttp.tft_pause_train(args.iteration)
    return digest()


def register():
    handlers = {
        "stop": ttp.tft_register_stop_handler,
        "clean": ttp.tft_register_clean_handler,
        "rebuild": ttp.tft_register_rebuild_group_handler,
        "repair": ttp.tft_register_repair_handler,
        "rollback": ttp.tft_register_rollback_handler,
        "save": ttp.tft_register_save_ckpt_handler,
        "rename": ttp.tft_register_rename_handler,
    }
    for name, tft_register in handlers.items():
        if name not in WITHOUT:
            tft_register(globals()[name], f"context of {name}")
    ranks = list(range(WORLD)) if BAD != "another group" or RANK == 0 else [RANK]
    ttp.tft_set_optimizer_replica(
        RANK, [{"rank_list": ranks, "replica_cnt": len(ranks) // PARTS, "replica_shift": 0}]
    )


if BAD != "no group":
    dist.init_process_group("gloo")
torch.manual_seed(1234)
model = Net()
torch.manual_seed(99 + RANK)
optimizer = torch.optim.AdamW(parts()[PART], lr=1e-3)
load_checkpoint()
if RANK == 0:
    ttp.tft_init_controller(RANK, WORLD, False, True)
    ttp.tft_start_controller("127.0.0.1", 8000, False)
if BAD != "no processor":
    told = WORLD - 1 - RANK if BAD == "another rank" else RANK
    ttp.tft_init_processor(told, WORLD, False, False, "", True, True)
    ttp.tft_start_processor("127.0.0.1", 8000)
if ttp.tft_is_reboot_node():
    args.is_rebooted = True
    fact("rebooted", type=ttp.tft_get_reboot_type())
register()
step_args = [model, optimizer]
ttp.tft_set_step_args(step_args)
here("boot", args.iteration)
if BAD == "no group":
    dist.init_process_group("gloo")
result = train(model, optimizer)
fact("returned", digest=result)
print(f"rank {RANK}: digest {result}", flush=True)
