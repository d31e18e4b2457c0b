"""How far a training of MindSpore has come, and whether its parameters are those of a whole step.

Between two steps they are. Within one, the step's result or the optimizer's counter tells: it
counts before it changes the first parameter, in program order, as do all optimizers of mindspore.nn
(`global_step`, a parameter of its own that is saved with the others).

Steps begin and end in the main thread. Another thread may ask meanwhile.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Position:
    """A whole step. `step` counts since the training began, `counter` is the optimizer's."""

    epoch: int
    step: int
    counter: int | None


class Progress:
    """One per call of model.train."""

    def __init__(self, params: Any) -> None:
        """`params`: the cb_params of MindSpore's call-backs."""
        self._params = params
        self._counter = _counter_of(params)
        self._first_step: int = params.get("cur_step_num") or 0
        self._first_count = self._count()
        # A step that overflows is not counted: then how far it has come must be looked at each
        # time. Without loss scaling it follows from the number of steps, and costs nothing.
        self._looks = _scales_loss(params)
        self._last = Position(params.get("cur_epoch_num") or 1, self._first_step, self._first_count)
        self._outputs: object = params.get("net_outputs")
        self._is_between = threading.Event()  # two steps; cleared while one is under way
        self._is_between.set()
        self._began_s = time.monotonic()
        self.longest_s = 0.0  # the first step compiles, and is not counted
        self.reason = ""  # why `position` was None
        self.is_changing = False  # `position` was None for a step that is under way

    def begin_step(self) -> None:
        """The network is about to be called."""
        self._is_between.clear()
        self._began_s = time.monotonic()

    def end_step(self) -> None:
        """The network has been called, and nothing is left to be done about this step."""
        is_first = self._last.step == self._first_step
        self._note()  # before the event: `is_unchanged` reads them the other way round
        self._is_between.set()
        if not is_first:
            self.longest_s = max(self.longest_s, time.monotonic() - self._began_s)

    def position(self) -> Position | None:
        """The last whole step, if the parameters are still those of it."""
        self.is_changing = False
        if self._is_in_step and self._params.get("net_outputs") is not self._outputs:
            self._note()  # the network has returned: what failed is a call-back behind it
            self._is_between.set()
        if self._last.step == self._first_step:
            self.reason = "no step has been completed since the training began"
            return None
        if self._is_in_step and not self.is_unchanged(self._last):
            self.is_changing = True
            self.reason = (
                f"step {self._last.step + 1} was under way, and the optimizer has begun to change "
                "the parameters"
                if self._counter is not None
                else f"step {self._last.step + 1} was under way, and no optimizer with a parameter "
                "global_step tells whether the parameters were changed"
            )
            return None
        return self._last

    def is_unchanged(self, position: Position) -> bool:
        """Whether the optimizer has done nothing since that step."""
        if not self._is_in_step:
            return position == self._last  # else a whole step has been completed since
        return self._counter is not None and self._count() == position.counter

    def wait_for_end(self, timeout_s: float) -> None:
        """Until no step is under way, at most that long. In another thread than the steps."""
        self._is_between.wait(timeout_s)

    @property
    def _is_in_step(self) -> bool:
        return not self._is_between.is_set()

    def _note(self) -> None:
        self._outputs = self._params.get("net_outputs")
        step: int = self._params.cur_step_num
        if self._looks or self._first_count is None:
            counter = self._count()
        else:
            counter = self._first_count + step - self._first_step
        self._last = Position(self._params.cur_epoch_num, step, counter)

    def _count(self) -> int | None:
        return None if self._counter is None else int(self._counter.asnumpy().ravel()[0])


def _counter_of(params: Any) -> Any:
    optimizer = params.get("optimizer") or getattr(params.train_network, "optimizer", None)
    counter = getattr(optimizer, "global_step", None)
    if counter is not None and hasattr(counter, "asnumpy"):
        return counter
    for parameter in params.train_network.get_parameters():
        if parameter.name.split(".")[-1] == "global_step":
            return parameter
    return None


def _scales_loss(params: Any) -> bool:
    network = params.train_network
    return (
        params.get("loss_scale_mananger") is not None  # MindSpore's spelling
        or getattr(network, "scale_sense", None) is not None
        or getattr(network, "loss_scaling_manager", None) is not None
    )
