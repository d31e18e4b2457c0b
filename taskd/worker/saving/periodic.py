"""Checkpoints that the script asks for: at once, or every n commits.

Then the state is copied aside, and written while training goes on.

Owns the copy and the life of the writer; what is written and how is
`taskd.worker.saving.contents` and `taskd.checkpoint.saver`. One per entry of the function that
asked for checkpoints: after a fault a new one begins, and what the old one had not finished is
given up.
"""

from __future__ import annotations

import functools
import logging
import secrets
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from taskd.checkpoint.draft import Draft
from taskd.checkpoint.names import Kind
from taskd.checkpoint.pieces import Held, Piece, Pieces, divide
from taskd.checkpoint.publish import publish
from taskd.checkpoint.save import write
from taskd.checkpoint.saver import Saver
from taskd.checkpoint.values import Packed, pack
from taskd.errors import CheckpointError, StateError, TaskdError
from taskd.native.black_box import Phase
from taskd.worker.saving import contents
from taskd.worker.saving.grace import check_grace
from taskd.worker.state.agreement import Agreement
from taskd.worker.state.phases import checkpointing, renew

if TYPE_CHECKING:
    from taskd.worker.life import Life
    from taskd.worker.state.holding import Holding

log = logging.getLogger(__name__)

_LOOK_S = 0.05  # how soon an interrupt is noticed while the disk is waited for
_RENEWED_S = 10.0  # how often a rank says that it waits for others, and is no hang itself


class Periodic:
    """Of the TrainState `holding`: it saves all TrainStates of the entry.

    All ranks make one at the same place.
    """

    def __init__(self, life: Life, holding: Holding, every: int, keep: int) -> None:
        if life.world_size > 1 and not dist.is_initialized():
            message = (
                f"TrainState({holding.name!r}, checkpoint_every={every}): call "
                "init_process_group() before restore(): all ranks save together"
            )
            raise StateError(message)
        (attempt,) = Agreement(life, "saver").broadcast([secrets.token_hex(8)])
        self._life, self._writers, self._is_due = life, tuple(range(life.world_size)), False
        self._saver = Saver(
            contents.directory_of(life, life.records.states),
            job=life.job_id,
            rank=life.world_rank,
            writers=self._writers,
            attempt=attempt,
            generation=life.plan.generation,
            world_size=life.world_size,
            every=every,
            keep=keep,
            told=functools.partial(check_grace, life),
        )

    def commit(self) -> None:
        """A version is complete.

        If it is one to save: wait for the one before to be on the disk, copy this rank's share, and
        begin to write it.

        A TrainState that is between its optimizer's step and its commit puts it off to the commit
        that ends that. What cannot be saved is a warning: training goes on.

        It is said to be a checkpoint: other ranks may be done with theirs, and wait for this one.
        """
        life, version = self._life, self._life.records.version
        assert version is not None
        self._is_due = self._is_due or self._saver.is_due(version)
        if not self._is_due or life.records.is_half_way:
            return
        self._is_due = False
        with checkpointing():
            self.wait()
            self._begin(version)

    def _begin(self, version: int) -> None:
        life = self._life
        try:
            state, own = self._copy(version)
        # whatever a user's state_dict() raises: the other ranks wait for this one's part
        except Exception as error:
            log.warning(
                "rank %d: the checkpoint of version %d could not be saved, the previous "
                "ones stay: %s",
                life.rank,
                version,
                error,
                exc_info=not isinstance(error, TaskdError),
            )
            self._saver.refuse(version, str(error) or type(error).__name__)
        else:
            self._saver.save(version, state, own, tuple(sorted(life.records.states)))

    def _copy(self, version: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """This rank's share of the state, and what is its own, which is a copy already.

        Plain values (lists, dicts, tensors in them) change in place as tensors do.
        """
        life = self._life
        state = contents.shared(life, life.records.states, self._writers)
        pieces, values = divide(state, life.world_rank, self._writers, life.world_size)
        copied: dict[str, list[Piece]] = {}
        for name, piece in pieces:
            copied.setdefault(name, []).append(replace(piece, tensor=_copied(piece.tensor)))
        shares: dict[str, Any] = {name: Pieces(parts) for name, parts in copied.items()}
        return {
            **{name: Held(Packed(pack(name, value)), (life.world_rank,)) for name, value in values},
            **shares,
        }, contents.own(life, version)

    def wait(self) -> None:
        """Until everything is on the disk, or given up. An interrupt may be raised from here."""
        if self._saver.wait(0):
            return
        with checkpointing():
            renewed_at = time.monotonic()
            while not self._saver.wait(_LOOK_S):
                now = time.monotonic()
                if self._saver.awaits_others and now - renewed_at >= _RENEWED_S:
                    renewed_at = now
                    renew(Phase.CHECKPOINT)

    def abandon(self) -> None:
        """The entry is over, perhaps because a rank is dead whose part would be waited for."""
        self._saver.abandon()


def save(life: Life, directory: Path) -> Path:
    """Write a checkpoint of all TrainStates of the entry, and return when it is published.

    All ranks are at this place.

    Raises:
        CheckpointError: it could not be written, on this rank or another; nothing of it is left.
            The same on all ranks.
        StateError: there is nothing to save yet, a TrainState is half way, or there is no process
            group.
    """
    version = life.records.version
    assert version is not None
    agreement = Agreement(life, "save")
    (attempt,) = agreement.broadcast([secrets.token_hex(8)])
    writers = tuple(range(life.world_size))
    draft = Draft(
        directory,
        life.job_id,
        Kind.SAVED,
        version,
        attempt,
        writers,
        life.plan.generation,
        life.world_size,
        states=tuple(sorted(life.records.states)),
    )
    try:
        return _save(life, draft, agreement)
    # An interrupt too: a draft that is not published is worth nothing.
    except BaseException:
        if life.world_rank == draft.publisher:
            draft.withdraw()
        raise


def _save(life: Life, draft: Draft, agreement: Agreement) -> Path:
    problem, path = "", ""
    try:
        write(
            draft,
            life.world_rank,
            contents.shared(life, life.records.states, draft.writers),
            contents.own(life, draft.version),
        )
    except (TaskdError, OSError) as error:
        problem = f"rank {life.rank}: {error}"
    problems = agreement.gather(problem)
    if not problems and life.world_rank == draft.publisher:
        try:
            path = str(publish(draft))
        except CheckpointError as error:
            problems = [str(error)]
    path, *problems = agreement.broadcast([path, *problems])
    if problems:
        raise CheckpointError(problems[0])
    return Path(path)


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """In host memory that training does not change."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu").copy_(tensor.detach())
