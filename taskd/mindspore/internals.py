"""What of MindSpore is used beyond its documentation, and what is lost where it is not there.

`TESTED` is the version on which the tests run. Others are tried: each thing that is missing has
another way to go, which one line names.
"""

from __future__ import annotations

import logging
from typing import Any

import mindspore
import mindspore.dataset

log = logging.getLogger(__name__)

TESTED = "2.10.0"
_FIRST_STEP = "set_init_step"


def differences() -> list[str]:
    """What this MindSpore has not, and what that means; empty: nothing."""
    found = []
    if not hasattr(mindspore.Tensor, "data_ptr"):
        found.append("Tensor.data_ptr is missing: snapshots take 15 µs longer for each parameter")
    if not generator():
        found.append("default_generator is another: random numbers after a restart are others")
    if not hasattr(mindspore.dataset.Dataset, _FIRST_STEP):
        found.append(
            f"Dataset.{_FIRST_STEP} is missing: after a restart the data set begins anew, and "
            "samples come twice; in a loop of your own pass over the first "
            "TrainState.step_in_epoch batches"
        )
    return found


def say_differences() -> None:
    """One line, if this MindSpore is not the tested one and lacks something."""
    found = differences()
    if found:
        log.warning(
            "MindSpore %s differs from %s, with which TaskD is tested: %s",
            mindspore.__version__,
            TESTED,
            "; ".join(found),
        )


def framework() -> str:
    """Name and version, for manifests."""
    return f"mindspore {mindspore.__version__}"


def set_first_step(dataset: Any, step: int) -> None:
    """Let the data set begin behind so many steps, if it can."""
    set_it = getattr(dataset, _FIRST_STEP, None)
    if set_it is None:
        log.warning(
            "the data set begins anew, and not behind step %d: %s has no %s. Samples come twice",
            step,
            type(dataset).__name__,
            _FIRST_STEP,
        )
    else:
        set_it(step)


def has_live_views() -> bool:
    """Whether `asnumpy()` shows the memory that training writes."""
    is_cpu = mindspore.get_context("device_target") == "CPU"
    return is_cpu and hasattr(mindspore.Tensor, "data_ptr")


def generator() -> dict[str, Any]:
    """The state of MindSpore's own generator, two parameters; {}: it is not where it was."""
    found = getattr(mindspore, "default_generator", None)
    seed, offset = getattr(found, "_seed", None), getattr(found, "_offset", None)
    if not (isinstance(seed, mindspore.Tensor) and isinstance(offset, mindspore.Tensor)):
        return {}
    return {"taskd.random.seed": seed, "taskd.random.offset": offset}
