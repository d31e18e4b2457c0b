"""Keeps a torchrun job alive when a process dies. See README.md.

The names below load what they need when first used: importing this package loads neither torch nor
zmq, as processes that never train do it, too. Without torch only the errors can be used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from taskd.errors import ConfigError, Interrupted, StateError, TaskdError
    from taskd.worker.recoverable import recoverable
    from taskd.worker.state.elastic_sampler import ElasticSampler
    from taskd.worker.state.phases import checkpointing, evaluating
    from taskd.worker.train_state import TrainState

__version__ = "0.1.0"

__all__ = [
    "ConfigError", "ElasticSampler", "Interrupted", "StateError", "TaskdError", "TrainState",
    "__version__", "checkpointing", "evaluating", "recoverable",
]  # fmt: skip

_HOMES = {
    "ConfigError": "taskd.errors",
    "ElasticSampler": "taskd.worker.state.elastic_sampler",
    "Interrupted": "taskd.errors",
    "StateError": "taskd.errors",
    "TaskdError": "taskd.errors",
    "TrainState": "taskd.worker.train_state",
    "checkpointing": "taskd.worker.state.phases",
    "evaluating": "taskd.worker.state.phases",
    "recoverable": "taskd.worker.recoverable",
}


def __getattr__(name: str) -> Any:
    """Load a public name from its home on first use, and keep it."""
    home = _HOMES.get(name)
    if home is None:
        message = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(message)
    if home != "taskd.errors":
        import_module("taskd.extras").require_torch()
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
