"""An interpreter that ends while another thread collects garbage that is torch's.

What torch has in C++ gives the interpreter's lock away while it is freed, and takes it again. Here
that is the wait in a store: it is over when the interpreter has begun to end, or after a second.
"""

from __future__ import annotations

import gc
import sys
import threading
import time
import types
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

_DEADLINE_S = 60


class _Last:
    """Freed when the interpreter has begun to end: lets the thread go on, and waits for its end."""

    def __init__(self, store: dist.Store, ended: threading.Event) -> None:
        self._store, self._ended, self._sleep = store, ended, time.sleep

    def __del__(self) -> None:
        if not self._ended.is_set():
            self._store.set("the end", "now")
            self._sleep(_DEADLINE_S)


def collect_late(thread_name: str) -> threading.Event:
    """The next thing that is made in that thread begins it. Returns the event that it has begun."""
    begun, ended, store = threading.Event(), threading.Event(), dist.HashStore()

    def collect(phase: str, _info: object) -> None:
        if phase == "start" and threading.current_thread().name == thread_name:
            gc.callbacks.clear()
            begun.set()
            with suppress(dist.DistStoreError):
                store.wait(["the end"], timedelta(seconds=1))
            ended.set()

    # The variables of a module are freed with it, unless a thread is in one of its functions.
    module = sys.modules["late garbage"] = types.ModuleType("late garbage")
    module.last = _Last(store, ended)  # type: ignore[attr-defined]
    gc.callbacks.append(collect)
    gc.set_threshold(1)
    return begun
