"""Runs examples/unmodified.py and kills rank 1 at step 25, once.

The example itself knows nothing of it.
"""

import json
import os
import runpy
import signal
import sys

from torch.optim.optimizer import register_optimizer_step_pre_hook

marker = f"{os.environ['FACTS']}/fault-0"
steps = 0


def count(*_):
    global steps  # noqa: PLW0603
    steps += 1
    if steps == 25 and os.environ["RANK"] == "1" and not os.path.exists(marker):
        open(marker, "x").close()
        with open(f"{os.environ['FACTS']}/1.jsonl", "a") as out:
            out.write(json.dumps({"what": "fault", "time": 0, "pid": os.getpid()}) + "\n")
        os.kill(os.getpid(), signal.SIGKILL)


register_optimizer_step_pre_hook(count)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
