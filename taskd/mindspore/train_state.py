"""`taskd.mindspore.TrainState`: what a MindSpore script must not lose.

Owns the step, and when a snapshot or a checkpoint of it is made. What is in it: all parameters of
the network and the optimizer, the position in the data set, MindSpore's random generator.
"""

from __future__ import annotations

import logging
import os
import time
from typing import TYPE_CHECKING, Any

from taskd import streams
from taskd.checkpoint.flat_memory import Origin
from taskd.config import checkpoint_directory, job_id
from taskd.config.job import grace
from taskd.config.msrun import door, own_rank, world_size_or_one
from taskd.errors import StateError
from taskd.mindspore.agreement import Agreement
from taskd.mindspore.callback import Commit
from taskd.mindspore.content import Content
from taskd.mindspore.internals import framework, say_differences, set_first_step
from taskd.mindspore.link import of_process
from taskd.mindspore.memory import Memory
from taskd.mindspore.periodic import Periodic
from taskd.mindspore.restoring import find
from taskd.mindspore.sigterm import SaveAtTheEnd
from taskd.mindspore.spacing import Spacing
from taskd.native.arenas import Arenas
from taskd.native.black_box import Phase

if TYPE_CHECKING:
    from pathlib import Path

    from taskd.checkpoint.flat import Flat
    from taskd.mindspore.restoring import Found

log = logging.getLogger(__name__)

_BATCHES = "batches"  # a note that travels with a state


class TrainState:
    """The training state of one script run; see `taskd.mindspore`."""

    def __init__(
        self,
        network: Any,
        optimizer: Any = None,
        *,
        dataset: Any = None,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        checkpoint_every: int | None = None,
        checkpoint_keep: int = 3,
        snapshot_every: int | None = None,
        **others: Any,
    ) -> None:
        """Looks at the parameters; changes none.

        Args:
            network, optimizer: Cells: all their parameters are kept. `others`: more of them, for
                example `loss_scale=` of a train network.
            dataset: the data set that is trained with: `restore()` sets its first step.
            checkpoint_dir: where checkpoints are, by default TASKD_CHECKPOINT_DIR.
            checkpoint_every: steps between two checkpoints on the disk; None: only at the end.
            checkpoint_keep: how many of these are left.
            snapshot_every: steps between two copies in the memory of the node: so many at most are
                done again after a fault, less one. None: chosen by what a copy takes beside a step,
                so that commits are at most 1 % of the time (`taskd.mindspore.spacing`).

        Raises:
            StateError: two parameters have one name, or a number is not 1 or more.
        """
        for name, number in (
            ("checkpoint_every", checkpoint_every), ("checkpoint_keep", checkpoint_keep),
            ("snapshot_every", snapshot_every),
        ):  # fmt: skip
            if number is not None and (not isinstance(number, int) or number < 1):
                raise StateError(
                    f"TrainState: {name}={number!r} is not accepted: expected 1 or more"
                )
        say_differences()
        cells = {"network": network, "optimizer": optimizer, **others}
        self._cells = {role: cell for role, cell in cells.items() if cell is not None}
        self._content = Content(self._cells)  # what cannot be kept is said now
        self._dataset = dataset
        self._directory: Path = checkpoint_directory(checkpoint_dir).absolute()
        self._checkpoint_every, self._checkpoint_keep = checkpoint_every, checkpoint_keep
        self._spacing = Spacing(snapshot_every)
        self._agreement: Agreement | None = None
        self._committed_at: float | None = None
        self._began_at = time.monotonic()
        self._link = of_process(door(), own_rank())
        self._arenas = Arenas.create() if self._link is None else self._link.arenas
        self._memory = Memory(self._arenas, self._content)
        self._origin: Origin | None = None  # known after restore()
        self._rank = 0
        self._periodic: Periodic | None = None
        self._restored_at = 0.0
        self._notes: dict[str, str] = {}
        self._is_first = True
        self.step = 0

    # ------------------------------------------------------------------ where it is

    @property
    def batches(self) -> int:
        """Steps of an epoch, as the data set says; 0: there is none."""
        return 0 if self._dataset is None else int(self._dataset.get_dataset_size())

    @property
    def epoch(self) -> int:
        """Epochs that are complete: `initial_epoch` of `Model.train`."""
        return self.step // self.batches if self.batches else 0

    @property
    def step_in_epoch(self) -> int:
        """Steps of the present epoch that are done."""
        return self.step % self.batches if self.batches else self.step

    @property
    def parameter_names(self) -> set[str]:
        """Of all parameters that are kept."""
        return self._content.names

    # ------------------------------------------------------------------ restore

    def restore(self) -> int:
        """Go on from the newest step that all ranks have; returns it, 0 for the beginning.

        Call it once, on every rank, after `mindspore.communication.init()`, and after
        `Model.build()` where a graph divides parameters.

        Raises:
            StateError: there are other ranks, and no communication yet; or what was saved is of
                another network.
            CheckpointError: the directory of checkpoints cannot be read.
        """
        agreement = self._agreement = Agreement(world_size_or_one())
        self._content = Content(self._cells)  # a graph may have divided parameters meanwhile
        self._memory = Memory(self._arenas, self._content)
        self._rank, held = agreement.rank, self._link
        job = job_id() if held is None else held.job_id
        found = find(self._arenas, self._directory, job, agreement)
        if found.state is not None:
            self._take_over(found.state, found.step)
        self._arenas.forget_after(found.kept_until)
        generation = 0 if held is None else held.generation
        self._origin = Origin(
            os.fspath(self._directory), job, found.attempt, agreement.world_size, generation,
            framework(),
        )  # fmt: skip
        if self._checkpoint_every is not None:
            self._periodic = Periodic(self._rank, self._memory, self._origin, self._checkpoint_keep)
        if held is None:
            SaveAtTheEnd(self._rank, self._memory, grace())
        else:
            held.box.mark_version(found.step)
            held.box.mark_phase(Phase.ENTERED)
        self._notes = {_BATCHES: str(self.batches)}
        if found.step not in self._arenas.versions() and found.state is not None:
            # Ranks that end in their first step have this one in common, and no other.
            self._memory.take(found.step, self._origin, self._notes)
        self._say(found)
        self._restored_at = time.monotonic()
        return self.step

    def _take_over(self, state: Flat, step: int) -> None:
        self._content.load(state.layout, state.data)
        self.step = step
        batches = int(state.notes.get(_BATCHES, "0"))
        if self._dataset is not None:
            if batches and batches != self.batches:
                log.warning(
                    "the data set has %d steps in an epoch, and had %d when step %d was saved: "
                    "which samples come next is another order",
                    self.batches,
                    batches,
                    step,
                )
            set_first_step(self._dataset, step)

    def _say(self, found: Found) -> None:
        what = "starts at" if found.state is None else "goes on after"
        streams.tell(f"taskd: rank {self._rank} {what} step {found.step}, from {found.where}\n")

    # ------------------------------------------------------------------ commit

    def callback(self) -> Commit:
        """The `Callback` for `Model.train` that commits each step."""
        return Commit(self)

    def commit(self, steps: int = 1) -> None:
        """So many steps more are complete, on this rank. Call it as often on every rank.

        Raises:
            StateError: before `restore()`, or a parameter has had another shape there.
        """
        if self._origin is None:
            raise StateError("TrainState.commit(): call restore() first, on every rank")
        began_at = time.monotonic()
        box = None if self._link is None else self._link.box
        if box is not None:
            box.mark_phase(Phase.COMMIT)
        before, self.step = self.step, self.step + steps
        is_saved = self._is_due(before, self._checkpoint_every)
        is_kept, kept_s = False, 0.0
        if is_saved or self._is_due(before, self._spacing.steps):
            taken_at = time.monotonic()
            is_kept = self._memory.take(self.step, self._origin, self._notes)
            kept_s = time.monotonic() - taken_at
        if box is not None:
            box.mark_version(self.step)
            box.mark_step(is_first=self._is_first)
            box.mark_phase(Phase.STEP)
        if self._is_first:
            self._is_first = False
            self._report_first_step(before)
        self._measure(began_at, steps, kept_s if is_kept else None, kept_s)
        if is_saved and self._periodic is not None:
            self._periodic.save(self.step, self._notes, is_kept=is_kept)
        self._committed_at = time.monotonic()

    def _measure(
        self, began_at: float, steps: int, snapshot_s: float | None, kept_s: float
    ) -> None:
        """What this commit has cost; now and then the ranks choose how far snapshots are apart."""
        step_s = None if self._committed_at is None else (began_at - self._committed_at) / steps
        self._spacing.add(step_s, snapshot_s, time.monotonic() - began_at - kept_s)
        if not self._spacing.is_due or self._agreement is None:
            return
        rows = self._agreement.gather(self._spacing.own())
        if self._spacing.adopt(rows) and self._rank == 0:
            step, took = min(row[0] for row in rows) / 1e3, max(row[1] for row in rows) / 1e3
            streams.tell(
                f"taskd: from step {self.step} on there is a snapshot every {self._spacing.steps} "
                f"steps: it takes {took:.2f} ms, beside {step:.1f} ms of a step\n"
            )

    def _is_due(self, before: int, every: int | None) -> bool:
        return every is not None and self.step // every > before // every

    def _report_first_step(self, before: int) -> None:
        if self._link is not None and self._link.generation > 0:
            self._link.report_first_step(
                before, self._restored_at - self._began_at, time.monotonic() - self._restored_at
            )
