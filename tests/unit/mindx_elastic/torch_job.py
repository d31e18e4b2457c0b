"""A training with torch, written as the page on `exception_checkpoint` writes it.

Ranks r and r + HALF are replicas (data parallel); the halves hold different parameters. Run by
test_torch.py, one process for each rank. `HOW` is `each` (set_config in each step) or `once`. `GO`
is a file that the last two steps wait for.
"""

import contextlib
import glob
import hashlib
import os
import sys
import time
import types

import torch
import torch.distributed as dist

# Where it is not installed: a fork of the warm parent has the folders that the parent has.
sys.path.append(os.path.join(os.path.dirname(__file__), *[os.pardir] * 3, "packages/mindx_elastic"))
from mindx_elastic.torch_exception_module import exception_checkpoint

FOLDER = sys.argv[1]
RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
HALF = max(1, WORLD // 2)
GROUPS = [[first, first + HALF] for first in range(HALF)] if WORLD > 1 else None
if "ALONE" in os.environ:  # each rank has a part of its own, and waits for no other
    GROUPS = [[rank] for rank in range(WORLD)]
STEPS = int(os.environ.get("STEPS", "12"))
args = types.SimpleNamespace(rank=RANK, save_interval=5)


def get_args():
    return args


def get_checkpoint_names(checkpoints_path, iteration):
    """As in the document, with this script's folders."""
    args = get_args()
    common_path = os.path.join(checkpoints_path, f"iter_{iteration:07d}")
    fault_npus = exception_checkpoint._get_fault_npus()
    data_paral_size = len(exception_checkpoint._group_info)
    if str(args.rank) in fault_npus:
        for i in exception_checkpoint._group_info[int(args.rank) % data_paral_size]:
            if str(i) not in fault_npus:
                model_name = optim_name = os.path.join(common_path, f"model_optim_rng_{i}.pt")
                break
    else:
        model_name = optim_name = os.path.join(common_path, f"model_optim_rng_{args.rank}.pt")
    return model_name, optim_name


def save_checkpoint(iteration, model, optimizer):
    if os.environ.get("FAIL_SAVE") == str(RANK):
        raise OSError("no space is left for me")
    name, _ = get_checkpoint_names(FOLDER, iteration)
    os.makedirs(os.path.dirname(name), exist_ok=True)
    if "GATE" in os.environ:
        print("saving", flush=True)
        with open(os.environ["GATE"]) as gate:
            gate.read()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": iteration}
    torch.save(state, name)
    path = os.path.join(FOLDER, "latest_checkpointed_iteration.txt")
    with open(f"{path}.{RANK}", "w") as tracker:
        tracker.write(str(iteration))
    os.replace(f"{path}.{RANK}", path)


def load_checkpoint(model, optimizer):
    try:
        with open(os.path.join(FOLDER, "latest_checkpointed_iteration.txt")) as tracker:
            iteration = int(tracker.read())
    except FileNotFoundError:
        return 0
    if not exception_checkpoint.check_resumable_model():
        iteration = iteration // args.save_interval * args.save_interval
    if iteration == 0:
        return 0
    name, _ = get_checkpoint_names(FOLDER, iteration)
    state = torch.load(name)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    print("loaded", os.path.relpath(name, FOLDER), flush=True)
    assert state["step"] == iteration
    return iteration


def wait_before(iteration):
    while iteration == STEPS - 2 and not os.path.exists(os.environ["GO"]):
        time.sleep(0.01)


def main():
    torch.set_num_threads(1)
    group = None
    if WORLD > 1 and "ALONE" not in os.environ:
        dist.init_process_group("gloo")
        groups = [dist.new_group(one) for one in GROUPS]
        group = groups[RANK % HALF]
    torch.manual_seed(RANK % HALF)
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    options = {
        "partial_save": os.environ.get("PARTIAL") == "1",
        "group_info": GROUPS,
        "replicas": int(os.environ.get("REPLICAS", "1")),
    }
    iteration = load_checkpoint(model, optimizer)
    if "GROUPS_ONLY" in os.environ:
        return
    exception_checkpoint.set_config(save_checkpoint, (iteration, model, optimizer), **options)
    while iteration < STEPS:
        wait_before(iteration)
        torch.manual_seed(1000 * iteration + RANK)
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        if f"{RANK}@{iteration}" in os.environ.get("HANG", "").split():
            print("hangs", flush=True)
            time.sleep(1000)
        if os.environ.get("RAISE") == f"{RANK}@{iteration}":
            raise RuntimeError("injected")
        if group is not None:
            dist.all_reduce(torch.zeros(1))  # as tensor parallelism, which ties the halves together
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad, group=group)
        optimizer.step()
        iteration += 1
        if os.environ.get("HOW", "each") == "each":
            exception_checkpoint.set_config(
                save_checkpoint, (iteration, model, optimizer), **options
            )
        else:
            exception_checkpoint._args[1].note = iteration
        print("step", iteration, flush=True)
        if iteration % args.save_interval == 0 and os.environ.get("PERIODIC") == "1":
            with contextlib.suppress(OSError):
                save_checkpoint(iteration, model, optimizer)
        time.sleep(0.02)
    text = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    print("digest", hashlib.sha256(text).hexdigest()[:16], flush=True)
    assert not glob.glob(f"{FOLDER}/*.tmp")


main()
