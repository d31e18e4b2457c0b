"""The passes of torch's DataLoader, and of torchdata's: who is to hear of each beginning and batch.

Knows nothing of what is looked at there.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from torch.utils.data import dataloader

from taskd.worker import internals

if TYPE_CHECKING:
    from collections.abc import Callable

    Begin = Callable[[Any, Any, Callable[[], None]], None]
    Follow = Callable[[Any, Callable[[], object]], object]


def watch(mark: str, begin: Begin, follow: Follow) -> None:
    """From now on, in this process. Once for each `mark`.

    `begin(iterator, loader, draw)`: a pass begins by `draw`. `follow(iterator, draw)`: a batch is
    asked for, which is what `draw` returns.
    """
    kind = getattr(dataloader, "_BaseDataLoaderIter", None)
    if not internals.has("the iterators of a DataLoader", (kind, "__next__"), (kind, "_reset")):
        return
    assert kind is not None
    if getattr(kind.__init__, mark, False):
        return
    original_init, original_reset, original_next = kind.__init__, kind._reset, kind.__next__

    @functools.wraps(original_init)
    def init(self: Any, loader: Any, *args: Any, **kwargs: Any) -> None:
        begin(self, loader, lambda: original_init(self, loader, *args, **kwargs))

    @functools.wraps(original_reset)
    def reset(self: Any, loader: Any, first_iter: bool = False) -> None:
        if first_iter:
            original_reset(self, loader, first_iter)
        else:
            begin(self, loader, lambda: original_reset(self, loader, first_iter))

    @functools.wraps(original_next)
    def following(self: Any) -> Any:
        return follow(self, functools.partial(original_next, self))

    setattr(init, mark, True)
    kind.__init__, kind._reset, kind.__next__ = init, reset, following
