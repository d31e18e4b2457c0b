"""Whether data that a DataLoader of torch draws come in the same order again after a fault.

`DataLoader(shuffle=True)` draws the order of a pass from a generator, when the pass begins. An
entry that goes on in the middle of a pass draws another one. Owns the warning of it, which comes
when steps are committed within such a pass: passes without a commit (a validation) begin anew in
any case.
"""

import logging
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import sampler

from taskd.worker.life import Life, current
from taskd.worker.objects.roles import tensors_in
from taskd.worker.state import passes

log = logging.getLogger(__name__)

_DRAWING = {
    kind.__iter__
    for kind in (sampler.RandomSampler, sampler.SubsetRandomSampler, sampler.WeightedRandomSampler)
}
_MARK = "_taskd_order"
_is_said = False


def install() -> None:
    """Look at the passes of torch's DataLoader."""
    passes.watch(_MARK, _begin, _follow)


def _begin(iterator: Any, loader: Any, draw: Callable[[], None]) -> None:
    version = _version_if_drawn(loader)
    draw()
    setattr(iterator, _MARK, version)


def _follow(iterator: Any, draw: Callable[[], object]) -> object:
    version = getattr(iterator, _MARK, None)
    if version is not None:
        _say_if_committed(iterator, version)
    return draw()


def _version_if_drawn(loader: Any) -> int | None:
    """The version at which a pass begins whose order no later entry would have again.

    None: it would, or that is nobody's concern. What is drawn before restore() is drawn from what
    the script has seeded, in each entry alike.
    """
    life = current()
    if (
        _is_said
        or life is None
        or life.world_rank
        or not life.interrupts.in_recoverable
        or not life.records.has_restored
        or threading.current_thread() is not threading.main_thread()
    ):
        return None
    generator = _generator_of(loader)
    if generator is None or (_is_registered(life, loader) and not _draws_anew(loader)):
        return None
    state = generator.get_state()
    if _is_just_seeded(life, generator, state) or is_kept(life, state):
        return None
    return life.records.version


def _generator_of(loader: Any) -> torch.Generator | None:
    """What the loader draws its order from. None: it draws none, as far as is known here."""
    found = _sampler_of(loader)
    module = sys.modules.get("torchdata.stateful_dataloader.sampler")
    drawing = _DRAWING if module is None else {*_DRAWING, module.RandomSampler.__iter__}
    if getattr(type(found), "__iter__", None) not in drawing:
        return None
    generator: torch.Generator | None = getattr(found, "generator", None)
    return torch.default_generator if generator is None else generator


def _sampler_of(loader: Any) -> Any:
    batches = getattr(loader, "batch_sampler", None)
    return (
        getattr(loader, "sampler", None) if batches is None else getattr(batches, "sampler", None)
    )


def _is_registered(life: Life, loader: Any) -> bool:
    """Whether a TrainState carries the loader, or what it is wrapped in."""
    carried = [
        value
        for holding in life.records.states.values()
        for value in holding.roles.positions.values()
    ]
    return any(
        value is loader or any(item is loader for item in getattr(value, "__dict__", {}).values())
        for value in carried
    )


def _draws_anew(loader: Any) -> bool:
    """Whether a loader of torchdata carries how far it is in an order, but not the order.

    It does with a sampler of torch, which knows nothing of that.
    """
    module = sys.modules.get("torchdata.stateful_dataloader")
    return (
        module is not None
        and isinstance(loader, module.StatefulDataLoader)
        and getattr(type(_sampler_of(loader)), "__iter__", None) in _DRAWING
    )


def _is_just_seeded(life: Life, generator: torch.Generator, state: torch.Tensor) -> bool:
    """Whether the order depends on a seed alone, which the script has set behind restore()."""
    is_global = generator is torch.default_generator
    if (
        is_global
        and life.records.random_at_restore is not None
        and torch.equal(state, life.records.random_at_restore)
    ):
        return False
    fresh = torch.Generator(generator.device).manual_seed(generator.initial_seed())
    return torch.equal(state, fresh.get_state())


def is_kept(life: Life, state: torch.Tensor) -> bool:
    """Whether the script keeps the generator as it is now, to begin the pass with it again."""
    return any(
        tensor.dtype == state.dtype and torch.equal(tensor, state)
        for holding in life.records.states.values()
        for tensor in tensors_in(holding.roles.values)
    )


def _say_if_committed(iterator: Any, version: int) -> None:
    global _is_said  # noqa: PLW0603
    life = current()
    if life is None or life.records.version == version:
        return
    setattr(iterator, _MARK, None)
    if not _is_said:
        _is_said = True
        log.warning(
            "rank %d: steps are committed within a pass of a DataLoader that draws its order "
            "from a generator: after a fault the order is drawn anew, so that samples come twice "
            "and others not at all. Take a DistributedSampler with set_epoch(state.epoch), or "
            "seed the generator before each pass by the epoch, or keep generator.get_state() of "
            "the beginning of the pass as a value of the TrainState, or give a "
            "StatefulDataLoader of torchdata to the TrainState",
            life.rank,
        )
