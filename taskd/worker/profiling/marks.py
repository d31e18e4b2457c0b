"""Marks of the main thread: what it touches while it is profiled, and what is to be marked."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from taskd.native.black_box import Phase

MAX_MARKS = 1 << 17  # that the disk is behind: about 12 MB of tuples, some 40 MB of lines


class Profile:
    """What the main thread touches. `dropped`: marks for which there was no room."""

    __slots__ = ("dropped", "marks")

    def __init__(self) -> None:
        self.marks: deque[tuple[int, Phase | None, int]] = deque()
        self.dropped = 0

    def mark(self, phase: Phase, now_ns: int) -> None:
        """The main thread begins something else."""
        if len(self.marks) < MAX_MARKS:
            self.marks.append((now_ns, phase, 0))
        else:
            self.dropped += 1

    def step(self, version: int) -> None:
        """A commit: one step ends, and the next one begins."""
        if len(self.marks) < MAX_MARKS:
            self.marks.append((time.monotonic_ns(), None, version))
        else:
            self.dropped += 1


@dataclass
class Switches:
    """What is profiled in this process. Written by the profiler's thread."""

    profile: Profile | None = None  # takes marks while the default domain is profiled
    wants_calls: bool = False  # the pulse writes gloo's calls to the black box
    limit_mb: int = 5000  # of the whole profiling folder
