"""What torchrun executes a worker by, where it is to be bound to processors (`--numa-binding`).

Which processors they are is asked of torch, which looks at the devices of the node.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler


class _Asked(SubprocessHandler):
    """Torch's handler of a worker, which tells what it would have started."""

    prefix: tuple[str, ...] = ()

    def _popen(self, args: tuple[str, ...], env: dict[str, str]) -> Any:  # noqa: ARG002
        """From torch 2.10 on `numactl` stands before the interpreter.

        Torch 2.9 binds its own thread while it starts the worker, which inherits that.
        """
        self.prefix = tuple(args[: args.index(sys.executable)])
        self.processors = os.sched_getaffinity(0)


def prefix_of(local_rank: int, options: Any) -> tuple[str, ...]:
    """The words before the interpreter in the command line of this worker.

    `options`: torch's NumaOptions, None: it is not to be bound. Raises what torch raises if it
    cannot be.
    """
    if options is None:
        return ()
    own = os.sched_getaffinity(0)
    asked = _Asked(sys.executable, (), {}, None, None, local_rank, options)
    if asked.prefix or asked.processors == own:
        return asked.prefix
    return ("taskset", "-c", ",".join(map(str, sorted(asked.processors))))
