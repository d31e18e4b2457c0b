"""Threads of taskd in a training process: they come to rest before its interpreter ends.

A thread other than the main one that takes the interpreter's lock once the interpreter has begun to
end is ended there, up to Python 3.13 by unwinding its stack (python/cpython issue 87135). Within a
destructor of C++ that is `std::terminate`: SIGABRT, for a process that has done its part. What
torch has in C++ gives the lock away and takes it again, also while it is freed, and any thread that
makes Python objects may be the one that collects what a script has left.
"""

import atexit
import logging
import threading
from collections.abc import Callable

from taskd.clock import MonotonicClock

log = logging.getLogger(__name__)

_LIMIT_S = 10.0  # an abort of groups on a device takes up to five

# Without a lock: a child that is forked meanwhile would have it for good.
_running: dict[threading.Thread, Callable[[], object] | None] = {}


def start_thread(
    name: str,
    target: Callable[..., object],
    *arguments: object,
    stop: Callable[[], object] | None = None,
) -> threading.Thread:
    """Start a daemon thread that is awaited, for 10 s at most, before the interpreter ends.

    `stop` is called first then: it makes `target` return soon. Without one, `target` is short.
    Raises RuntimeError: there is no room for another thread.
    """

    def run() -> None:
        try:
            target(*arguments)
        finally:
            _running.pop(thread, None)

    thread = threading.Thread(target=run, name=name, daemon=True)
    _running[thread] = stop
    try:
        thread.start()
    except RuntimeError:
        _running.pop(thread, None)
        raise
    return thread


# While this module is imported, before the script runs: what a script registers is called first,
# and these threads are at work meanwhile.
@atexit.register
def _await_all() -> None:
    clock = MonotonicClock()
    deadline = clock.now() + _LIMIT_S
    # a forked child has none of its parent's
    running = {thread: stop for thread, stop in _running.copy().items() if thread.is_alive()}
    for stop in filter(None, running.values()):
        stop()
    for thread in running:
        thread.join(max(0.0, deadline - clock.now()))
    if late := sorted(thread.name for thread in running if thread.is_alive()):
        log.warning(
            "the interpreter ends without %s, not at rest after %g s", ", ".join(late), _LIMIT_S
        )
