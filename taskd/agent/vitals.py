"""How far each worker of this node has come: its black box, and what the kernel says of a worker that stands still.

Owns the looking, not the judgement (`taskd.core.progress`). A worker that goes on costs a few words of memory per look; only one
that stands is looked up in /proc.

A process that was itself not running must not take others for hanging: when two looks are further apart than they should be, all
durations count from the later one.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from taskd.core import marks
from taskd.core.marks import GroupMark, Mark
from taskd.native.black_box import Phase
from taskd.native.collectives import Collectives

if TYPE_CHECKING:
    from collections.abc import Mapping

    from taskd.native.black_box import BlackBox

STANDING_S = 0.75          # for longer than this without a mark: look closer, and more often
_ACTIVE_SHARE = 0.05       # of the time on a processor: more is no sleep
_MEASURED_S = 0.45         # activity is what happened since a look at least so long ago
_SLEPT_S = 1.0             # a look that comes so much too late: we did not run ourselves
_GROUPS_SHOWN = 8
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


class Watched(Protocol):
    """What is needed of a worker."""

    @property
    def incarnation(self) -> int:
        """Which life of its rank."""

    @property
    def pid(self) -> int | None:
        """None until it has been started."""

    @property
    def box(self) -> BlackBox:
        """Its black box."""


@dataclass(frozen=True)
class Activity:
    """What a process and everything in its process group has used up so far."""

    looked_at: float
    main_s: float          # processor time of the main thread
    others_s: float        # of the other processes of the group
    io_bytes: int          # read and written by the process


class Vitals:
    """One per agent. `look` is called about once a second, and more often while `is_somebody_standing`."""

    def __init__(self) -> None:
        self.is_somebody_standing = False
        self._not_before = 0.0                       # we did not run before this moment
        self._due_at: float | None = None
        # Of (rank, incarnation): what to compare with, and what is known.
        self._activity: dict[tuple[int, int], tuple[Activity, str]] = {}

    def look(self, now: float, next_look_s: float, workers: Mapping[int, Watched]) -> tuple[Mark, ...]:
        """The marks of all workers at the monotonic time `now`. The next look is to come in `next_look_s`."""
        if self._due_at is None or now - self._due_at > _SLEPT_S:
            self._not_before = now
        self._due_at = now + next_look_s
        found = tuple(self._mark(now, rank, worker) for rank, worker in sorted(workers.items()))
        lives = {(mark.rank, mark.incarnation) for mark in found}
        self._activity = {life: activity for life, activity in self._activity.items() if life in lives}
        self.is_somebody_standing = any(max(mark.still_s, mark.frozen_s) > STANDING_S for mark in found)
        return found

    def sees_standing(self, now: float, workers: Mapping[int, Watched]) -> bool:
        """Whether a worker stands by now: a few words of memory, for between two looks."""
        return any(
            max(self._since(now, worker.box.progress_at), self._since(now, worker.box.alive_at)) > STANDING_S
            for worker in workers.values()
        )

    def _mark(self, now: float, rank: int, worker: Watched) -> Mark:
        box = worker.box
        still_s = self._since(now, box.progress_at)
        frozen_s = self._since(now, box.alive_at)
        is_standing = max(still_s, frozen_s) > STANDING_S
        life = (rank, worker.incarnation)
        if not is_standing:
            self._activity.pop(life, None)
        return Mark(
            rank, worker.incarnation, box.generation, box.version, box.phase.name.lower(), still_s, frozen_s,
            self._since(now, box.python_at), self._look_closer(now, life, worker) if is_standing else marks.UNKNOWN,
            box.is_waiting, box.slowest_step_s, box.slowest_long_s(Phase.CHECKPOINT), box.slowest_long_s(Phase.EVALUATION),
            self._groups(box, is_standing=is_standing), tuple((name, count, seconds) for name, (count, seconds) in box.phase_times().items()),
        )

    def _since(self, now: float, moment: float | None) -> float:
        return 0.0 if moment is None else max(0.0, now - max(moment, self._not_before))

    def _groups(self, box: BlackBox, *, is_standing: bool) -> tuple[GroupMark, ...]:
        """The communicators that the other ranks know, too; what was begun last in them only when somebody may ask."""
        collectives = Collectives(box)
        known = [group for group in collectives.communicators() if group.is_comparable]
        operations = {
            call.communicator: call.name for call in collectives.calls() if call.number
        } if is_standing and known else {}
        newest = sorted(known, key=lambda group: group.entered_at or 0.0)[-_GROUPS_SHOWN:]
        return tuple(
            GroupMark(group.id, group.name, max(0, group.entered), max(0, group.left), operations.get(group.id, ""))
            for group in newest
        )

    def _look_closer(self, now: float, life: tuple[int, int], worker: Watched) -> str:
        """What the kernel says of a worker that stands."""
        pid = worker.pid
        try:
            if pid is None:
                return marks.UNKNOWN
            state, tracer = _state(pid)
            activity = _activity(now, pid)
        except (OSError, ValueError, LookupError):       # it has just ended, or /proc is not what it should be
            return marks.UNKNOWN
        if tracer:
            return marks.TRACED
        return marks.STOPPED if state in "Tt" else self._compare(life, state, activity)

    def _compare(self, life: tuple[int, int], state: str, activity: Activity) -> str:
        """What it has done since it was first seen to stand, or since it was last seen to do something."""
        earlier, known = self._activity.setdefault(life, (activity, marks.UNKNOWN))
        elapsed_s = activity.looked_at - earlier.looked_at
        if elapsed_s < _MEASURED_S:
            return known
        if activity.main_s - earlier.main_s > _ACTIVE_SHARE * elapsed_s or activity.others_s - earlier.others_s > _TICK_S \
                or activity.io_bytes > earlier.io_bytes:
            self._activity[life] = (activity, marks.BUSY)        # and is it still?
            return marks.BUSY
        return marks.DISK if state == "D" else marks.ASLEEP


def _state(pid: int) -> tuple[str, int]:
    """State letter of the main thread, and who traces the process (0: nobody). See proc(5)."""
    with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as file:
        lines = dict(line.split(":", 1) for line in file if ":" in line)
    return lines["State"].strip()[0], int(lines["TracerPid"])


def _activity(now: float, pid: int) -> Activity:
    with open(f"/proc/{pid}/task/{pid}/schedstat", encoding="ascii") as file:
        main_s = int(file.read().split()[0]) / 1e9
    io_bytes = 0
    try:
        with open(f"/proc/{pid}/io", encoding="ascii") as file:
            counters = dict(line.split(": ") for line in file)
        io_bytes = int(counters["rchar"]) + int(counters["wchar"])
    except (OSError, ValueError, KeyError):      # not accounted for in this kernel, or not ours to see
        pass
    return Activity(now, main_s, _others_s(pid), io_bytes)


def _others_s(leader: int) -> float:
    """Processor time of the other processes in the group of `leader`: data loaders, a copy to remote storage."""
    ticks = 0
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == leader:
            continue
        try:
            with open(f"/proc/{entry}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == leader:             # field 5 of proc(5), pgrp
            ticks += int(fields[11]) + int(fields[12])
    return ticks * _TICK_S
