"""How far each worker of this node has come: what its agent tells of it with each heartbeat.

Owns the observation, not the judgement whether a worker hangs (`taskd.core.policy.hangs`). A worker
that makes progress costs a few words of its black box per look; only one that does not is looked
up in /proc.

A process that was itself not running must not take others for hanging: when two looks are further
apart than they should be, all durations count from the later one. In the same way the durations of
a worker that was stopped, or held by a debugger, begin again when it is let go.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from taskd.agent.vitals import activity as kernel
from taskd.core.marks import Activity, GroupMark, Mark
from taskd.log import SayOnce
from taskd.native.black_box import Phase
from taskd.native.collectives import Collectives

if TYPE_CHECKING:
    from collections.abc import Mapping

    from taskd.agent.workers.host import Worker
    from taskd.native.black_box import BlackBox

log = logging.getLogger(__name__)

STALLED_S = 0.75  # for longer than this without a mark: look closer ...
HURRY_S = 5.0  # ... and, up to this, more often: the shortest limits end within it
TIMES_EVERY_S = 10.0  # the time spent in each phase is told this often
_ACTIVE_SHARE = 0.05  # of the time on a processor: more is no sleep ...
_ACTIVE_S = 0.05  # ... nor is this much, however long ago the last look was
# the same of the other threads: those that only watch (ours, torch's) need some, too
_THREADS_SHARE = 0.25
_THREADS_BYTES = 4096  # ... and read a little: so much per second
# of the time a thread has run or waited for a processor: on a machine with too few of them that is
# work, too
_RUNNABLE_SHARE = 0.5
_MEASURED_S = 0.45  # activity is what happened since a look at least so long ago
_SLEPT_S = 1.0  # a look that comes so much too late: we did not run ourselves
_GROUPS_SHOWN = 8
_OUTSIDE_STEPS = frozenset(
    {Phase.BOOT, Phase.ENTERED, Phase.RETURNED, Phase.EXITING, Phase.PAUSED, Phase.UNKNOWN}
)


class Vitals:
    """One per agent. `look` is called about once a second, and more often while `is_urgent`."""

    def __init__(self) -> None:
        self.is_urgent = False  # somebody has stopped making progress lately
        self._times_at = 0.0
        self._not_before = 0.0  # we did not run before this moment
        self._due_at: float | None = None
        # as they are at this look, if that is wanted
        self._processes: kernel.Processes | None = None
        # Of (rank, incarnation): what to compare with, and what is known.
        self._activity: dict[tuple[int, int], tuple[kernel.Activity, str]] = {}
        # when it was last seen stopped or under a debugger
        self._held_at: dict[tuple[int, int], float] = {}
        self._damaged = SayOnce()

    def look(
        self, now: float, next_look_s: float, workers: Mapping[int, Worker]
    ) -> tuple[Mark, ...]:
        """The marks of all workers at the monotonic time `now`.

        The next look is to come in `next_look_s`.
        """
        if self._due_at is None or now - self._due_at > _SLEPT_S:
            self._not_before = now
        self._due_at = now + next_look_s
        self._processes = None
        with_times = now >= self._times_at
        if with_times:
            self._times_at = now + TIMES_EVERY_S
        found = tuple(
            self._mark(now, rank, worker, with_times=with_times)
            for rank, worker in sorted(workers.items())
        )
        lives = {(mark.rank, mark.incarnation) for mark in found}
        self._activity = {
            life: activity for life, activity in self._activity.items() if life in lives
        }
        self._held_at = {life: held_at for life, held_at in self._held_at.items() if life in lives}
        self.is_urgent = self.sees_no_progress(now, workers)
        return found

    def doubt(self, rank: int, incarnation: int, box: BlackBox) -> None:
        """Say once for each life if what its black box says cannot be true."""
        damage = box.damage
        if damage is not None and self._damaged.is_new(rank, incarnation):
            log.warning(
                "the black box of rank %d (incarnation %d) is damaged: %s cannot be. What "
                "makes no sense in it counts as not "
                "known; a program that overwrites memory of others is likely: look for one "
                "in this worker",
                rank,
                incarnation,
                damage,
            )

    def sees_no_progress(self, now: float, workers: Mapping[int, Worker]) -> bool:
        """Whether a worker has stopped making progress lately. Cheap enough for between looks."""
        return any(
            self._is_stalled(now, worker.box) and self._since(now, worker.box.progress_at) < HURRY_S
            for worker in workers.values()
        )

    def _is_stalled(self, now: float, box: BlackBox) -> bool:
        is_in_step = (
            box.phase not in _OUTSIDE_STEPS and self._since(now, box.progress_at) > STALLED_S
        )
        return is_in_step or self._since(now, box.alive_at) > STALLED_S

    def _mark(self, now: float, rank: int, worker: Worker, *, with_times: bool) -> Mark:
        box, life = worker.box, (rank, worker.incarnation)
        self.doubt(*life, box)
        is_stalled = self._is_stalled(now, box)
        activity, active_at = (
            self._look_closer(now, life, worker) if is_stalled else (Activity.UNKNOWN, 0.0)
        )
        if not is_stalled:
            self._activity.pop(life, None)
        if activity in (Activity.STOPPED, Activity.TRACED):
            self._held_at[life] = now
            from_s = 0.0
        else:
            from_s = self._held_at.get(life, 0.0)
        return Mark(
            rank,
            worker.incarnation,
            box.generation or 0,
            box.version,
            box.phase.name.lower(),
            self._since(now, box.progress_at, max(from_s, active_at)),
            self._since(now, box.alive_at, from_s),
            self._since(now, box.python_at, from_s),
            activity,
            box.is_waiting,
            box.slowest_step_s,
            box.slowest_long_s(Phase.CHECKPOINT),
            box.slowest_long_s(Phase.EVALUATION),
            self._groups(box) if is_stalled else (),
            tuple((name, count, seconds) for name, (count, seconds) in box.phase_times().items())
            if with_times
            else (),
        )

    def _since(self, now: float, moment: float | None, not_before: float = 0.0) -> float:
        return 0.0 if moment is None else max(0.0, now - max(moment, self._not_before, not_before))

    @staticmethod
    def _groups(box: BlackBox) -> tuple[GroupMark, ...]:
        """The communicators that the other ranks know, too, and what was begun last in them."""
        collectives = Collectives(box)
        known = [
            group
            for group in collectives.communicators()
            if group.is_comparable and group.entered > 0
        ]
        operations = (
            {call.communicator: call.name for call in collectives.calls() if call.number}
            if known
            else {}
        )
        newest = sorted(known, key=lambda group: group.entered_at or 0.0)[-_GROUPS_SHOWN:]
        return tuple(
            GroupMark(
                group.id,
                group.name,
                group.entered,
                max(0, group.left),
                operations.get(group.id, ""),
            )
            for group in newest
        )

    def _look_closer(self, now: float, life: tuple[int, int], worker: Worker) -> tuple[str, float]:
        """Kernel activity of a stalled worker, and when it was last active (0: unknown)."""
        pid = worker.pid
        try:
            if pid is None:
                return Activity.UNKNOWN, 0.0
            status = kernel.status_of(pid)
            self._processes = self._processes or kernel.Processes()
            activity = kernel.activity_of(now, pid, self._processes)
        # it has just ended, or /proc is not what it should be
        except (OSError, ValueError, LookupError):
            return Activity.UNKNOWN, 0.0
        if status.tracer or worker.box.is_debugged:
            return Activity.TRACED, 0.0
        if status.is_killed or self._processes.is_exiting(pid):
            return Activity.ENDING, 0.0
        if status.state in "Tt":
            return Activity.STOPPED, 0.0
        return self._compare(life, pid, activity)

    def _compare(
        self, life: tuple[int, int], pid: int, activity: kernel.Activity
    ) -> tuple[str, float]:
        """As `_look_closer`: what it has done since it stalled, or was last seen to be active."""
        earlier, known = self._activity.setdefault(life, (activity, Activity.UNKNOWN))
        elapsed_s = activity.looked_at - earlier.looked_at
        if elapsed_s < _MEASURED_S:
            return known, 0.0
        if (
            activity.main_s - earlier.main_s > min(_ACTIVE_S, _ACTIVE_SHARE * elapsed_s)
            or activity.main_io > earlier.main_io
            or activity.threads_io - earlier.threads_io > _THREADS_BYTES * elapsed_s
            or activity.others_s - earlier.others_s > kernel.TICK_S
            or activity.threads_s - earlier.threads_s > _THREADS_SHARE * elapsed_s
            or activity.longest_runnable_s(earlier) > _RUNNABLE_SHARE * elapsed_s
        ):
            self._activity[life] = (activity, Activity.BUSY)  # and is it still?
            return Activity.BUSY, 0.0
        if activity.is_blocked or kernel.waits_outside(pid):
            return Activity.DISK, 0.0
        return Activity.ASLEEP, earlier.looked_at if known == Activity.BUSY else 0.0
