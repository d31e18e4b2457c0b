"""A process that has no free descriptor, for tests."""

from __future__ import annotations

import contextlib
import gc
import os
import resource
from typing import TYPE_CHECKING

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
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        gc.enable()
