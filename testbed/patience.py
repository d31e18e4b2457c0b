"""A limit that does not count the time in which a job waited for a processor.

On a machine with more to do than processors, importing torch (5 s of processor time) takes a
minute. That is no fault of the job; one that hangs waits for something else, and the kernel tells
the two apart: the second number of /proc/PID/task/TID/schedstat (Linux,
Documentation/scheduler/sched-stats.rst) is the time that a thread was runnable and did not run.
"""

from __future__ import annotations

import contextlib
import pathlib
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator


_LOOK_S = 1.0  # at least, between two looks at the threads
_DELAY_S = 60.0  # no wait for a processor lasts longer, even at the lowest priority


class Patience:
    """So many seconds, of which those are not counted that a thread spent in the run queue.

    The thread that was delayed longest decides, of those that live when the limit is reached. The
    kernel counts a delay when it ends, so that the end of those under way is waited for.
    """

    def __init__(self, limit_s: float, processes: Callable[[], Collection[int]]) -> None:
        """`processes`: the pids of those that are waited for; asked now, and at the limit."""
        self._processes = processes
        self._start = time.monotonic()
        self._limit = self._until = self._start + limit_s
        self._before_s = _delays_s(processes())

    def left_s(self) -> float:
        """What is left of the limit; 0.0: it is reached."""
        now = time.monotonic()
        if now >= self._until:
            limit = self._limit + self.delayed_s()
            if limit <= now:
                return 0.0
            self._until = max(limit, now + _LOOK_S)
        return self._until - now

    def delayed_s(self) -> float:
        """How long a thread was runnable without a processor, since the begin."""
        _await_counts(self._processes())
        now_s = _delays_s(self._processes())
        return max((now_s[thread] - self._before_s.get(thread, 0.0) for thread in now_s), default=0)

    def __str__(self) -> str:
        """For the text of a failure."""
        passed_s, delayed_s = time.monotonic() - self._start, self.delayed_s()
        return f"{passed_s:.1f} s, of which a thread waited {delayed_s:.1f} s for a processor"


def _await_counts(pids: Collection[int]) -> None:
    """Until each thread that is runnable now has run since, or is so no more."""
    before = {task: counts for pid in pids for task, counts in _runnable(pid)}
    until = time.monotonic() + _DELAY_S
    while before and time.monotonic() < until:
        time.sleep(0.01)
        now = {task: counts for pid in pids for task, counts in _runnable(pid)}
        before = {task: counts for task, counts in before.items() if now.get(task) == counts}


def _runnable(pid: int) -> Iterator[tuple[str, str]]:
    """The threads of a process in state R, and their counts, which change when they run."""
    for task in _tasks(pid):
        with contextlib.suppress(OSError):
            counts = (task / "schedstat").read_text()
            if (task / "stat").read_text().rpartition(")")[2].split()[0] == "R":
                yield task.name, counts


def _delays_s(pids: Iterable[int]) -> dict[str, float]:
    """By thread: how long it has waited for a processor since it began."""
    found = {}
    for pid in pids:
        for task in _tasks(pid):
            with contextlib.suppress(OSError):
                found[task.name] = int((task / "schedstat").read_text().split()[1]) / 1e9
    return found


def _tasks(pid: int) -> list[pathlib.Path]:
    try:
        return list(pathlib.Path(f"/proc/{pid}/task").iterdir())
    except OSError:  # it has ended
        return []
