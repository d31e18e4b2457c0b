"""Signal handlers of the script, while the main thread is in none of the script's functions.

Python runs them between any two instructions of the main thread, and some raise: torch's of SIGCHLD
when a process of a DataLoader has died, one of SIGALRM that bounds a call. That is meant for the
entry that is over, and may not end the wait for the next one, nor leave the state half parked. So
the handlers are called through others meanwhile, which drop an exception and say so. A mask of
signals would not do: other threads get them, and the handler runs in the main thread all the same.

SIGTERM and SIGINT, which are to end the process, stay as they are, and so do KeyboardInterrupt and
SystemExit of any handler.
"""

from __future__ import annotations

import logging
import signal
from typing import TYPE_CHECKING, Any

from taskd.worker.exceptions.text import describe

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger(__name__)

_LEFT_ALONE = frozenset({signal.SIGTERM, signal.SIGINT})


class Handlers:
    """One per run of a recoverable function. Main thread only."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._said: set[str] = set()

    def replace(self) -> None:
        """From here on no exception of theirs gets through, except from those left alone."""
        while not self._try_to_replace():
            pass

    def put_back(self) -> None:
        """The script's function is entered. Raises what a handler raises that is back."""
        for number in signal.valid_signals():
            handler = signal.getsignal(number)
            if isinstance(handler, _Instead):  # else the script has put in another
                signal.signal(number, handler.own)

    def _try_to_replace(self) -> bool:
        """False: a handler that was not replaced yet has raised."""
        try:
            for number in signal.valid_signals() - _LEFT_ALONE:
                own = signal.getsignal(number)
                if callable(own) and not isinstance(own, _Instead) and not _is_ours(own):
                    signal.signal(number, _Instead(own, self._say))
        except Exception as error:  # noqa: BLE001
            self._say(error)
            return False
        return True

    def _say(self, error: Exception) -> None:
        text = describe(error)
        if text in self._said:
            return
        self._said.add(text)
        log.warning(
            "rank %d: a signal handler of the script has raised between two entries of the "
            "recoverable function, and that is dropped: %s",
            self._rank,
            text,
        )


class _Instead:
    """Is called for a handler of the script."""

    def __init__(self, own: Callable[..., Any], say: Callable[[Exception], None]) -> None:
        self.own, self._say = own, say

    def __call__(self, number: int, frame: Any) -> None:
        try:
            self.own(number, frame)
        except Exception as error:  # noqa: BLE001
            self._say(error)


def _is_ours(handler: Callable[..., Any]) -> bool:
    return str(getattr(handler, "__module__", "")).startswith("taskd.worker.")
