"""Two ranks, two groups, and what dump_group_info() writes of them."""

import os
import sys

import torch.distributed as dist

from taskd.python.adaptor.pytorch.group_info import dump_group_info

if "before" in sys.argv:
    dump_group_info()
dist.init_process_group("gloo")
dist.new_group([0], group_desc="alone")
dist.new_group([1, 0], group_desc="both")
dump_group_info()
dump_group_info()
dist.barrier()
print("went on", flush=True)
os._exit(0)
