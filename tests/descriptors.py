"""A process that has no free descriptor, or whose garbage has some, for tests."""

from __future__ import annotations

import contextlib
import gc
import os
import resource
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def none_free(*, but: int = 0) -> Iterator[None]:
    """Within, this process can open nothing, or so many files; what is open can be used."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    gc.collect()  # what other tests have left must not be closed within: that frees descriptors
    gc.disable()
    lowest_free = os.dup(2)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free + but, hard))
    try:
        if not but:
            with pytest.raises(OSError, match="Too many open files"):
                os.dup(2)
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        gc.enable()


def one_in_garbage() -> int:
    """It is closed by the next full collection, which does not come by itself any more."""
    gc.disable()
    return _Left().number


class _Left:
    """Garbage from the start, for it refers to itself."""

    def __init__(self) -> None:
        self.number = os.open(os.devnull, os.O_RDONLY)
        self._self = self

    def __del__(self) -> None:
        os.close(self.number)
