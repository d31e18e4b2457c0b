"""Parameters and buffers that have stood still so far, of which no copy is kept.

Each commit sees whether one was written since the one before, so that a write that was committed is
never taken for one of an interrupted step:

    another object, its version counter    an assignment, an operation in place
    the address of its memory              `.data = ...`
    some words of it                       a write through `.data`, a kernel that counts nothing

What windows show of a device (`taskd.worker.objects.windows`) is kept at each commit, and compared
behind a few commits only and at parking, for the device has to be waited for; samples, which show
more and cost more, are as well. Begins at the first commit of an entry. Knows no roles.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch

from taskd.worker import internals
from taskd.worker.objects import memory
from taskd.worker.objects.windows import Windows, has_window

if TYPE_CHECKING:
    from collections.abc import Callable

    from taskd.worker.objects.memory import Kept

log = logging.getLogger(__name__)

# Called for hundreds of tensors in each commit: without a loop in Python.
_data_ptr: Callable[[torch.Tensor], int] = torch.Tensor.data_ptr


class Still:
    """Some of one TrainState in one entry."""

    def __init__(self) -> None:
        self.kept: list[Kept] = []
        # Where they hang, and the distributed ones themselves. First those (so many) whose memory
        # is where it was: for the others its address tells nothing.
        self._places: list[dict[str, Any]] = []
        self._keys: list[str] = []
        self._placed = 0
        self._distributed: list[Any] = []
        self._distributed_placed = 0
        self._versions: list[int] | None = None
        self._pointers: list[int] | None = None
        self._others: list[Kept] = []  # which are looked at one by one
        self._seen: list[Kept] = []  # those with a window
        self._windows: Windows | None = None
        # what they showed when they were opened, and at the last commit
        self._first: list[torch.Tensor] = []
        self._last: list[torch.Tensor] = []

    def hold(self, kept: list[Kept]) -> None:
        """At a commit: these are as they are, and noted (`Kept.note`)."""
        self.kept = kept
        self._others, plain, distributed = [], [], []
        for one in sorted(kept, key=lambda one: one.pointer is None):
            if one.version < 0 or not one.is_dict:
                self._others.append(one)
            elif not one.is_distributed:
                plain.append(one)
            elif one.is_parameter and internals.has(
                "the local tensor of a DTensor", (one.tensor, "_local_tensor")
            ):
                distributed.append(one)
            else:
                self._others.append(one)
        self._places, self._keys = [one.place for one in plain], [one.key for one in plain]
        self._distributed = [one.tensor for one in distributed]
        placed = [one for one in plain if one.pointer is not None]
        distributed_placed = [one for one in distributed if one.pointer is not None]
        self._placed, self._distributed_placed = len(placed), len(distributed_placed)
        self._versions, self._pointers = self._marks_now()
        self._open([] if self._pointers is None else [*placed, *distributed_placed])

    def _open(self, looked_at: list[Kept]) -> None:
        pairs = [(one, one.own(one.tensor)) for one in looked_at]
        pairs = [(one, own) for one, own in pairs if has_window(own)]
        self._seen, self._windows, self._first = [one for one, _ in pairs], None, []
        if pairs:
            try:
                self._windows = Windows([own for _, own in pairs])
                self._first = self._windows.read()
            except (RuntimeError, TypeError, ValueError):
                # samples alone tell then
                log.debug("torch does not take addresses of %s", pairs[0][1].device, exc_info=True)
                self._seen, self._windows = [], None
        self._last = self._first

    def _marks_now(self) -> tuple[list[int], list[int]] | tuple[None, None]:
        """Version counters and addresses. None: something else hangs there."""
        plain = list(map(dict.get, self._places, self._keys))
        distributed = self._distributed
        try:
            versions = [one._version for one in plain]  # type: ignore[union-attr]
            pointers = list(map(_data_ptr, plain[: self._placed]))  # type: ignore[arg-type]
            if distributed:
                versions += [one._version for one in distributed]
                placed = distributed[: self._distributed_placed]
                pointers += [_data_ptr(one._local_tensor) for one in placed]
        except (AttributeError, RuntimeError, TypeError):
            return None, None
        return versions, pointers

    # ------------------------------------------------------------ at a commit

    def take_written(self, *, is_due: bool) -> list[Kept]:
        """Those that were written since the last commit: they are no longer among these.

        `is_due`: a device may be waited for.
        """
        versions, pointers = self._marks_now()
        is_there = pointers == self._pointers is not None
        is_same = is_there and versions == self._versions
        if is_there and self._windows is not None:
            self._last = self._windows.read()
            is_same = is_same and self._windows.is_same(self._first, self._last)
        if is_same and not is_due and not any(one.is_written() for one in self._others):
            return []
        found = self._sort(is_there=is_there)
        if found or not is_there:
            gone = {id(one) for one in found}
            self.hold([one for one in self.kept if id(one) not in gone])
        return found

    def _sort(self, *, is_there: bool) -> list[Kept]:
        """Compare everything. Memory that moves about is no evidence: then the content counts."""
        shown = self._shown(self._first, self._last) if is_there else set()
        found: list[Kept] = []
        compared: list[Kept] = []
        for one in self.kept:
            (found if one.is_written() or id(one) in shown else compared).append(one)
        samples = [one.sample_now() for one in compared]
        differing = set(memory.changed([one.sample for one in compared], samples))
        for index, one in enumerate(compared):
            if index in differing:
                found.append(one)
            elif one.is_elsewhere():
                one.pointer = None
        return found

    def _shown(self, before: list[torch.Tensor], now: list[torch.Tensor]) -> set[int]:
        """Those (by id) whose windows show something else."""
        if self._windows is None:
            return set()
        return {id(self._seen[index]) for index in self._windows.changed(before, now)}

    # ------------------------------------------------------------ at parking

    def written(self) -> list[Kept]:
        """Those that were written since the last commit."""
        versions, pointers = self._marks_now()
        is_there = pointers == self._pointers is not None
        is_same = is_there and versions == self._versions
        written = {id(one) for one in (self._others if is_same else self.kept) if one.is_written()}
        committed: set[int] = set()
        if is_there and self._windows is not None:
            written |= self._shown(self._last, self._windows.read())
            committed = self._shown(self._first, self._last)
        samples = [one.sample_now() for one in self.kept]
        differing = memory.changed([one.sample for one in self.kept], samples)
        written |= {id(self.kept[index]) for index in differing} - committed
        return [one for one in self.kept if id(one) in written]
