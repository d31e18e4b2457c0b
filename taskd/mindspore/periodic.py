"""Checkpoints every n steps, written by a thread from this rank's snapshot while training goes on.

The first rank publishes when all have given their part. A checkpoint that could not be written
costs nothing but itself. Training never runs ahead of the disk: the next one waits for this one,
and so does the snapshot that would take its place.
"""

from __future__ import annotations

import atexit
import logging
import select
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from taskd.checkpoint import flat, flat_memory
from taskd.checkpoint.draft import Draft
from taskd.checkpoint.names import Kind
from taskd.clock import MonotonicClock
from taskd.errors import CheckpointError, TaskdError

if TYPE_CHECKING:
    from taskd.checkpoint.flat_memory import Origin
    from taskd.mindspore.memory import Memory

log = logging.getLogger(__name__)

_LOOK_S = 0.05
_LIMIT_S = 1800.0  # a part that has not come by then is not waited for


class Periodic:
    """One per rank and life."""

    def __init__(self, rank: int, memory: Memory, origin: Origin, keep: int) -> None:
        self._rank, self._memory, self._origin, self._keep = rank, memory, origin, keep
        self._thread: threading.Thread | None = None
        atexit.register(self.wait)  # the script may be over before the last one is written

    def wait(self) -> None:
        """Return when what was begun is written, or given up."""
        if self._thread is not None:
            self._thread.join()

    def save(self, step: int) -> None:
        """Begin to write the snapshot of this step, which was taken a moment ago."""
        self.wait()
        is_begun = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(step, is_begun), name="taskd-saver", daemon=True
        )
        self._thread.start()
        is_begun.wait()  # until it holds the lock: the next snapshot waits for that

    def _run(self, step: int, is_begun: threading.Event) -> None:
        origin = self._origin
        draft = Draft(
            Path(origin.directory), origin.job, Kind.PERIODIC, step, origin.attempt,
            tuple(range(origin.world_size)), origin.generation, origin.world_size,
        )  # fmt: skip
        try:
            with self._memory.lock:
                is_begun.set()
                _, state = flat_memory.open_snapshot(self._memory.arenas, step)
                flat.write(draft, self._rank, state)
            if self._rank == draft.publisher:
                self._publish(draft)
        except (TaskdError, OSError) as error:
            if self._rank == draft.publisher:
                draft.withdraw()  # what the others write there is of no use
            log.warning(
                "rank %d: the checkpoint of step %d could not be saved, the previous ones stay: %s",
                self._rank,
                step,
                error,
            )

    def _publish(self, draft: Draft) -> None:
        clock = MonotonicClock()
        deadline = clock.now() + _LIMIT_S
        while missing := draft.missing():
            if clock.now() >= deadline:
                draft.withdraw()
                raise CheckpointError(
                    f"{draft}: given up: no part of rank {', '.join(map(str, missing))}"
                )
            select.select([], [], [], _LOOK_S)
        flat.publish(draft, self._origin.framework, self._keep)
