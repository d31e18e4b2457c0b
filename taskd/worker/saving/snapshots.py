"""The snapshots of this rank: when one is made, and what belongs to it.

A snapshot in the arena has every tensor that this rank holds, by its name in a checkpoint
(`taskd.worker.state.flat`), and beside them plain values, global shapes, and the per-rank part.
Copying is `taskd.worker.saving.copier`, memory is `taskd.native.arenas`, putting back is
`taskd.worker.saving.stored`. One per entry of the function; the arenas outlive it, and the process.
"""

from __future__ import annotations

import logging
import pickle
from typing import TYPE_CHECKING, Any, NamedTuple

from taskd.checkpoint.pieces import Held, Piece, holders_of, may_repeat
from taskd.errors import ArenaError, StateError, TaskdError
from taskd.native.arena import capacity_for
from taskd.native.arena_copy import is_mirrored, may_go_on
from taskd.worker.objects import devices
from taskd.worker.objects.named import Named
from taskd.worker.objects.shards import is_distributed, local, memory_of
from taskd.worker.saving import contents
from taskd.worker.saving.copier import Snapshotter
from taskd.worker.saving.stored import Place
from taskd.worker.saving.table import Table
from taskd.worker.state import extras, flat
from taskd.worker.state.logbook import logbook_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import torch

    from taskd.native.arenas import Arenas
    from taskd.worker.life import Life
    from taskd.worker.state.holding import Holding

log = logging.getLogger(__name__)


class Inventory(NamedTuple):
    """The tensors of an entry, from one snapshot to the next.

    `places`: pickled, by name. `changing`: those that a forward pass may change, of which `moving`
    are parameters. `where`: its checkpoints are, and its TrainStates.
    """

    tables: dict[str, Table]
    tensors: dict[str, torch.Tensor]
    places: bytes
    changing: list[str]
    moving: int
    where: tuple[Path, tuple[str, ...]]


class Snapshots:
    """Makes them, in the entry of the function in which a TrainState asked for it."""

    def __init__(self, life: Life, arenas: Arenas, every: int) -> None:
        """Raises StateError: `every` is no number of steps."""
        self._life = life
        self._copier = Snapshotter(arenas.make, every, life.rank, drop_arena=arenas.discard)
        self._copier.adopt(arenas.all())
        self.has_peer = False  # snapshots are to be mirrored
        # by the last vote: no rank needs the older one of its snapshots any more
        self.is_allowed = True
        self._arenas = arenas
        self._is_due, self._problem = False, ""
        self._places: dict[tuple[Any, ...], Place] = {}
        self._inventory: Inventory | None = None

    def prepare(self, states: dict[str, Holding]) -> None:
        """Make the arena now, so that a node without enough memory says so before training begins.

        In a recovery that costs snapshots only. Optimizer memory that is made in the first step is
        not known yet: then only what is there must fit, and the first snapshot makes the arena.

        Raises:
            StateError: there is not enough, at a fresh start.
        """
        try:
            self._prepare(states)
        except ArenaError as error:
            if self._life.plan.version is None:
                message = f"rank {self._life.rank}: {error}"
                raise StateError(message) from error
            self._warn(error)
        except Exception as error:  # noqa: BLE001
            self._warn(error)

    def _prepare(self, states: dict[str, Holding]) -> None:
        held = [
            local(tensor)
            for holding in states.values()
            for tensor in flat.flatten(holding, Named(holding.roles))[0].values()
        ]
        size = sum(tensor.nbytes for tensor in held)
        is_complete = all(
            memory_of(optimizer)
            for holding in states.values()
            for optimizer in holding.roles.optimizers.values()
        )
        if is_complete:
            self._copier.prepare(size)
        elif self._copier.arena is None:
            self._arenas.require(2 * capacity_for(size))

    def _warn(self, error: Exception) -> None:
        if str(error) != self._problem:
            log.warning(
                "rank %d: no snapshot of version %s could be made: %s. The one before it "
                "stays; training goes on",
                self._life.rank,
                self._life.records.version,
                error,
                exc_info=not isinstance(error, TaskdError),
            )
        self._problem = str(error)

    def commit(self) -> None:
        """A version is complete: if it is one to keep, begin to copy.

        It goes on while the next step computes, up to its optimizer.
        """
        records = self._life.records
        version = records.version
        assert version is not None
        self._is_due = self._is_due or (self.is_allowed and self._copier.is_due(version))
        if not self._is_due or records.is_half_way:
            return
        self._is_due = False
        try:
            self._begin(version)
        except Exception as error:  # noqa: BLE001
            self._warn(error)

    def may_replace(self) -> bool:
        """Whether this rank can do without the older of its snapshots.

        The newest is whole, and its mirror too if there is to be one.

        Ranks make a snapshot when all of them can, or none does: else one whose mirror is slow
        could be left with versions that no other has.
        """
        if not self.has_peer:
            return True
        arenas = self._arenas.all()
        return not is_mirrored(arenas) or (self._copier.is_idle and may_go_on(arenas))

    def _begin(self, version: int) -> None:
        life, everybody = self._life, tuple(range(self._life.world_size))
        states: dict[str, Holding] = life.records.states
        tables = {name: self._table(name, holding) for name, holding in states.items()}
        # made anew each time
        further: dict[str, dict[str, torch.Tensor]] = {name: {} for name in tables}
        plain = {
            name: flat.plain(holding, tables[name].named, tables[name].memories, further[name])
            for name, holding in states.items()
        }
        kept = self._inventory
        if (
            kept is None
            or kept.tables != tables
            or kept.moving != _moving(states)
            or any(further.values())
        ):
            kept = self._inventory = self._take_inventory(tables, further)
        values = contents.values(life, states, plain, everybody)
        rest = devices.dumps(
            (kept.places, values, logbook_of(life).blob(version), kept.where), extras.PROTOCOL
        )
        self._copier.commit(version, life.plan.generation, kept.tensors, rest, kept.changing)

    def _table(self, name: str, holding: Holding) -> Table:
        known = None if self._inventory is None else self._inventory.tables.get(name)
        return known if known is not None and known.is_current() else Table(holding)

    def _take_inventory(
        self, tables: dict[str, Table], further: Mapping[str, dict[str, torch.Tensor]]
    ) -> Inventory:
        life, states = self._life, self._life.records.states
        found = {name: {**table.tensors, **further[name]} for name, table in tables.items()}
        caches = {
            cache
            for name, holding in states.items()
            for cache in flat.caches(holding, tables[name].named)
        }
        tensors: dict[str, torch.Tensor] = {}
        places: dict[str, Place] = {}
        for name, item in contents.tensors(
            life, states, found, caches, tuple(range(life.world_size))
        ).items():
            held = item if isinstance(item, Held) else Held(item, ())
            tensors[name] = local(held.value)
            places[name] = self._place(name, held)
        changing = [
            name
            for state, holding in states.items()
            for name in flat.names_of_changing(holding, tables[state].named)
        ]
        where = contents.directory_of(life, states), tuple(sorted(states))
        return Inventory(
            tables, tensors, pickle.dumps(places, extras.PROTOCOL), changing, _moving(states), where
        )

    def _place(self, name: str, held: Held) -> Place:
        tensor: torch.Tensor = held.value
        if not is_distributed(tensor):
            shape, offsets = tuple(tensor.shape), (0,) * tensor.dim()
            return Place(shape, offsets, tensor.dtype, held.holders, held.is_alike)
        key = (id(tensor.device_mesh), tensor.placements, tensor.shape, tensor.dtype)
        # the mesh lives as long as the model, and this as long as the entry
        if key not in self._places:
            piece, here = Piece.of(tensor), self._life.world_rank
            self._places[key] = Place(
                piece.global_shape,
                piece.offsets,
                tensor.dtype,
                holders_of(name, tensor, here),
                may_repeat=may_repeat(tensor, here, self._life.world_size),
            )
        return self._places[key]

    def wait(self) -> None:
        """Until nothing is being copied: before an optimizer changes it."""
        self._copier.wait()

    def close(self) -> None:
        """The entry is over.

        What is being copied is finished first: others may need just this version.
        """
        self._copier.wait()
        self._copier.close()


def _moving(states: Mapping[str, Holding]) -> int:
    """How many parameters were seen to change without an optimizer: more and more of them."""
    return sum(len(holding.rollback.untrained.moving) for holding in states.values())
