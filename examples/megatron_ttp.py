"""A loop of Megatron's kind with mindio_ttp: its handlers move the state, and write the dump.

    pip install . packages/mindio_ttp
    torchrun --rdzv-backend=taskd --nproc-per-node=4 examples/megatron_ttp.py --train-iters 200

`kill -9` one of the pids that it prints: that rank is replaced, and receives what another holds.
With TASKD_RECOVER_STRATEGY=dump in the environment the job ends with a checkpoint of its last step
instead; the same command goes on from it. Under plain torchrun it trains as ever.
"""

import argparse
import hashlib
import os
import pathlib

import torch
import torch.distributed as dist
from mindio_ttp import framework_ttp as ttp

parser = argparse.ArgumentParser()
parser.add_argument("--train-iters", type=int, default=200)
parser.add_argument("--save", type=pathlib.Path, default=pathlib.Path("checkpoints"))
args = parser.parse_args()
args.iteration, args.is_rebooted = 0, False


@ttp.tft_exception_handler
def train(model, optimizer):
    if args.is_rebooted:  # a replacement: all is built, and what others hold can be received
        raise RuntimeError("ARF FINISH")
    ddp = torch.nn.parallel.DistributedDataParallel(model)  # over the groups of this entry
    while args.iteration < args.train_iters:
        data = torch.Generator().manual_seed(1000 * args.iteration + rank)
        inputs = torch.randn(16, 8, generator=data)
        optimizer.zero_grad()
        loss = (ddp(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        loss.backward()
        ttp.tft_start_updating_os(args.iteration)
        optimizer.step()
        args.iteration += 1
        ttp.tft_end_updating_os(args.iteration)
        if rank == 0 and args.iteration % 20 == 0:
            print(f"iteration {args.iteration}  loss {loss.item():.6f}", flush=True)


def stop(given, ctx):
    pass  # of an accelerator: make what waits for it raise


def clean(is_uce_error, given, ctx):
    return 0  # of an accelerator: empty its queues


def rebuild(fault_ranks, given, ctx):
    args.is_rebooted = False  # and make groups beside the default one again: there are none here


def repair(step, need_rebuild, error_ranks, repair_info, given, ctx):
    model, optimizer = given
    for source, target in zip(repair_info["src"], repair_info["dst"], strict=True):
        if repair_info["repair_type"] == ttp.RepairType.RT_SEND.value:
            dist.send_object_list([model.state_dict(), optimizer.state_dict()], target)
        else:
            states = [None, None]
            dist.recv_object_list(states, source)
            model.load_state_dict(states[0])
            optimizer.load_state_dict(states[1])


def rollback(step, given, ctx):
    args.iteration = step  # the data of a step are a function of its number


def save(step, save_info, given, ctx):
    args.save.mkdir(parents=True, exist_ok=True)
    states = [given[0].state_dict(), given[1].state_dict()]
    torch.save(states, args.save / f"tmp_{step:07}.pt")


def rename(step, given):
    os.replace(args.save / f"tmp_{step:07}.pt", args.save / f"iter_{step:07}.pt")


def load_checkpoint(model, optimizer):
    for path in sorted(args.save.glob("iter_*.pt"))[-1:]:
        states = torch.load(path, weights_only=True)
        model.load_state_dict(states[0])
        optimizer.load_state_dict(states[1])
        args.iteration = int(path.stem.removeprefix("iter_"))
        print(f"rank {rank} goes on from {path}", flush=True)


dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
print(f"rank {rank} is pid {os.getpid()}", flush=True)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
load_checkpoint(model, optimizer)

if rank == 0:
    ttp.tft_init_controller(rank, world_size, False, enable_arf=True)
    ttp.tft_start_controller("127.0.0.1", 8000, enable_tls=False)
ttp.tft_init_processor(rank, world_size, False, enable_tls=False, enable_arf=True)
ttp.tft_start_processor("127.0.0.1", 8000)
args.is_rebooted = ttp.tft_is_reboot_node()
everybody = {"rank_list": list(range(world_size)), "replica_cnt": world_size, "replica_shift": 0}
ttp.tft_set_optimizer_replica(rank, [everybody])
ttp.tft_register_stop_handler(stop)
ttp.tft_register_clean_handler(clean)
ttp.tft_register_rebuild_group_handler(rebuild)
ttp.tft_register_repair_handler(repair)
ttp.tft_register_rollback_handler(rollback)
ttp.tft_register_save_ckpt_handler(save)
ttp.tft_register_rename_handler(rename)
train(model, optimizer)
if rank == 0:
    content = b"".join(tensor.numpy().tobytes() for tensor in model.state_dict().values())
    print(f"final: digest {hashlib.sha256(content).hexdigest()[:16]}", flush=True)
