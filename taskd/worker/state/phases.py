"""Marks what the main thread does outside the training step proper.

Waiting for data, saving and loading files.

Such work has limits of its own before a rank counts as hanging. torch is changed in a few places,
each a wrapper around the original: what a DataLoader's iterator does for the next batch,
`torch.save`, `torch.load` and the functions of `torch.distributed.checkpoint`. What is done in
another way can be said with `checkpointing` and `evaluating`.
"""

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from taskd.native.black_box import Phase
from taskd.worker import internals
from taskd.worker.life import current

_CHECKPOINT_FUNCTIONS = ("save", "load", "save_state_dict", "load_state_dict")


@contextmanager
def during(phase: Phase) -> Iterator[None]:
    """The main thread is in `phase`, and then again in the one before.

    In other threads, and outside a job: nothing.
    """
    life = current()
    box = None if life is None else life.box
    if (
        life is None
        or box is None
        or threading.current_thread() is not threading.main_thread()
        or box.marked_phase is phase
    ):
        yield
        return
    before = box.marked_phase
    life.mark(phase)
    try:
        yield
    finally:
        if box.marked_phase is phase:  # else it was interrupted, or a step went by
            life.mark(before)


def renew(phase: Phase) -> None:
    """The main thread is in `phase` still, and goes on there: its limit begins anew."""
    life = current()
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and life is not None and life.box is not None and life.box.marked_phase is phase:
        life.mark(phase)


@contextmanager
def checkpointing() -> Iterator[None]:
    """The block writes or reads a checkpoint: it may take long, and is no hang.

    `torch.save`, `torch.load` and `torch.distributed.checkpoint` say so by themselves. Outside a
    taskd job, and in threads other than the main one, it does nothing.
    """
    with during(Phase.CHECKPOINT):
        yield


@contextmanager
def evaluating() -> Iterator[None]:
    """The block evaluates, or does something else that is no part of a step.

    It may take long, and is no hang.

    A forward pass of a registered module that does not train (`eval()`, `no_grad()`) says so by
    itself.
    """
    with during(Phase.EVALUATION):
        yield


def install() -> None:
    """Put the wrappers into torch."""
    import torch  # noqa: PLC0415
    from torch.distributed import checkpoint  # noqa: PLC0415
    from torch.utils.data import dataloader  # noqa: PLC0415

    kind = getattr(dataloader, "_BaseDataLoaderIter", None)
    if internals.has("the iterators of a DataLoader", (kind, "__next__")):
        _wrap(kind, "__next__", Phase.DATA)
    for name in ("save", "load"):
        _wrap(torch, name, Phase.CHECKPOINT)
    for name in _CHECKPOINT_FUNCTIONS:
        if hasattr(checkpoint, name):
            _wrap(checkpoint, name, Phase.CHECKPOINT)


def _wrap(owner: Any, name: str, phase: Phase) -> None:
    original: Callable[..., Any] = getattr(owner, name)
    if getattr(original, "_taskd_phase", None) is not None:
        return

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        with during(phase):
            return original(*args, **kwargs)

    wrapper._taskd_phase = phase  # type: ignore[attr-defined]
    setattr(owner, name, wrapper)
