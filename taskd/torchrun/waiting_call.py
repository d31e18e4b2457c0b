"""One call that waits, in a thread of its own, while the main thread waits for something else too.

Owns the thread and the descriptor that tells of its end. A thread that nobody needs any more is
left alone: it may wait in code of torch that nothing can interrupt, and ends with the process.
"""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


class WaitingCall(Generic[T]):
    """See the module. `fd` is readable when the call has ended."""

    def __init__(self, name: str, call: Callable[[], T]) -> None:
        """Begins at once. `name`: of the thread."""
        self.fd = os.eventfd(0, os.EFD_CLOEXEC)
        self._call = call
        self._found: list[T] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def result(self) -> T:
        """Wait for the end of the call; signals are handled meanwhile. Raises what it raised."""
        self._thread.join()
        os.close(self.fd)
        if self._error is not None:
            raise self._error
        return self._found[0]

    def _run(self) -> None:
        try:
            self._found.append(self._call())
        except BaseException as error:  # noqa: BLE001 - told to whoever asks for the result
            self._error = error
        os.eventfd_write(self.fd, 1)
