"""The MindSpore `Callback` that commits each step of `Model.train`."""

from __future__ import annotations

import logging
from typing import Any, Protocol

from mindspore.train import Callback

log = logging.getLogger(__name__)


class State(Protocol):
    """What is told of the steps: a TrainState."""

    @property
    def parameter_names(self) -> set[str]:
        """Of all parameters that are kept."""

    def commit(self, steps: int) -> None:
        """So many steps more are complete."""


class Commit(Callback):
    """Tells a TrainState what `Model.train` has done."""

    def __init__(self, state: State) -> None:
        super().__init__()
        self._state = state
        self._done = 0  # steps of this call of train()

    def on_train_begin(self, run_context: Any) -> None:
        """Training begins: whatever it changes has to be in the TrainState."""
        args = run_context.original_args()
        self._done = int(args.cur_step_num)
        trained = {parameter.name for parameter in args.train_network.get_parameters()}
        left_out = sorted(trained - self._state.parameter_names)
        if left_out:
            log.warning(
                "%d parameters of the network that is trained are not in the TrainState, and will "
                "not be restored: %s%s. Give TrainState the cells that have them",
                len(left_out),
                ", ".join(left_out[:4]),
                " ..." if len(left_out) > 4 else "",
            )

    def on_train_step_end(self, run_context: Any) -> None:
        """One step, or as many as were sunk into the device together."""
        done = int(run_context.original_args().cur_step_num)
        steps, self._done = done - self._done, done
        self._state.commit(steps)
