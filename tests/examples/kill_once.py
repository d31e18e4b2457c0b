"""Runs an example, kills one rank at one place, once, and tells the final weights to the last bit.

    kill_once.py MARKER RANK PLACE NUMBER script [arguments]

The example itself knows nothing of it. PLACE: "optimizer", the beginning of an optimizer step, or
"forward", that of a forward pass of DistributedDataParallel. NUMBER: the how manieth of this
process; 0: none. There every rank tells its weights, and RANK dies unless MARKER is there: the file
that remembers that it has happened. With a path in HOLD it does not die but waits until that file
is there.
"""

import collections
import hashlib
import os
import pathlib
import runpy
import signal
import sys
import time

import torch.distributed as dist
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

marker, victim, wanted, number = (
    pathlib.Path(sys.argv[1]),
    sys.argv[2],
    sys.argv[3],
    int(sys.argv[4]),
)
sys.argv = sys.argv[5:]
# as if the example had been started itself
sys.path[0] = str(pathlib.Path(sys.argv[0]).resolve().parent)
rank = os.environ["RANK"]
counts = collections.Counter()


def tell(what, tensors):
    """One write: print() would write the line's end on its own, and the ranks share the output."""
    data = b"".join(tensor.detach().numpy().tobytes() for tensor in tensors)
    sys.stdout.write(f"rank {rank}: {what} {hashlib.sha256(data).hexdigest()[:16]}\n")
    sys.stdout.flush()


def here(place, parameters):
    counts[place] += 1
    if (place, counts[place]) != (wanted, number):
        return
    local = [getattr(parameter, "_local_tensor", parameter) for parameter in parameters]
    tell(f"{place} {number} begins with weights", local)
    if rank == victim and not marker.exists():
        marker.touch()
        if "HOLD" not in os.environ:
            os.kill(os.getpid(), signal.SIGKILL)
        while not pathlib.Path(os.environ["HOLD"]).exists():
            time.sleep(0.01)


def before_step(optimizer, *_):
    here(
        "optimizer",
        [parameter for group in optimizer.param_groups for parameter in group["params"]],
    )


def before_forward(module, _):
    if isinstance(module, DistributedDataParallel):
        here("forward", module.parameters())


register_optimizer_step_pre_hook(before_step)
register_module_forward_pre_hook(before_forward)
names = runpy.run_path(sys.argv[0], run_name="__main__")
model = names.get("trained", names.get("model"))
if model is not None:
    tell("weights", model.state_dict().values())
if dist.is_initialized():
    dist.barrier()
if os.environ.get("TASKD_PROCESS_ENABLE") != "on":
    # Under plain torchrun an interpreter that ends now may be aborted: a thread of gloo asks for
    # the GIL once more (torch 2.13).
    sys.stdout.flush()
    os._exit(0)
