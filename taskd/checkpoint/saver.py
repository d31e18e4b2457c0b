"""Periodic checkpoints, written in the background of the training.

Each rank has a Saver; the ranks do not wait for each other. What they write meets in a draft's
folder, where the first rank's Saver publishes it (see draft.py). A rank that dies leaves a draft
that is never published; the next one is another folder, and whoever publishes there deletes the
former one: its writers have ended, or have said that they left it.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from taskd.checkpoint.draft import Draft, leave_former
from taskd.checkpoint.finish import tidy
from taskd.checkpoint.names import Kind
from taskd.checkpoint.publish import publish
from taskd.checkpoint.save import refuse, write
from taskd.errors import CheckpointError
from taskd.threads import start_thread

log = logging.getLogger(__name__)

# How soon the publisher sees that the last part is there. Each look lists one folder.
_LOOK_S = 0.05
# a part that has not come by then is not waited for: facts about dumps on shared storage say
# minutes
_LIMIT_S = 1800.0
# Between the same commit on two ranks, and the beginnings of their parts: what is written behind
# the removal of a draft stays until the next checkpoint begins.
_BEGIN_S = 10.0


class Saver:
    """Writes the checkpoints of one rank, in one series of writings.

    Args:
        directory, job, attempt, writers, generation, world_size: see Draft. After a fault make a
            new Saver with a new attempt.
        rank: this one.
        every: versions between two checkpoints.
        keep: how many periodic ones are left.
        limit_s: how long the publisher waits for the parts of others once its own is written.
        told: gets the seconds that each took to write, on the rank that publishes.
    """

    def __init__(
        self,
        directory: Path,
        *,
        job: str,
        rank: int,
        writers: tuple[int, ...],
        attempt: str,
        generation: int,
        world_size: int,
        every: int,
        keep: int,
        limit_s: float = _LIMIT_S,
        told: Callable[[float], object] = lambda _: None,
    ) -> None:
        if every < 1 or keep < 1:
            raise CheckpointError(f"job {job}: every {every}, keep {keep}: expected at least 1")
        self._draft_of = lambda version: Draft(
            directory,
            job,
            Kind.PERIODIC,
            version,
            attempt,
            writers,
            generation,
            world_size,
        )
        self._rank, self._every, self._keep, self._limit_s = rank, every, keep, limit_s
        self._told = told
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._has_left = False  # the drafts of the attempts before this one
        # Its own part is written: it waits for those of others, at most `limit_s`.
        self.awaits_others = False
        self.published: Path | None = None  # the newest, on the rank that publishes
        self.problem: str = ""  # why the last one was not written or published, "" if it was

    def is_due(self, version: int) -> bool:
        """Whether `version` is one to save."""
        return version > 0 and version % self._every == 0

    def save(
        self,
        version: int,
        state: Mapping[str, Any],
        own: Mapping[str, Any] | None = None,
        states: tuple[str, ...] = (),
    ) -> None:
        """Begin to save; as `write`. `states`: the names of the TrainStates in it.

        Waits first until the one before is finished here: training never runs ahead of the disk.

        Neither tensors nor plain values may change until `wait` returns True: give copies, and
        values as `Packed`.
        """
        self.wait()
        draft = replace(self._draft_of(version), states=states)
        self._begin(self._run, draft, state, own)

    def refuse(self, version: int, problem: str) -> None:
        """Instead of `save`: there is nothing to save on this rank.

        The others' parts are not waited for then.
        """
        self.wait()
        try:
            refuse(self._draft_of(version), self._rank, problem)
        except (CheckpointError, OSError) as error:
            log.warning(
                "rank %d: the publisher could not be told that version %d is not saved: %s",
                self._rank,
                version,
                error,
            )
        self.problem = problem
        if self._draft_of(version).publisher == self._rank:
            self._begin(self._give_up, self._draft_of(version))

    def wait(self, timeout_s: float | None = None) -> bool:
        """Whether all that was begun is published or given up here, after at most `timeout_s`."""
        if self._thread is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                return False
            self._thread = None
        return True

    def abandon(self) -> None:
        """Do not wait for the parts of other ranks any more, as one of them may be dead.

        The Saver is of no further use. Does not block.
        """
        self._stop.set()

    def _begin(self, target: Callable[..., None], *arguments: object) -> None:
        self.awaits_others = False
        self._thread = start_thread("taskd-saver", target, *arguments)

    def _run(self, draft: Draft, state: Mapping[str, Any], own: Mapping[str, Any] | None) -> None:
        began = time.monotonic()
        try:
            if not self._has_left:
                leave_former(draft, self._rank)
                self._has_left = True
            if self._rank != draft.publisher:
                write(draft, self._rank, state, own)
            else:
                self._write_and_publish(draft, state, own)
                self._told(time.monotonic() - began)
            self.problem = ""
        # A user's tensors and a user's disk: whatever it is, training goes on.
        except Exception as error:
            self.problem = str(error)
            log.warning(
                "rank %d: the checkpoint of version %d could not be saved, the previous "
                "ones stay: %s",
                self._rank,
                draft.version,
                error,
                exc_info=not isinstance(error, CheckpointError),
            )

    def _write_and_publish(
        self, draft: Draft, state: Mapping[str, Any], own: Mapping[str, Any] | None
    ) -> None:
        if draft.directory.is_dir():  # the room of what was given up may be what this one needs
            tidy(draft, None)
        try:
            write(draft, self._rank, state, own)
        except BaseException:
            self._give_up(draft)
            raise
        self._publish(draft)

    def _give_up(self, draft: Draft) -> None:
        """Nothing is left of it: what others have begun fails with its folder."""
        deadline = time.monotonic() + min(_BEGIN_S, self._limit_s)
        while set(draft.absent()) - {self._rank} and time.monotonic() < deadline:
            if self._stop.wait(_LOOK_S):
                break
        draft.withdraw()

    def _publish(self, draft: Draft) -> None:
        deadline = time.monotonic() + self._limit_s
        self.awaits_others = True
        while missing := draft.missing():
            if self._stop.wait(_LOOK_S) or time.monotonic() > deadline:
                draft.withdraw()
                raise CheckpointError(
                    f"{draft}: given up: no part of rank {', '.join(map(str, missing))}"
                )
        self.awaits_others = False
        self.published = publish(draft, self._keep)
