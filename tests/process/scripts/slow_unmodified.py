"""Runs examples/unmodified.py, whose ranks stop for good in step 5. The example knows nothing."""

import runpy
import sys
import time

from torch.optim.optimizer import register_optimizer_step_pre_hook

from testbed.script import fact

steps = 0


def count(*_):
    global steps  # noqa: PLW0603
    steps += 1
    if steps == 5:
        fact("begun")
        time.sleep(100_000)


register_optimizer_step_pre_hook(count)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
