"""The training state of a MindSpore script, across faults and ends of the job.

    import taskd.mindspore

    state = taskd.mindspore.TrainState(network, optimizer, dataset=dataset)
    state.restore()
    model.train(epochs, dataset, callbacks=[state.callback()], initial_epoch=state.epoch)

Importing this needs no MindSpore; `TrainState` does. torch is not needed at all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from taskd.mindspore.train_state import TrainState as TrainState

__all__ = ["TrainState"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from taskd.extras import require_mindspore  # noqa: PLC0415

    require_mindspore()
    from taskd.mindspore import train_state  # noqa: PLC0415

    return train_state.TrainState
