"""A collective on a device that takes longer than torch lets one, and that nobody ends.

Torch's watchdog would end the process, and is told not to (`taskd.worker.process.device`). Hangs
are found by the manager; this is for those in which nobody can be told who hangs. The groups are
aborted then, so that the main thread raises and the step is retried. Runs in the runtime's thread.
"""

from __future__ import annotations

import logging
import sys
import threading
from typing import TYPE_CHECKING, Any

from taskd.native.black_box import Phase

if TYPE_CHECKING:
    from taskd.worker.life import Life
    from taskd.worker.process.groups import Groups

log = logging.getLogger(__name__)

# What the device does in these is the step's. In others a script may have it compute for hours.
_OF_A_STEP = frozenset({Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER, Phase.COMMIT})
# There a main thread counts that is in these: they wait for collectives, and for nothing else.
_WAITING = ("torch.distributed", "taskd.worker.state.buckets", "taskd.worker.restore.chunks")


class Overdue:
    """Follows the main thread of one process."""

    def __init__(self, life: Life, groups: Groups) -> None:
        self._life, self._groups = life, groups
        self._place: tuple[Any, int] | None = None
        # monotonic: since then it has been seen nowhere else, and never without work on the device
        self._since = 0.0

    def look(self, now: float, moved_at: float) -> None:
        """Abort the groups if it is time to. `moved_at`: of the last mark in the black box."""
        box = self._life.box
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        if box is None or frame is None:
            return
        place = (frame.f_code, frame.f_lasti)
        module = str(frame.f_globals.get("__name__", ""))
        opened = self._groups.opened
        may_wait = box.phase in _OF_A_STEP or module.startswith(_WAITING)
        if place != self._place or not may_wait or not opened.device_work.may_be_stuck():
            self._place, self._since = place, now
        stood_s = now - max(moved_at, self._since)
        if stood_s > opened.device_work.longest_s:
            log.error(
                "rank %d has made no progress for %.0f s, and the device waits: a collective is "
                "taken for lost, and the groups are aborted",
                self._life.rank,
                stood_s,
            )
            self._groups.abort(opened)
