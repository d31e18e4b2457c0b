"""Who is slow: the time that each rank spends in each phase of its steps, beside the others.

A rank that is slow in the forward pass, the optimizer or in waiting for data holds up all others,
which then wait for it in the backward pass: that phase and the commit say nothing about a rank, and
are left out. A slow rank is reported, with its slowdown, and never replaced.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from taskd.core.marks import Mark

WINDOW_S = 30.0  # long enough for a hundred steps or so of most jobs
MIN_VISITS = 10  # fewer tell nothing
SLOWDOWN = 1.5  # times the median of the others ...
MIN_SHARE = 0.05  # ... and so much of a step, or nobody would notice it
AGAIN_S = 600.0  # the same rank and phase are reported this often

OWN_PHASES = ("data", "forward", "optimizer", "step")


@dataclass(frozen=True, slots=True)
class Straggler:
    """A phase in which a rank is slow: seconds per step, its own and the median of the others."""

    rank: int
    phase: str
    own_s: float
    others_s: float

    @property
    def slowdown(self) -> float:
        """How many times slower."""
        return self.own_s / self.others_s if self.others_s > 0 else float("inf")


class Stragglers:
    """Compares windows of `WINDOW_S`."""

    def __init__(self) -> None:
        self._began_at: float | None = None
        self._before: dict[int, Mark] = {}
        self._now: dict[int, Mark] = {}
        self._reported: dict[tuple[int, str], float] = {}

    def note(self, now: float, marks: Iterable[Mark]) -> list[Straggler]:
        """An agent looked at its workers. Returns what is to be said at the end of a window."""
        for mark in marks:
            if mark.times:  # told now and then only
                self._now[mark.rank] = mark
        if self._began_at is None and not self._now:
            return []
        if self._began_at is None:
            self._began_at, self._before = now, dict(self._now)
            return []
        if now - self._began_at < WINDOW_S:
            return []
        found = [
            slow
            for slow in find(self._before, self._now)
            if now - self._reported.get((slow.rank, slow.phase), -AGAIN_S) >= AGAIN_S
        ]
        for slow in found:
            self._reported[slow.rank, slow.phase] = now
        self._began_at, self._before = now, dict(self._now)
        return found


def find(before: dict[int, Mark], after: dict[int, Mark]) -> list[Straggler]:
    """The slow ones between two marks of each rank.

    Ranks that were replaced in between are left out.
    """
    windows = {}
    for rank, mark in sorted(after.items()):
        first = before.get(rank, mark)
        is_same = (first.incarnation, first.generation) == (mark.incarnation, mark.generation)
        if is_same and (window := _window(first, mark)):
            windows[rank] = window
    found = []
    for phase in OWN_PHASES:
        per_step = {rank: window[phase] for rank, window in windows.items() if phase in window}
        in_order = sorted(per_step.values())
        for rank, own_s in per_step.items() if len(in_order) > 1 else ():
            others_s = median_without(in_order, own_s)
            if _is_slow(own_s, others_s, windows[rank]["whole"]):
                found.append(Straggler(rank, phase, own_s, others_s))
    return found


def median_without(in_order: Sequence[float], own: float) -> float:
    """The median of all but one that is `own`, of at least two. O(log n)."""
    left_out, count = bisect_left(in_order, own), len(in_order) - 1

    def at(index: int) -> float:
        return in_order[index if index < left_out else index + 1]

    return at(count // 2) if count % 2 else (at(count // 2 - 1) + at(count // 2)) / 2


def _is_slow(own_s: float, typical_s: float, step_s: float) -> bool:
    return own_s >= SLOWDOWN * typical_s and own_s - typical_s >= MIN_SHARE * step_s


def _window(before: Mark, after: Mark) -> dict[str, float]:
    """Seconds per step in each phase, and in all of them; empty if there were too few steps."""
    steps = (after.version or 0) - (before.version or 0)
    if steps < MIN_VISITS:
        return {}
    earlier = {name: seconds for name, _, seconds in before.times}
    spent = {name: (seconds - earlier.get(name, 0.0)) / steps for name, _, seconds in after.times}
    return {**spent, "whole": sum(spent.values())}
