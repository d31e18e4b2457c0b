"""Checkpoints every n steps, written by a thread from this rank's snapshot while training goes on.

The first rank publishes when all have given their part. A checkpoint that could not be written
costs nothing but itself. Training never runs ahead of the disk: the next one waits for this one,
and so does the snapshot that would take its place. A rank without memory for snapshots writes its
part from the parameters, before the next step.
"""

from __future__ import annotations

import atexit
import logging
import select
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from taskd.checkpoint import flat, flat_memory
from taskd.checkpoint.draft import Draft
from taskd.checkpoint.names import Kind
from taskd.clock import MonotonicClock
from taskd.errors import ArenaError, CheckpointError, TaskdError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from taskd.checkpoint.flat_memory import Origin
    from taskd.mindspore.memory import Memory

log = logging.getLogger(__name__)

_LOOK_S = 0.05
_LIMIT_S = 1800.0  # a part that has not come by then is not waited for
_FAILED_S = 30.0  # nor by then, where it is of no use: its writer may have no room to say so


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

    def save(self, step: int, notes: Mapping[str, str], *, is_kept: bool) -> None:
        """Begin to write this step, the newest one.

        `is_kept`: there is a snapshot of it. Else the parameters have been written when this
        returns.
        """
        self.wait()
        origin = self._origin
        draft = Draft(
            Path(origin.directory), origin.job, Kind.PERIODIC, step, origin.attempt,
            tuple(range(origin.world_size)), origin.generation, origin.world_size,
        )  # fmt: skip
        is_written = is_kept or self._is_done(draft, self._write_parameters, notes)
        is_begun = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(draft, is_begun, is_kept, is_written), name="taskd-saver",
            daemon=True,
        )  # fmt: skip
        self._thread.start()
        is_begun.wait()  # until it holds the lock: the next snapshot waits for that

    def _run(
        self, draft: Draft, is_begun: threading.Event, is_kept: bool, is_written: bool
    ) -> None:
        try:
            if is_kept:
                is_written = self._is_done(draft, self._write_snapshot, is_begun)
        finally:
            is_begun.set()
        if self._rank == draft.publisher:
            self._is_done(draft, self._publish if is_written else self._give_up)

    def _is_done(self, draft: Draft, do: Callable[..., None], *arguments: Any) -> bool:
        """Whether that went well; if not, it is said."""
        try:
            do(draft, *arguments)
        except (TaskdError, OSError) as error:
            log.warning(
                "rank %d: the checkpoint of step %d could not be saved, the previous ones stay: %s",
                self._rank,
                draft.version,
                error,
            )
            return False
        return True

    def _write_snapshot(self, draft: Draft, is_begun: threading.Event) -> None:
        with self._memory.lock:
            is_begun.set()
            try:
                _, state = flat_memory.open_snapshot(self._memory.arenas, draft.version)
            except ArenaError as error:
                flat.refuse(draft, self._rank, f"rank {self._rank}: {error}")
                raise
            flat.write(draft, self._rank, state)

    def _write_parameters(self, draft: Draft, notes: Mapping[str, str]) -> None:
        flat.write(draft, self._rank, *self._memory.flat(notes))

    def _give_up(self, draft: Draft) -> None:
        """Nothing is left of it. A part that began later would make the folder again."""
        clock = MonotonicClock()
        deadline = clock.now() + _FAILED_S
        while self._is_awaited(draft) and clock.now() < deadline:
            select.select([], [], [], _LOOK_S)
        draft.withdraw()

    def _is_awaited(self, draft: Draft) -> bool:
        try:
            return bool(set(draft.missing()) - {self._rank})
        except CheckpointError:  # nobody has begun
            return True

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
