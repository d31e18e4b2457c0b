"""The functions that a script has registered, and how they are called.

A handler that is called in a recovery has a limit of time: other ranks wait for it, in a collective
of the same handler perhaps, so that all are late at once. Whose fault it is shows when all are
called: the process of one that does not come is replaced as any other that dies.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import threading
from typing import TYPE_CHECKING, Any

from mindio_ttp import settings
from mindio_ttp.arguments import function

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

log = logging.getLogger(__name__)


class Handlers:
    """One per process: by name, with the context that was given with it."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[Callable[..., Any], Any]] = {}
        self._armed: list[threading.Lock] = []  # of handlers that are watched; taken: they run
        self.on_overdue: Callable[[str], None] | None = None  # who is told of one that is late

    def register(self, name: str, func: object, ctx: Any) -> None:
        """Take `func` in; a later one takes the place of an earlier.

        Raises:
            TypeError: it cannot be called.
        """
        self._known[name] = function(f"the {name} handler", func), ctx

    def has(self, name: str) -> bool:
        """Whether there is one."""
        return name in self._known

    def context(self, name: str) -> Any:
        """What was given with it."""
        return self._known[name][1]

    def call(self, name: str, *arguments: Any, limit_s: float | None = None) -> Any:
        """Call the handler; None if there is none.

        `limit_s`: after so many seconds it is told of, and all ranks leave what they are in; after
        as many again the process ends.

        Raises: what the handler raises.
        """
        if name not in self._known:
            return None
        func, _ = self._known[name]
        if limit_s is None:
            return func(*arguments)
        with self._limited(name, limit_s):
            return func(*arguments)

    def call_limited(self, name: str, *arguments: Any) -> Any:
        """The same, within TTP_NORMAL_ACTION_TIME_LIMIT."""
        return self.call(name, *arguments, limit_s=settings.action_limit_s())

    def disarm(self) -> None:
        """No handler is running that anybody waits for: whatever watches one ends."""
        while self._armed:
            lock = self._armed[-1]
            if lock.locked():
                lock.release()
            self._armed.pop()

    @contextlib.contextmanager
    def _limited(self, name: str, limit_s: float) -> Iterator[None]:
        # A lock and not an Event: an interrupt can come between any two lines of Python, also of
        # those of an Event. What it leaves undone, `disarm` does when the entry has been left.
        is_over = threading.Lock()
        is_over.acquire()
        thread = threading.Thread(
            target=self._watch, args=(name, limit_s, is_over), name=f"mindio-{name}", daemon=True
        )
        try:
            self._armed.append(is_over)
            thread.start()
            yield
        finally:
            self.disarm()
        thread.join()

    def _watch(self, name: str, limit_s: float, is_over: threading.Lock) -> None:
        """Tell of it first, so that those are called who only wait for it; whoever comes lives on.

        The manager ends the process of one that does not come. If it has not, we do.
        """
        if is_over.acquire(timeout=limit_s):
            return
        detail = (
            f"the {name} handler has not returned after {limit_s:g} s "
            "(TTP_NORMAL_ACTION_TIME_LIMIT)"
        )
        log.error("%s; what this process (pid %d) is doing follows", detail, os.getpid())
        faulthandler.dump_traceback(all_threads=True)
        if self.on_overdue is not None:
            self.on_overdue(detail)
        if is_over.acquire(timeout=limit_s):
            return
        log.error("%s, and cannot be called: this process (pid %d) ends", detail, os.getpid())
        os._exit(1)
