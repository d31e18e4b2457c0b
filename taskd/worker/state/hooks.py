"""The hooks by which the steps of a TrainState are followed: on its modules and its optimizers.

Owns where they hang. What happens there is `taskd.worker.state.step`. A process without a life, as
a data loader's is, has hooks that do nothing.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from taskd.native.black_box import Phase
from taskd.worker.life import current
from taskd.worker.objects.shards import is_distributed
from taskd.worker.state import closures
from taskd.worker.state.step import begin_update, capture_pending

if TYPE_CHECKING:
    from collections.abc import Callable

    from taskd.worker.life import Life
    from taskd.worker.state.holding import Holding


def attach(holding: Holding) -> None:
    """Hook the objects: a forward pass ends, an optimizer begins. `Holding.detach` ends it."""
    for module in holding.roles.modules.values():
        end = _ForwardEnd(holding)
        if not isinstance(module, torch.jit.ScriptModule):  # which takes none
            holding.removers += [
                module.register_forward_pre_hook(_ForwardBegin(holding)).remove,
                module.register_forward_hook(end).remove,
            ]
        holding.removers += _follow_backward(module, holding, end)
    begin = functools.partial(_begin_step, holding)
    for optimizer in holding.roles.optimizers.values():
        holding.removers.append(optimizer.register_step_pre_hook(begin).remove)
    for stepper in holding.roles.steppers.values():
        holding.removers.append(_wrap_step(stepper, holding))


def _begin_step(holding: Holding, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
    """An optimizer is called.

    With a closure it writes behind that, and this copy is whole until then.
    """
    life = current()
    if life is None:
        return None
    closure = closures.find(args, kwargs)
    is_known = closure is not None and closures.is_known(optimizer)
    # Where the state is sharded all ranks vote at the same place: there it is not tried out when an
    # optimizer writes.
    if (
        closure is None
        or life.interrupts.is_held
        or life.records.is_half_way
        or (life.records.is_sharded and not is_known)
    ):
        begin_update(life, holding)
        return None
    if is_known:
        life.interrupts.is_held = True
        holding.is_half_way = True
    else:
        begin_update(life, holding)
    return closures.replaced(
        args, kwargs, closures.Closure(closure, holding, closures.Unwritten(optimizer))
    )


class _Hook:
    """Of a registered module.

    A class of its own so that a copied or pickled model does not drag the TrainState along.
    """

    def __init__(self, holding: Holding | None = None) -> None:
        self._holding = holding

    def _life(self) -> Life | None:
        return None if self._holding is None or torch.compiler.is_compiling() else current()

    def __deepcopy__(self, _memo: dict[int, Any]) -> _Hook:
        return type(self)()

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), ())


class _ForwardBegin(_Hook):
    """Forward pass, or evaluation."""

    def __call__(self, module: torch.nn.Module, _inputs: Any) -> None:
        life = self._life()
        if (
            life is not None and not life.interrupts.is_held
        ):  # a closure of the optimizer may run the model again
            life.mark(Phase.FORWARD if _trains(module) else Phase.EVALUATION)


class _ForwardEnd(_Hook):
    """What comes next is the loss, and the backward pass."""

    seen: int | None = None  # the version whose step it was called in last

    def __call__(self, module: torch.nn.Module, _inputs: Any, _output: Any) -> None:
        life = self._life()
        if life is None or self._holding is None or not _trains(module):
            return
        self.seen = _next_version(life)
        capture_pending(life, self._holding, is_forward=True)
        if not life.interrupts.is_held:
            life.mark(Phase.BACKWARD)


def _follow_backward(
    module: torch.nn.Module, holding: Holding, end: _ForwardEnd
) -> list[Callable[[], None]]:
    """Of a compiled module nothing is seen of the forward pass: its first gradient tells its end.

    Nor of a scripted one.

    That of one parameter, which comes once in each backward pass (of several micro-batches the last
    counts), before all gradients can have reached the other ranks. `end`: tells, where it is
    called, what is nearer to the end. Returns what undoes it.
    """
    trained = [one for one in module.parameters() if one.requires_grad]
    if not trained or is_distributed(trained[-1]):
        return []
    life = current()

    def capture(_: torch.Tensor) -> None:
        if life is None or life is not current() or torch.compiler.is_compiling():
            return
        if end.seen != _next_version(life):
            capture_pending(life, holding, is_forward=True)

    return [trained[-1].register_post_accumulate_grad_hook(capture).remove]


def _next_version(life: Life) -> int:
    """That of the present step."""
    return (life.records.version or 0) + 1


def _trains(module: torch.nn.Module) -> bool:
    return module.training and torch.is_grad_enabled()


def _wrap_step(stepper: Any, holding: Holding) -> Callable[[], None]:
    """Begin an update at each `stepper.step()`. Returns what undoes it."""
    had_own = "step" in vars(stepper)
    original = stepper.step

    @functools.wraps(original)
    def step(*args: Any, **kwargs: Any) -> Any:
        life = current()
        if life is not None:
            begin_update(life, holding)
        return original(*args, **kwargs)

    stepper.step = step

    def undo() -> None:
        if had_own:
            stepper.step = original
        else:
            del stepper.step

    return undo
