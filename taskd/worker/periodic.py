"""Periodic checkpoints: every n commits the state is copied aside, and written while training goes on.

Owns the copy and the life of the writer; what is written and how is `taskd.worker.saving` and `taskd.checkpoint.saver`. One per entry of
the function that asked for checkpoints: after a fault a new one begins, and what the old one had not finished is given up.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

import torch

from taskd.checkpoint.pieces import Piece, Pieces, divide
from taskd.checkpoint.saver import Saver
from taskd.worker.council import Council
from taskd.worker.saving import contents, directory_of

if TYPE_CHECKING:
    from taskd.worker.holding import Holding
    from taskd.worker.life import Life

_LOOK_S = 0.05     # how soon an interrupt is noticed while the disk is waited for


class Periodic:
    """Of the TrainState `holding`: it saves all TrainStates of the entry. All ranks make one at the same place."""

    def __init__(self, life: Life, holding: Holding, every: int, keep: int) -> None:
        (attempt,) = Council(life, "saver").say([secrets.token_hex(8)])
        self._life, self._writers = life, tuple(range(life.world_size))
        self._saver = Saver(
            directory_of({holding.name: holding}).absolute(), job=life.job_id, rank=life.rank, writers=self._writers,
            attempt=attempt, generation=life.generation, world_size=life.world_size, every=every, keep=keep, states=tuple(sorted(life.states)),
        )  # fmt: skip

    def commit(self) -> None:
        """A version is complete. If it is one to save: wait for the one before to be on the disk, copy this rank's share, and begin to write it."""
        life = self._life
        if life.version is None or not self._saver.is_due(life.version):
            return
        self.wait()
        state, own = contents(life, life.states, life.version)
        pieces, values = divide(state, life.rank, self._writers)
        copied: dict[str, list[Piece]] = {}
        for name, piece in pieces:
            copied.setdefault(name, []).append(Piece(piece.global_shape, piece.offsets, _copied(piece.tensor)))
        self._saver.save(life.version, {**dict(values), **{name: Pieces(parts) for name, parts in copied.items()}}, own)

    def wait(self) -> None:
        """Until everything is on the disk, or given up. An interrupt may be raised from here."""
        while not self._saver.wait(_LOOK_S):
            pass

    def abandon(self) -> None:
        """The entry is over, perhaps because a rank is dead whose part would be waited for."""
        self._saver.abandon()


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """In host memory that training does not change."""
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())
