"""Two ranks; rank 1 never joins the collective.

Rank 0 ends the waits of its gloo threads instead of waiting half an hour.
"""

import os
import sys
import threading
import time

import torch
import torch.distributed as dist

from taskd.worker.process.groups import Groups

rank, directory = int(sys.argv[1]), sys.argv[2]
groups = Groups(0, 0)
groups.install(lambda call: call())
dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=2)
other = dist.new_group([0, 1])
if rank == 0:
    work = dist.all_reduce(torch.ones(1000), async_op=True)
    ended = []

    def wait() -> None:
        try:
            work.wait()
        except RuntimeError as error:
            ended.append(str(error))

    waiter = threading.Thread(target=wait, daemon=True)
    waiter.start()
    default_threads = set(groups.opened.threads)
    deadline = time.monotonic() + 30
    while waiter.is_alive() and time.monotonic() < deadline:
        groups._waits.expire(sorted(default_threads))
        waiter.join(0.05)
    while not os.path.exists(f"{directory}/joined"):  # else its creation of groups would break
        time.sleep(0.01)
    print("available" if groups._waits.available else "unavailable", ended, flush=True)
    open(f"{directory}/done", "w").close()
else:
    open(f"{directory}/joined", "w").close()
    while not os.path.exists(f"{directory}/done"):
        time.sleep(0.01)
os._exit(0)
