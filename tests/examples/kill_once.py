"""Runs an example, kills one rank at one optimizer step, once, and tells the final weights to the last bit.

    kill_once.py MARKER RANK STEP script [arguments]

The example itself knows nothing of it. MARKER is the file that remembers that the kill has happened; STEP 0: no kill.
"""

import hashlib
import itertools
import os
import pathlib
import runpy
import signal
import sys

import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook

marker, rank, step = pathlib.Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
sys.argv = sys.argv[4:]
steps_begun = itertools.count(1)


def count(*_: object) -> None:
    """Before each optimizer step."""
    if next(steps_begun) == step and os.environ["RANK"] == rank and not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)


register_optimizer_step_pre_hook(count)
names = runpy.run_path(sys.argv[0], run_name="__main__")
model = names.get("trained", names.get("model"))
if model is not None:
    data = b"".join(tensor.detach().numpy().tobytes() for tensor in model.state_dict().values())
    # One write: print() would write the line's end on its own, and the ranks share the output.
    sys.stdout.write(f"rank {os.environ['RANK']}: weights {hashlib.sha256(data).hexdigest()[:16]}\n")
if dist.is_initialized():
    dist.barrier()
if step == 0:
    # Under plain torchrun an interpreter that ends now may be aborted: a thread of gloo asks for the GIL once more (torch 2.13).
    sys.stdout.flush()
    os._exit(0)
