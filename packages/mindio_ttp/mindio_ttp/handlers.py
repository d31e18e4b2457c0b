"""The functions that a script has registered, and how they are called.

A handler that is called in a recovery has a limit of time: other ranks wait for it. One that does
not come back ends its process, which is replaced as any other that dies.
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

        `limit_s`: after so many seconds the process ends.

        Raises: what the handler raises.
        """
        if name not in self._known:
            return None
        func, _ = self._known[name]
        if limit_s is None:
            return func(*arguments)
        with _limited(name, limit_s):
            return func(*arguments)

    def call_limited(self, name: str, *arguments: Any) -> Any:
        """The same, within TTP_NORMAL_ACTION_TIME_LIMIT."""
        return self.call(name, *arguments, limit_s=settings.action_limit_s())


@contextlib.contextmanager
def _limited(name: str, limit_s: float) -> Iterator[None]:
    is_done = threading.Event()

    def watch() -> None:
        if is_done.wait(limit_s):
            return
        log.error(
            "the %s handler has not returned after %g s (TTP_NORMAL_ACTION_TIME_LIMIT): this "
            "process (pid %d) ends, to be replaced; what it was doing follows",
            name,
            limit_s,
            os.getpid(),
        )
        faulthandler.dump_traceback(all_threads=True)
        os._exit(1)

    thread = threading.Thread(target=watch, name=f"mindio-{name}", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_done.set()
        thread.join()
