"""Parameters that no optimizer trains, in modules in which others are trained.

Most are frozen and never change. But a forward pass may write them (the key encoder of MoCo, the
target network of BYOL, in one module with what is trained), and then an interrupted step must not
leave that behind. Which ones are written is seen from one commit to the next
(`taskd.worker.objects.still`); these are copied at every commit from then on, as buffers are that
change. The first time that an interrupted step writes one, the copy is torn. The table of an
embedding with `max_norm` is trained, and is one of them all the same: its forward pass writes the
rows that it looks up. Knows no wholly untrained roles: `Rollback` has them.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch
from torch import nn

from taskd.worker.objects import memory, units
from taskd.worker.objects.memory import Kept
from taskd.worker.objects.roles import parameters_of
from taskd.worker.objects.still import Still

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from taskd.worker.objects.roles import Roles

log = logging.getLogger(__name__)


class Untrained:
    """Those of one TrainState in one entry."""

    def __init__(self, roles: Roles) -> None:
        self._roles = roles
        self._others: Callable[[], Iterable[Roles]] = tuple
        self._first: list[Kept] = []  # of which the first commit tells whether they change
        self._still = Still()  # have not changed so far
        self.moving: list[Kept] = []  # copied at every commit
        self.normed: set[int] = set()  # the tables (by id) of embeddings with max_norm
        self._uncopied: list[Kept] = []  # change, and there was no memory for a copy
        self._has_committed = False

    def begin(
        self,
        followers: Collection[int],
        known: Collection[str],
        others: Callable[[], Iterable[Roles]] = tuple,
    ) -> None:
        """At restore().

        Args:
            followers: parameters (by id) of roles that stay as they are.
            known: names of those that were `moving` in the entry before.
            others: what the other TrainStates hold by now.
        """
        self._others = others
        self._first, self._still, self.moving, self._uncopied = [], Still(), [], []
        self._has_committed = False
        self.normed = {
            id(part.weight)
            for module in self._roles.modules.values()
            for part in module.modules()
            if isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.max_norm is not None
        }
        seen = {*followers, *(self._trained() - self.normed)}
        for role, module in self._roles.modules.items():
            if units.has_any([module]):  # what FSDP1 shards is written where it likes
                continue
            for path, part in module.named_modules():
                for key, tensor in part._parameters.items():
                    if tensor is None or id(tensor) in seen:
                        continue
                    seen.add(id(tensor))
                    if tensor.requires_grad and self._roles.steppers:
                        continue  # an optimizer that is not torch's does not tell what it has
                    name = ".".join(word for word in (role, path, key) if word)
                    kept = Kept(name, part, key, tensor, is_parameter=True)
                    is_moving = name in known or id(tensor) in self.normed
                    (self.moving if is_moving else self._first).append(kept)
        for kept in self._first:
            kept.note()
        self._copy(self.moving)

    def _trained(self) -> set[int]:
        """Parameters (by id) that an optimizer writes, also that of another TrainState."""
        return {
            id(parameter)
            for roles in (self._roles, *self._others())
            for optimizer in roles.optimizers.values()
            for parameter in parameters_of(optimizer)
            if parameter.requires_grad or parameter in optimizer.state
        }

    def remember(self, *, is_due: bool) -> None:
        """At commit(). `is_due`: the contents are to be compared, too."""
        written = []
        if not self._has_committed:
            written = self._sort_first()
        elif self._still.kept:
            written = self._still.take_written(is_due=is_due)
        if written:
            trained = self._trained()
            # what the script has thawed is written by its optimizer
            self.moving += [kept for kept in written if id(kept.tensor) not in trained]
        if self.moving:
            self._copy(self.moving)
        for kept in self._uncopied:
            kept.note()
        self._has_committed = True

    def _sort_first(self) -> list[Kept]:
        """Find what was written before the first commit, by its content.

        DDP may spread its first weights, which raises version counters and changes nothing.
        """
        first, self._first = self._first, []
        samples = [kept.sample_now() for kept in first]
        written = set(memory.changed([kept.sample for kept in first], samples))
        still = [kept for index, kept in enumerate(first) if index not in written]
        for kept in still:
            kept.note()
        self._still.hold(still)
        return [first[index] for index in sorted(written)]

    def _copy(self, wanted: list[Kept]) -> None:
        """Where there is no memory for the copies, training goes on without them."""
        try:
            memory.copy_all(wanted)
        except torch.OutOfMemoryError as error:
            log.warning(
                "%s and %d other parameters are written between commits although no optimizer "
                "trains them, and there is no memory for copies (%s): if a fault finds them "
                "changed, this rank needs the copy of another one",
                wanted[0].name,
                len(wanted) - 1,
                str(error).partition("\n")[0],
            )
            self.moving = []
            self._uncopied += wanted
            for kept in wanted:
                kept.copy = None

    def roll_back(self) -> str:
        """Make them what they were at the last commit. Returns "", or which one cannot be."""
        for kept in self.moving:
            if kept.copy is not None:
                kept.put_back()
        # at each commit these are noted: those to come, until the first one, and the uncopied ones
        noted = [*self._first, *self._uncopied]
        samples = [kept.sample_now() for kept in noted]
        differing = memory.changed([kept.sample for kept in noted], samples)
        written = [noted[index] for index in differing]
        written += [kept for kept in self._uncopied if kept.is_written()]
        written += self._still.written()
        if written:
            trained = self._trained() - self.normed
            written = [kept for kept in written if id(kept.tensor) not in trained]
        if not written:
            return ""
        return (
            f"parameter {written[0].name} was written by something else than a registered "
            "optimizer since the last commit(), and no copy of it was kept"
        )
