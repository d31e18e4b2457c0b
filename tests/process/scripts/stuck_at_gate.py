"""train.py, in which rank 3 does not come back from giving its groups up (once).

It waits there without the interpreter lock, in the middle of a recovery: at the gate, and told to
go on. STUCK=stopped: SIGSTOP has come there.
"""

from __future__ import annotations

import os
import pathlib
import runpy
import signal
import time
from typing import Any

import torch.distributed as dist

from testbed.script import RANK, fact, is_first

_destroy = dist.destroy_process_group


def destroy_process_group(*args: Any, **named: Any) -> None:
    """As torch's, but for rank 3."""
    if RANK == 3 and is_first("stuck"):
        fact("fault", how="stuck at the gate")
        if os.environ.get("STUCK") == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(600)
    _destroy(*args, **named)


dist.destroy_process_group = destroy_process_group
runpy.run_path(str(pathlib.Path(__file__).with_name("train.py")), run_name="__main__")
