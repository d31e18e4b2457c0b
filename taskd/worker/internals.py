"""What the worker uses of torch beyond what torch documents, and what is lost without it.

Another release of torch may have renamed any of it. Each use asks `has` first, or calls `lose` when
it fails, and goes another way then: training goes on, and one warning in each process says what is
lost. Knows no torch: callers say where they look.
"""

import logging
import sys
from collections.abc import Callable
from typing import Any

log = logging.getLogger(__name__)

# Each use, and what is lost without it.
LOST = {
    "the buckets of DDP": "the first step after a recovery may round differently",
    "the creation of process groups": (
        "a rank that waits in a collective cannot leave it when another dies, and is replaced"
    ),
    "the connection to the store": (
        "a rank that connects to the store of a host that dies meanwhile is replaced"
    ),
    "the backends of process groups": (
        "a rank that waits in a collective on a device cannot leave it when another dies, and is "
        "replaced"
    ),
    "the numbers of process groups": ("a death while groups are created may restart all processes"),
    "the modes of a thread": (
        "an interrupt in the middle of no_grad(), autocast() or the like may leave it switched on"
    ),
    "the hooks of saved tensors": (
        "an interrupt at the beginning of saved_tensors_hooks() may leave its hooks in place"
    ),
    "the parameter groups of FSDP2": (
        "a rank that a recovery interrupts loses its state, which comes from another copy, from "
        "node memory, or from the last checkpoint"
    ),
    "the units of FSDP1": "FullyShardedDataParallel cannot be in a TrainState",
    "the local tensor of a DTensor": "reading one waits for its collectives",
    "the place of a local tensor": "sharded state is not saved; recovery in place needs replicas",
    "the caches of DTensor": "each recovery leaves up to 1 MB of memory behind",
    "the iterators of a DataLoader": (
        "waiting for data counts as a part of the step for the hang limits, and nobody warns of "
        "DataLoader(shuffle=True)"
    ),
    "the flight recorder": (
        "a rank that hangs outside collectives of gloo is not told from those that wait for it in "
        "one, and profiles have no collectives of gloo"
    ),
    "the memory of torch's generator": "each commit takes 0.1 ms more",
    "whether an optimizer is complete": "one that is not is found at its first step only",
    "the copies of several tensors at once": "each commit takes longer if the model has buffers",
    "the buffers of batch norm": "those of one's own are known from the first commit on",
}
_said: set[str] = set()


def lose(what: str, why: object) -> None:
    """Say what is lost, the first time. `what` is a key of `LOST`."""
    if what in _said:
        return
    _said.add(what)
    log.warning(
        "torch %s does not let taskd see %s (%s): %s",
        getattr(sys.modules.get("torch"), "__version__", "(none)"),
        what,
        why,
        LOST[what],
    )


def has(what: str, *places: tuple[object, str]) -> bool:
    """Whether each owner has its attribute; else what is lost is said."""
    missing = [name for owner, name in places if not hasattr(owner, name)]
    if missing:
        lose(what, f"{', '.join(missing)} is not there")
    return not missing


def attempt(what: str, use: Callable[[], Any]) -> Any:
    """What `use` returns; None, and what is lost is said, if torch has not what it names."""
    try:
        return use()
    except (AttributeError, ImportError) as error:
        lose(what, error)
        return None
