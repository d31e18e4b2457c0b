"""Hung workers that write down their stacks before they are killed.

Owns the requests that are under way. A worker does not go on behind its last words, even if it was
only stopped.
"""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

from taskd.core import events
from taskd.native import last_words

if TYPE_CHECKING:
    from collections.abc import Iterator

    from taskd.agent.workers.host import Host
    from taskd.clock import Clock
    from taskd.native.black_box import BlackBox

_LOOK_S = 0.005  # between two looks at a box to which stacks are being written


class Examinations:
    """See the module. `limit_s`: what is written by then counts, complete or not."""

    def __init__(self, host: Host, clock: Clock, limit_s: float) -> None:
        self._host = host
        self._clock = clock
        self._limit_s = limit_s
        # by rank and incarnation: its box, the number of the request, the deadline
        self._open: dict[tuple[int, int], tuple[BlackBox, int, float]] = {}

    @property
    def look_s(self) -> float | None:
        """Seconds until `read` is to be called; None: nothing is under way."""
        return _LOOK_S if self._open else None

    def begin(self, rank: int, incarnation: int) -> None:
        """Ask this life for its stacks; a life that is over, or has no libtaskd, is passed over."""
        worker = self._host.workers.get(rank)
        if worker is None or worker.incarnation != incarnation or worker.pid is None:
            return
        request = last_words.request(worker.pid, worker.box, stay=True)
        if request is not None:
            deadline = self._clock.now() + self._limit_s
            self._open[rank, incarnation] = (worker.box, request, deadline)
            self._host.signal(rank, incarnation, signal.SIGCONT)

    def read(self) -> Iterator[events.WorkerExamined]:
        """Stacks that are complete, or as far as they are when time is over."""
        now = self._clock.now()
        for life, (box, request, deadline) in list(self._open.items()):
            words = last_words.answer(box, request)
            if words is None and now < deadline:
                continue
            words = words or last_words.wait(box, request, now)
            del self._open[life]
            if words is not None:
                cause = f"examined:{life[0]}.{life[1]}"
                yield events.WorkerExamined(now, cause, *life, words.text())
